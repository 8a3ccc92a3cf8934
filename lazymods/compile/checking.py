"""The shadow mode of ``lm.jit``: each call also runs in plain Python, on copies made before, and both are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from lazymods._compat import jit as _compat_jit
from lazymods._errors import LazyError, Problem, one_line
from lazymods.compile.arguments import Arguments
from lazymods.compile.binding import Binding
from lazymods.compile.copies import Copies
from lazymods.compile.given import Given, with_sharing
from lazymods.compile.picture import Picture
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
    held = [array for array in call.constants if _compat_jit.is_reference(array)]
    own_held = list(map(_own, held))
    copies = Copies(Picture(call.reach), known={id(a): b for a, b in zip(held, own_held, strict=True)})
    _own_arrays(copies, call)
    apart = {id(array): _own(array) for array in arguments.arrays}
    own = [apart[id(array)] for array in arguments.arrays]
    args, kwargs = with_sharing(arguments.given().of, arguments.rebuild(own, copies.of), copies.of, {})
    containers, twins = arguments.given().things, Given(args, kwargs).things
    for owner, attribute in attributes:
        copies.swap(owner, attribute)
    want, plain_error = None, None
    try:
        with copies.swapped():
            want = copies.of(function)(*args, **kwargs)
    except Exception as error:
        plain_error = error
    got = run()
    if plain_error is not None:
        raise LazyError(
            Problem(
                name,
                "a compiled call that ended well",
                f"the error of plain Python: {type(plain_error).__name__}: {one_line(plain_error)}",
                "the check that raises it with jax.debug or checkify; a program takes no decision that raises",
            )
        ) from plain_error
    labels = [f"argument {type(v).__name__}" for v in (*arguments.roots, *arguments.variables)]
    labels += [f"captured {type(v).__name__}" for v in call.captured.values]
    labels += [f"argument {type(v).__name__}" for v in containers]
    compare(
        name,
        [
            ("output", want),
            *zip(labels, [*map(copies.of, call.reach), *twins], strict=True),
            *_references(own + own_held),
        ],
        [
            ("output", got),
            *zip(labels, [*call.reach, *containers], strict=True),
            *_references(arguments.arrays + held),
        ],
    )
    return got


def _own_arrays(copies: Copies, call: Binding) -> None:
    """Let the copies have arrays of their own: the compiled call may donate those, or write to an array of numpy."""
    for target, leaf in zip(call.targets, call.values_of_targets(), strict=True):
        if isinstance(target, Place):
            copies.give(target.node, target.key, jax.tree.map(_own, target.held[target.key]))
        else:
            copies.give(target, None, jax.tree.map(_own, leaf))


def _references(arrays: Sequence[Any]) -> list[tuple[str, Any]]:
    return [("a mutable array", array[...]) for array in arrays if _compat_jit.is_reference(array)]


def _own(value: Any) -> Any:
    if _compat_jit.is_reference(value):
        return jax.new_ref(value[...]) if isinstance(value, jax.Ref) else value.copy()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, jax.Array) and not jax.numpy.issubdtype(value.dtype, jax.dtypes.extended):
        return jax.numpy.array(value, copy=True)
    return value
