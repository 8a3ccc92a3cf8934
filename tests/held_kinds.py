"""Models whose attributes hold a layer in ways that Flax does not see, and the same in layers that it sees."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

import lazymods as lm


class Plain:
    """No module."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.layer(x)


class Slotted:
    __slots__ = ("layer",)

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.layer(x)


def _closure(layer: Any) -> Callable[..., Any]:
    def forward(x: jax.Array) -> jax.Array:
        return x + layer(x)

    return forward


def _default(layer: Any) -> Callable[..., Any]:
    def forward(x: jax.Array, layer: Any = layer) -> jax.Array:
        return x + layer(x)

    return forward


def _keyword_default(layer: Any) -> Callable[..., Any]:
    def forward(x: jax.Array, *, layer: Any = layer) -> jax.Array:
        return x + layer(x)

    return forward


def _attribute(layer: Any) -> Callable[..., Any]:
    def forward(x: jax.Array) -> jax.Array:
        return x + vars(forward)["layer"](x)

    vars(forward)["layer"] = layer
    return forward


def _nested(layer: Any) -> Callable[..., Any]:
    inner = _closure(layer)
    return lambda x: inner(x)


def _wrapped(layer: Any) -> Callable[..., Any]:
    inner = _closure(layer)

    @functools.wraps(inner)
    def forward(x: jax.Array) -> jax.Array:
        return inner(x)

    return forward


def _list_in_closure(layer: Any) -> Callable[..., Any]:
    layers = [layer]
    return lambda x: x + layers[0](x)


def _object_in_closure(layer: Any) -> Callable[..., Any]:
    plain = Plain(layer)
    return lambda x: plain(x)



def _method_of_layer(layer: Any) -> Callable[..., Any]:
    call = layer.__call__
    return lambda x: x + call(x)


KINDS: dict[str, Callable[[Any], Any]] = {
    "closure": _closure,
    "default": _default,
    "keyword default": _keyword_default,
    "attribute of a function": _attribute,
    "closure in a closure": _nested,
    "functools.wraps": _wrapped,
    "list in a closure": _list_in_closure,
    "object in a closure": _object_in_closure,
    "method of the layer in a closure": _method_of_layer,
    "partial": lambda layer: functools.partial(lambda q, x: x + q(x), layer),
    "partial of a closure": lambda layer: functools.partial(_closure(layer)),
    "bound method": lambda layer: Plain(layer).__call__,
    "plain object": Plain,
    "object with slots": Slotted,
    "jax.vmap": lambda layer: jax.vmap(_closure(layer)),
    "nnx.vmap": lambda layer: nnx.vmap(_closure(layer)),
    "lm.jit": lambda layer: lm.jit(_closure(layer)),
}
CACHED: dict[str, Callable[[Any], Any]] = {  # JAX keeps what it traced of these, with the values that there were
    "jax.jit": lambda layer: jax.jit(_closure(layer)),
    "nnx.jit": lambda layer: nnx.jit(_closure(layer)),
    "jax.checkpoint": lambda layer: jax.checkpoint(_closure(layer)),
    "nnx.remat": lambda layer: nnx.remat(_closure(layer)),
}


class Holder(nnx.Module):
    """A layer that no attribute of Flax's holds, then one that is."""

    def __init__(self, hold: Callable[[Any], Any], held: Any, out: Any) -> None:
        self.residual = hold(held)
        self.out = out

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.residual(x))


class Seen(nnx.Module):
    """The same with both layers where Flax sees them."""

    def __init__(self) -> None:
        self.held = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.out = nnx.Linear(4, 2, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(x + self.held(x))


def explicit(hold: Callable[[Any], Any]) -> tuple[Holder, Any]:
    """Return a model, and the layer that it holds."""
    held = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    return Holder(hold, held, nnx.Linear(4, 2, rngs=nnx.Rngs(1))), held


def lazy(hold: Callable[[Any], Any]) -> tuple[Holder, Any]:
    """Return the same of lazy layers."""
    held: Any = lm.LazyLinear(4, rngs=nnx.Rngs(0))
    return Holder(hold, held, lm.LazyLinear(2, rngs=nnx.Rngs(1))), held
