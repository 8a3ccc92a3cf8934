"""What :func:`lazymods.autograd.grad` can't differentiate, or not by what it was asked to."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lazymods import _graph
from lazymods._errors import Problem, describe
from lazymods._refusals import ArgumentError
from lazymods.autograd.freezing import trainable


def refuse_argnums(where: str, argnums: Any) -> None:
    """Refuse what is no place of an argument.

    Args:
        where: What it was given to.
        argnums: It.

    Raises:
        ArgumentError: If it is neither an int, an ``nnx.DiffState``, nor several of these.
    """
    several = isinstance(argnums, Sequence) and not isinstance(argnums, str)
    places = argnums if several else [argnums]
    wrong = [a for a in places if not isinstance(a, (int, nnx.DiffState))] or ([] if places else [argnums])
    if wrong:
        needed = "the number of an argument, from 0, an nnx.DiffState, or a tuple of these"
        write = "argnums=0  # or argnums=(0, 1), or argnums=nnx.DiffState(0, nnx.Param)"
        raise ArgumentError(Problem(f"{where}: argnums", describe(wrong[0]), needed, write))
    numbers = [a.argnum if isinstance(a, nnx.DiffState) else a for a in places]
    twice = next((number for number in numbers if numbers.count(number) > 1), None)
    if twice is not None:
        got, needed = f"{argnums!r}, with {twice} twice", "each argument once"
        raise ArgumentError(Problem(f"{where}: argnums", got, needed, "argnums=0  # or argnums=(0, 1)"))


def from_first(where: str, argnums: Any, count: int) -> Any:
    """Return the places of arguments without negative numbers: for those nnx.grad knows no filter.

    Args:
        where: What they were given to.
        argnums: Which arguments to differentiate by; what there is no argument for stays.
        count: How many arguments there are.

    Raises:
        ArgumentError: If two places are one argument.
    """

    def counted(place: Any) -> Any:
        if isinstance(place, nnx.DiffState):
            return dataclasses.replace(place, argnum=counted(place.argnum))
        return place + count if -count <= place < 0 else place

    if isinstance(argnums, (int, nnx.DiffState)):
        return counted(argnums)
    places = tuple(map(counted, argnums))
    refuse_argnums(where, places)
    return places


def refuse_arguments(where: str, argnums: Any, args: Sequence[Any]) -> None:
    """Refuse to differentiate by what has no derivative: integers, and modules of which all is frozen.

    Args:
        where: What the arguments were given to.
        argnums: Which of them to differentiate by.
        args: The arguments.

    Raises:
        ArgumentError: If there is one; of all that there are.
    """
    problems: list[Problem] = []
    for place in [argnums] if isinstance(argnums, (int, nnx.DiffState)) else argnums:
        number, selected = (place.argnum, place.filter) if isinstance(place, nnx.DiffState) else (place, trainable)
        if 0 <= number < len(args):
            problems += _reasons_against(f"{where}: argument {number}", args[number], selected)
        else:
            needed = f"a number below {len(args)}, the number of arguments"
            problems.append(Problem(f"{where}: argnums", describe(number), needed, "argnums=0  # for the first one"))
    if problems:
        raise ArgumentError(*problems)


def _reasons_against(where: str, argument: Any, selected: Any) -> Iterator[Problem]:
    leaves = jax.tree_util.tree_leaves_with_path(argument, is_leaf=_graph.is_object)
    for path, leaf in leaves:
        place = where + jax.tree_util.keystr(path)
        if isinstance(leaf, nnx.Variable):  # which nnx.grad takes as it is, whatever the filter says
            if isinstance(leaf, nnx.Param) and selected is trainable and not _graph.is_trained(leaf):
                yield _frozen(place, f"{describe(leaf)}, which is frozen")
            yield from _no_number(place, leaf)
        elif not _graph.is_object(leaf):
            yield from _no_number(place, leaf)
    if leaves and all(isinstance(leaf, nnx.Pytree) for _, leaf in leaves):
        yield from _nothing_selected(where, argument, nnx.filterlib.to_predicate(selected))


def _nothing_selected(where: str, argument: Any, selects: Callable[[Any, Any], bool]) -> Iterator[Problem]:
    """Say so if all that could be selected is frozen, and of what is selected what has no derivative."""
    frozen = found = False
    for entry in _graph.entries(argument):
        if selects(entry.path, entry.value):
            found = True
            yield from _no_number(f"{where}: {entry.name}", entry.value)
        elif isinstance(entry.value, nnx.Param):
            frozen = frozen or not _graph.is_trained(entry.value)
    if frozen and not found:
        yield _frozen(where, "frozen parameters and no others")


def _frozen(where: str, got: str) -> Problem:
    needed = "a parameter that is trained: those that are frozen have no gradient"
    write = "lm.autograd.requires_grad_(model)  # before; or argnums=nnx.DiffState(0, nnx.Param) for all the same"
    return Problem(where, got, needed, write)


def _no_number(where: str, value: Any) -> Iterator[Problem]:
    raw = value.get_raw_value() if isinstance(value, nnx.Variable) else value
    if not _graph.is_placeholder(value) and not _is_inexact(raw):
        needed = "real or complex numbers: nothing else has a derivative"
        write = "x.astype(jnp.float32)  # where it is made; or another argnums"
        yield Problem(where, describe(value), needed, write)


def _is_inexact(value: Any) -> bool:
    known = isinstance(value, (bool, int, float, complex)) or hasattr(value, "dtype")
    return known and jnp.issubdtype(jnp.result_type(value), jnp.inexact)


def returning_scalar(where: str, fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """Return a function that refuses to return what has no gradient.

    Args:
        where: What ``fn`` was given to.
        fn: The function.
        has_aux: Whether it returns a pair.

    Returns:
        The function; it raises an :class:`~lazymods.ArgumentError`.
    """

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        out = fn(*args, **kwargs)
        if has_aux and not (isinstance(out, (tuple, list)) and len(out) == 2):
            needed, write = "a pair, since has_aux=True: the scalar, and what else there is", "return loss, aux"
            raise ArgumentError(Problem(f"{where}: what fn returned", describe(out), needed, write))
        value = out[0] if has_aux else out
        known: Any = value
        if not hasattr(value, "dtype") and not isinstance(value, (bool, int, float, complex, type(None))):
            needed, write = "one real number: its gradient is what is asked for", "return loss"
            if isinstance(value, (tuple, list)) and not has_aux:
                write += "  # or has_aux=True, for the pair of it and what else there is"
            raise ArgumentError(Problem(f"{where}: what fn returned", describe(value), needed, write))
        if np.shape(known) != () or jnp.iscomplexobj(value) or not _is_inexact(value):
            needed = "one real number: its gradient is what is asked for"
            raise ArgumentError(Problem(f"{where}: what fn returned", describe(value), needed, _line(value)))
        return out

    del checked.__wrapped__  # nnx.grad would look for keyword arguments in the signature of fn
    return checked


def _line(value: Any) -> str:
    if value is None:
        return "return loss"
    if np.shape(value) != ():
        return "loss.mean()  # or loss.sum()"
    return "loss.real  # or jnp.abs(loss)" if jnp.iscomplexobj(value) else "loss.astype(jnp.float32)"
