"""An array of a trace inside of the trace, which a function stores where no program can keep it, is refused."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

X = jnp.ones((2, 4))
LAST: Any = "before"

Body = Callable[[Any], Any]
INNER: dict[str, Callable[[Body, Any], Any]] = {
    "none": lambda body, x: body(x),
    "scan": lambda body, x: jax.lax.scan(lambda c, _: (body(c), None), x, None, length=2)[0],
    "while": lambda body, x: jax.lax.while_loop(lambda c: c.sum() < 100, body, x),
    "cond": lambda body, x: jax.lax.cond(x.sum() > 0, body, lambda v: v * 1.0, x),
    "jit": lambda body, x: jax.jit(body)(x),
    "remat": lambda body, x: jax.checkpoint(body)(x),
    "vmap": lambda body, x: jax.vmap(body)(x),
    "grad": lambda body, x: jax.grad(lambda v: body(v).sum())(x),
    "nnx.jit": lambda body, x: nnx.jit(body)(x),
}


def in_an_attribute() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    def keep() -> None: ...

    known: Any = keep
    known.kept = "before"

    def store(value: Any) -> None:
        known.kept = value

    return store, lambda: known.kept


def in_a_cell() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    kept: Any = "before"

    def store(value: Any) -> None:
        nonlocal kept
        kept = value

    return store, lambda: kept


def in_a_global() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    def store(value: Any) -> None:
        global LAST
        LAST = value

    return store, lambda: LAST


def in_an_attribute_of_itself() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    def store(value: Any) -> None:
        known.kept = value

    known: Any = store
    known.kept = "before"
    return store, lambda: known.kept


PLACES = {f.__name__: f for f in (in_an_attribute, in_a_cell, in_a_global, in_an_attribute_of_itself)}


@pytest.mark.skipif(jax.config.jax_check_tracer_leaks, reason="JAX's own checker raises first")  # type: ignore[attr-defined]
@pytest.mark.parametrize("decides", [False, True], ids=["plain", "deciding"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("inner", INNER)
def test_an_array_of_an_inner_trace_that_is_stored_is_refused(inner: str, place: str, decides: bool) -> None:
    store, kept = PLACES[place]()
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    stores = True

    def body(value: Any) -> Any:
        if stores:
            store(value)
        return value + 1.0

    def step(m: nnx.Linear, x: jax.Array) -> jax.Array:
        if decides and x.sum() < 0:
            return x
        return INNER[inner](body, m(x) * 0.0 + x)

    with pytest.raises(lm.LazyError, match="stores an array"):
        lm.jit(step)(model, X)
    assert kept() == LAST == "before"
    stores = False
    np.testing.assert_allclose(lm.jit(step)(model, X), step(model, X), rtol=1e-6)


class Stats:
    """Has a class to which functions write."""

    last: Any = "before"


def in_a_list(kept: list[Any], y: Any) -> None:
    kept.append({"loss": (y, 1)})


def in_a_global_list(kept: list[Any], y: Any) -> None:
    global LAST
    LAST = [y]


def in_a_class(kept: list[Any], y: Any) -> None:
    Stats.last = (y,)


@pytest.mark.parametrize("store", [in_a_list, in_a_global_list, in_a_class])
def test_what_holds_an_array_of_the_trace_is_taken_back(store: Callable[[list[Any], Any], None]) -> None:
    model, kept, stats = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), ["before"], Stats()

    @lm.jit
    def f(x: jax.Array) -> Any:
        y = model(x).sum()
        store(kept, y)
        return y, stats.last

    with pytest.raises(lm.LazyError, match="stores an array there"):
        f(X)
    assert (kept, LAST, Stats.last) == (["before"], "before", "before")
