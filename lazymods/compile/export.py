"""A function or model as an artifact that runs without Python code of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from lazymods._errors import LazyError, Problem
from lazymods._frames import entry
from lazymods._objects.tokens import TokenKind, kind_of
from lazymods.compile.lowering import staged
from lazymods.compile.replay import result_of
from lazymods.compile.stages import Staged


@entry
def export(fn_or_module: Any, *args: Any, platforms: str | Sequence[str] = ("cpu",), **kwargs: Any) -> bytes:
    """Serialize a function or module with its state, for any number of platforms.

    The state of every nnx object that it reaches, by argument or otherwise, is part of the artifact. What it would
    write to that state is not: the artifact is a function of arrays. Nothing is changed.

    Args:
        fn_or_module: A function, a module, or what :func:`lazymods.jit` returned.
        *args: Its arguments; ``jax.ShapeDtypeStruct`` will do for arrays, with symbolic sizes too.
        platforms: What it shall run on, one or several: ``cpu``, ``cuda``, ``rocm``, ``tpu``.
        **kwargs: Its keyword arguments.

    Returns:
        Bytes for ``jax.export.deserialize``. Its ``call`` takes the arguments that are neither nnx objects nor static.

    Raises:
        ArgumentError: If ``fn_or_module`` can't be called, or an argument is no input.
        LazyError: If flatbuffers is not installed, or the function returns an nnx object.
        jax.errors.ConcretizationTypeError: If Python decides on the value of an array: that is many programs.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import lazymods as lm
        >>> from flax import nnx
        >>> blob = lm.export(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 3)), platforms=("cpu", "cuda"))
        >>> jax.export.deserialize(bytearray(blob)).call(jnp.ones((2, 3))).shape
        (2, 4)
    """
    from jax import export as jax_export  # jax.export is not imported with jax

    platforms = (platforms,) if isinstance(platforms, str) else platforms
    function = staged(fn_or_module, "lm.export")
    with function.traced(args, kwargs) as (program, call):
        inputs = call.inputs
        leaves = [call.leaves[n] for n in program.leaf_numbers(inputs)]
    args, kwargs = function.masked(args, kwargs)
    name = getattr(fn_or_module, "__qualname__", None) or type(fn_or_module).__qualname__
    if not program.record.returns_arrays:
        raise LazyError(
            Problem(
                name,
                "a function that returns an nnx object",
                "a function of arrays that returns arrays: an artifact holds no Python objects",
                "return nnx.to_pure_dict(nnx.state(module))  # or the arrays themselves",
            )
        )
    record, state = program.record, leaves[inputs:]
    order = _order(function, args, kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = jax.tree.leaves((args, kwargs))
        arrays = [given[number] for number in order]
        return result_of(record, program.tape([*arrays, *jax.tree.leaves(state)]))

    args, kwargs = jax.tree.map(_array_or_none, (args, kwargs), is_leaf=_is_whole)
    args = tuple(a for a in args if jax.tree.leaves(a))
    kwargs = {k: v for k, v in kwargs.items() if jax.tree.leaves(v)}
    run.__name__ = name.rpartition(".")[2].replace("<lambda>", "function")
    exported = jax_export.export(jax.jit(run), platforms=tuple(platforms))(*args, **kwargs)
    try:
        return bytes(exported.serialize())
    except ImportError as error:
        raise LazyError(
            Problem(name, "no flatbuffers", "the package in whose format JAX exports", "pip install flatbuffers")
        ) from error


def _order(function: Staged, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return the numbers of the arrays among the arguments as they are given, in the order of the program's inputs."""
    leaves, treedef = jax.tree.flatten(jax.tree.map(_array_or_none, (args, kwargs), is_leaf=_is_whole))
    return jax.tree.leaves(function.spelled(*treedef.unflatten(range(len(leaves)))))


def _is_whole(value: Any) -> bool:
    return kind_of(value) in (TokenKind.NODE, TokenKind.VARIABLE)


def _array_or_none(value: Any) -> Any:
    return None if _is_whole(value) else value
