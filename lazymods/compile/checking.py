"""The shadow mode of ``lm.jit``: each call also runs in plain Python, on copies made before, and both are compared.

If a float differs by more than the tolerance, further plain runs with noise in the inputs measure how far rounding can
move it (``noise``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from lazymods._compat import jit as _compat_jit
from lazymods._errors import LazyError, Problem, one_line
from lazymods._objects.copies import Copies
from lazymods._objects.noise import exact_and_noisy, own
from lazymods._objects.traced_state import TracedState
from lazymods.compile.arguments import Arguments
from lazymods.compile.binding import Binding
from lazymods.compile.given import Given, with_sharing
from lazymods.compile.shadow import compare
from lazymods.compile.trace import Place


def checked(
    name: str,
    function: Any,
    arguments: Arguments,
    call: Binding,
    attributes: list[tuple[Any, str]],
    run: Callable[[], Any],
) -> Any:
    """Run a call in plain Python on copies, then compiled, and compare what came of both.

    Args:
        name: What errors call the function.
        function: The function.
        arguments: Its arguments.
        call: What it reaches.
        attributes: Attributes of modules and classes, by which it finds some of that.
        run: Does the call, compiled.

    Returns:
        What the compiled call returned.

    Raises:
        LazyError: The first difference, by path: in outputs, values, structure, order, metadata, static attributes,
            sharing or random state; or an error that only one of both raised.
    """
    plain = _Plain(function, arguments, call, attributes, own)
    again = [_Plain(function, arguments, call, attributes, make) for make in exact_and_noisy()]
    want, plain_error = None, None
    try:
        want = plain.run()
    except Exception as error:
        plain_error = error
    got = run()
    if plain_error is not None:
        raise LazyError(
            Problem(
                name,
                "a compiled call that ended well",
                f"the error of plain Python: {type(plain_error).__name__}: {one_line(plain_error)}",
                "checkify.check(is_right, message)  # a program takes no decision that raises",
            )
        ) from plain_error
    compare(name, plain.left(want), plain.left_of_call(got), lambda: _results(again))
    return got


def _results(again: Sequence[_Plain]) -> list[list[tuple[str, Any]]]:
    """Return what further runs gave and left behind; nothing of those that fail."""
    found: list[list[tuple[str, Any]]] = []
    for plain in again:
        try:
            found.append(plain.left(plain.run()))
        except Exception:  # noise may lead it to a branch that raises
            found.append([])
    return found


class _Plain:
    """A call that is to be done in plain Python, on copies of all that it reaches.

    Args:
        function: The function.
        arguments: Its arguments.
        call: What it reaches.
        attributes: Attributes of modules and classes, by which it finds some of that.
        own: Makes the array that is in the place of another.
    """

    def __init__(
        self,
        function: Any,
        arguments: Arguments,
        call: Binding,
        attributes: list[tuple[Any, str]],
        own: Callable[[Any], Any],
    ) -> None:
        held = [array for array in call.constants if _compat_jit.is_reference(array)]
        own_held = list(map(own, held))
        copies = Copies(TracedState(call.reach), known={id(a): b for a, b in zip(held, own_held, strict=True)})
        for target, leaf in zip(call.targets, call.values_of_targets(), strict=True):  # the call may donate these
            if isinstance(target, Place):
                copies.give(target.node, target.key, jax.tree.map(own, target.held[target.key]))
            else:
                copies.give(target, None, jax.tree.map(own, leaf))
        apart = {id(array): own(array) for array in arguments.arrays}
        arrays = [apart[id(array)] for array in arguments.arrays]
        given = arguments.given()
        self._args, self._kwargs = with_sharing(given.of, arguments.rebuild(arrays, copies.of), copies.of, {})
        for owner, attribute in attributes:
            copies.swap(owner, attribute)
        self._function, self._copies = copies.of(function), copies
        labels = [f"argument {type(v).__name__}" for v in (*arguments.roots, *arguments.variables)]
        labels += [f"captured {type(v).__name__}" for v in call.captured.values]
        labels += [f"argument {type(v).__name__}" for v in given.things]
        twins = [*map(copies.of, call.reach), *Given(self._args, self._kwargs).things]
        self._twins = [*zip(labels, twins, strict=True)]
        self._originals = [*zip(labels, [*call.reach, *given.things], strict=True)]
        self._arrays = (arrays + own_held, arguments.arrays + held)

    def run(self) -> Any:
        """Do the call, once, and return what it returns."""
        with self._copies.swapped():
            return self._function(*self._args, **self._kwargs)

    def left(self, out: Any) -> list[tuple[str, Any]]:
        """Return by name what was returned and all that the function could change."""
        return [("output", out), *self._twins, *_references(self._arrays[0])]

    def left_of_call(self, out: Any) -> list[tuple[str, Any]]:
        """Return the same of the caller's own objects."""
        return [("output", out), *self._originals, *_references(self._arrays[1])]


def _references(arrays: Sequence[Any]) -> list[tuple[str, Any]]:
    return [("a mutable array", array[...]) for array in arrays if _compat_jit.is_reference(array)]
