"""Two operations that do nothing but mark where a module's inputs and outputs pass: what backward hooks hang on.

Forward they are the identity. The derivative of each is an operation as well, linear in the tangents, and the transpose
of that is where hooks run: at the outputs first, then at the inputs. Between the two goes a token, a scalar which the
inputs' mark returns and the outputs' mark takes. So they are tied in every program that JAX makes of them: the inputs'
mark is reached if the outputs' was, and the token's cotangent carries what was found there (:class:`_Carrier`). Both
transposes run in one pass over one program, so it is never an operand of anything else.

Under ``vmap`` inputs and outputs are mapped all together, along their first axis, and hooks run under ``vmap`` as well:
for each example, as in a loop.

Reads ``Zero``, ``primitive_jvps`` and ``primitive_transposes`` of ``jax.interpreters.ad``, ``fancy_primitive_batchers``
of ``jax.interpreters.batching`` and the axis that those get, ``register_lowering`` and ``lower_fun`` of
``jax.interpreters.mlir``. Seen with jax 0.10.2 and 0.12.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from lazymods._compat.finding import require
from lazymods._errors import LazyError, Problem

require(batching, "fancy_primitive_batchers")
require(ShapedArray((), np.dtype(np.float32)), "to_tangent_aval")

Gradients = list[Any]  # an array for each marked leaf, or None


class Axis(NamedTuple):
    """An axis of ``vmap``, from the innermost one on."""

    size: int
    name: Any
    spmd_name: Any
    state: tuple[bool, ...] = ()  # which arrays of the module it maps


class Call(Protocol):
    """One call of a module with backward hooks; hashable, and equal for calls that run the same hooks alike."""

    def at_outputs(self, state: Sequence[Any], found: Gradients) -> Gradients:
        """Run the hooks that come before the module's own backward pass; return the gradients of its outputs."""
        ...

    def at_inputs(self, state: Sequence[Any], found: Gradients, outputs: Gradients) -> Gradients:
        """Run the hooks that come after it; return the gradients of its inputs."""
        ...


def mark_inputs(leaves: Sequence[Any], state: Sequence[Any]) -> tuple[list[Any], Any]:
    """Return the inputs of a call, marked, and the token that its outputs need.

    Args:
        leaves: Arrays of floating point or complex numbers.
        state: The arrays of the module.
    """
    *marked, token = _inputs_p.bind(*leaves, *state, count=len(leaves), axes=())
    return marked, token


def mark_outputs(leaves: Sequence[Any], token: Any, state: Sequence[Any], call: Call) -> list[Any]:
    """Return the outputs of a call, marked.

    Args:
        leaves: Arrays of floating point or complex numbers.
        token: What :func:`mark_inputs` returned.
        state: The arrays of the module, for the hooks.
        call: Runs the hooks.
    """
    return _outputs_p.bind(*leaves, token, *state, call=call, count=len(leaves), axes=())


def _primitive(name: str) -> Primitive:
    made = Primitive(name)
    made.multiple_results = True
    return made


_inputs_p, _outputs_p = _primitive("module_inputs"), _primitive("module_outputs")
_input_tangents_p, _output_tangents_p = _primitive("module_input_tangents"), _primitive("module_output_tangents")


# ---------------------------------------------------------------- what they compute: nothing


def _token_shape(axes: Sequence[Axis]) -> tuple[int, ...]:
    return tuple(axis.size for axis in reversed(axes))


def _pass_inputs(*values: Any, count: int, axes: tuple[Axis, ...], **_: Any) -> list[Any]:
    return [*values[:count], jnp.zeros(_token_shape(axes), np.float32)]


def _pass_outputs(*values: Any, count: int, **_: Any) -> list[Any]:
    return list(values[:count])


def _inputs_avals(*avals: Any, count: int, axes: tuple[Axis, ...], **_: Any) -> list[Any]:
    return [*avals[:count], ShapedArray(_token_shape(axes), np.dtype(np.float32))]


for _p, _run, _avals in (
    (_inputs_p, _pass_inputs, _inputs_avals),
    (_input_tangents_p, _pass_inputs, _inputs_avals),
    (_outputs_p, _pass_outputs, _pass_outputs),
    (_output_tangents_p, _pass_outputs, _pass_outputs),
):
    _p.def_impl(_run)
    _p.def_abstract_eval(_avals)
    mlir.register_lowering(_p, mlir.lower_fun(_run, multiple_results=True))


# ---------------------------------------------------------------- derivatives


def _zero(primal: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero


def _spread(found: Sequence[Any], present: Sequence[bool], otherwise: Callable[[int], Any]) -> list[Any]:
    """Return one for each leaf: what was found for those that are present, in order."""
    rest = iter(found)
    return [next(rest) if there else otherwise(i) for i, there in enumerate(present)]


def _inputs_jvp(primals: Any, tangents: Any, *, count: int, axes: tuple[Axis, ...]) -> Any:
    out = _inputs_p.bind(*primals, count=count, axes=axes)
    present = tuple(not _is_zero(t) for t in tangents[:count])
    zeros = [_zero(x) for x in out]
    if not any(present):
        return out, zeros
    avals = tuple((x.shape, np.dtype(x.dtype)) for x in map(jax.typeof, primals[:count]))
    given = [t for t, there in zip(tangents, present, strict=False) if there]
    *found, token = _input_tangents_p.bind(*given, count=len(given), present=present, avals=avals, axes=axes)
    return out, [*_spread(found, present, zeros.__getitem__), token]


def _outputs_jvp(primals: Any, tangents: Any, *, call: Call, count: int, axes: tuple[Axis, ...]) -> Any:
    out = _outputs_p.bind(*primals, call=call, count=count, axes=axes)
    present = tuple(not _is_zero(t) for t in tangents[:count])
    zeros = [_zero(x) for x in out]
    if not any(present):
        return out, zeros
    given = [t for t, there in zip(tangents, present, strict=False) if there]
    token, state = tangents[count], primals[count + 1 :]
    tied = [] if _is_zero(token) else [token]  # to an input that is differentiated
    found = _output_tangents_p.bind(
        *given, *tied, *state, call=call, count=len(given), present=present, tied=bool(tied), axes=axes
    )
    return out, _spread(found, present, zeros.__getitem__)


def _linear_jvp(primitive: Primitive) -> Callable[..., Any]:
    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        out = primitive.bind(*primals, **params)
        linear = params["count"] + params.get("tied", False)
        if all(map(_is_zero, tangents[:linear])):
            return out, [_zero(x) for x in out]
        given = [ad.instantiate_zeros(t) for t in tangents[:linear]]
        return out, primitive.bind(*given, *primals[linear:], **params)

    return jvp


ad.primitive_jvps[_inputs_p] = _inputs_jvp
ad.primitive_jvps[_outputs_p] = _outputs_jvp
ad.primitive_jvps[_input_tangents_p] = _linear_jvp(_input_tangents_p)
ad.primitive_jvps[_output_tangents_p] = _linear_jvp(_output_tangents_p)


# ---------------------------------------------------------------- transposes: where hooks run


_APART = Problem(
    "a module with backward hooks, under jax.vmap",
    "outputs that are mapped, of inputs and parameters that are not",
    "an input, or a Variable of the module, that vmap maps: hooks run for each example",
    "module(x, other)  # what else it computes with, as an argument of its call",
)


class _Carrier(np.ndarray):
    """The token's cotangent: zeros to JAX, and what the hooks at the inputs need from the outputs."""

    call: Call
    axes: tuple[Axis, ...]
    state: list[Any]
    outputs: Gradients


def _transpose_outputs(
    cotangents: Any, *args: Any, call: Call, count: int, present: Any, tied: bool, axes: tuple[Axis, ...]
) -> Any:
    state = list(args[count + tied :])
    if all(map(_is_zero, cotangents)):
        return [*cotangents, *[None] * (len(args) - count)]
    found = _spread([None if _is_zero(c) else c for c in cotangents], present, lambda i: None)
    outputs = _mapped(call.at_outputs, axes)(state, found)
    carried: list[Any] = []
    if tied:
        carrier = np.zeros(_token_shape(axes), np.float32).view(_Carrier)
        carrier.call, carrier.axes, carrier.state, carrier.outputs = call, axes, state, outputs
        carried = [carrier]
    else:
        _mapped(call.at_inputs, axes)(state, [], outputs)
    kept = [g for g, there in zip(outputs, present, strict=True) if there]
    zeros = [ad.Zero(x.aval) for x in args[:count]]
    return [*[z if g is None else g for g, z in zip(kept, zeros, strict=True)], *carried, *[None] * len(state)]


def _transpose_inputs(cotangents: Any, *_: Any, present: Any, avals: Any, axes: tuple[Axis, ...], **__: Any) -> Any:
    *found, carrier = cotangents
    if _is_zero(carrier) or all(map(_is_zero, found)):  # no gradient comes by the outputs, or none arrives here
        return found
    if type(carrier) is not _Carrier or [a[:2] for a in carrier.axes] != [a[:2] for a in axes]:
        raise LazyError(_APART)
    zeros = [jnp.zeros(*aval) for aval in avals]
    given = _spread([ad.instantiate_zeros(c) for c in found], present, zeros.__getitem__)
    hooked = _mapped(carrier.call.at_inputs, carrier.axes)(carrier.state, given, carrier.outputs)
    return [g for g, there in zip(hooked, present, strict=True) if there]


ad.primitive_transposes[_input_tangents_p] = _transpose_inputs
ad.primitive_transposes[_output_tangents_p] = _transpose_outputs


# ---------------------------------------------------------------- vmap


def _mapped(run: Callable[..., Gradients], axes: Sequence[Axis]) -> Callable[..., Gradients]:
    """Return a function that runs hooks for each example of the axes, which are the first ones of every gradient."""
    for axis in axes:
        run = _mapped_once(run, axis)
    return run


def _mapped_once(run: Callable[..., Gradients], axis: Axis) -> Callable[..., Gradients]:
    in_axes = [0 if mapped else None for mapped in axis.state]
    name = axis.name if isinstance(axis.name, str) else None

    def mapped(state: Any, *gradients: Gradients) -> Gradients:
        return jax.vmap(
            run,
            in_axes=(in_axes, *[0] * len(gradients)),
            axis_size=axis.size,
            axis_name=name,
            spmd_axis_name=axis.spmd_name,
        )(state, *gradients)

    return mapped


def _along(axis: Any, value: Any, dim: int | None) -> Any:
    """Return a value mapped along its first axis, repeated if it is not mapped."""
    return jnp.broadcast_to(value, (axis.size, *value.shape)) if dim is None else _first(value, dim)


def _first(value: Any, dim: int) -> Any:
    return value if dim == 0 else jnp.moveaxis(value, dim, 0)  # nothing may come between the marks and the token


def _batcher(primitive: Primitive) -> Callable[..., Any]:
    def batch(axis: Any, values: Any, dims: Any, **params: Any) -> Any:
        if all(dim is None for dim in dims):
            out = primitive.bind(*values, **params)
            return out, [None] * len(out)
        together = params["count"] + (primitive is _outputs_p or params.get("tied", False))
        if together > params["count"] and dims[params["count"]] is None:
            raise LazyError(_APART)
        leaves = [_along(axis, v, d) for v, d in zip(values[:together], dims, strict=False)]
        held = [v if d is None else _first(v, d) for v, d in zip(values, dims, strict=True)][together:]
        new = Axis(axis.size, axis.name, axis.spmd_name, tuple(d is not None for d in dims[together:]))
        params["axes"] = (*params["axes"], new)
        if "avals" in params:
            params["avals"] = tuple(((axis.size, *shape), dtype) for shape, dtype in params["avals"])
        out = primitive.bind(*leaves, *held, **params)
        return out, [0] * len(out)

    return batch


for _p in (_inputs_p, _outputs_p, _input_tangents_p, _output_tangents_p):
    batching.fancy_primitive_batchers[_p] = _batcher(_p)
