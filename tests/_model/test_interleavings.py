"""A first call in one thread, stopped in the middle of its initialization, beside another operation in another thread.

No sleeps: the first thread waits inside an initializer until the second has begun, and has nothing left to do but to
wait for it or to finish. Whatever the order, each gets right results and the model is the explicit one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm
from lazymods._layer import lifecycle
from lazymods._model import hooks
from lazymods.compile import function

X = jnp.ones((2, 4))
normal = nnx.initializers.lecun_normal()


class Gate:
    """Stops the first who comes until the other is about to wait as well."""

    def __init__(self) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.owner: int | None = None

    def stop(self) -> None:
        if self.owner is None:
            self.owner = threading.get_ident()
            self.inside.set()
            assert self.go_on.wait(60)


GATE: list[Gate | None] = [None]


def slow(key: Any, shape: Any, dtype: Any = jnp.float32) -> Any:
    if GATE[0] is not None:
        GATE[0].stop()
    return normal(key, shape, dtype)


class WatchedLock:
    """The lock of initializations; whoever has to wait for it lets the other go on."""

    def __init__(self, lock: Any, gate: Gate) -> None:
        self.lock, self.gate = lock, gate

    def __enter__(self) -> Any:
        if not self.lock.acquire(blocking=False):
            self.gate.go_on.set()
            assert self.lock.acquire(timeout=60)
        return self

    def __exit__(self, *args: object) -> None:
        self.lock.release()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = GATE[0] = Gate()
    watched = WatchedLock(lifecycle.LOCK, made)
    monkeypatch.setattr(lifecycle, "LOCK", watched)
    for module, name in ((hooks, "_LOCK"), (function, "LOCK")):  # the same one
        monkeypatch.setattr(module, name, watched)
    yield made
    GATE[0] = None


class Net(nnx.Module):
    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.first(x))


def lazy(shared: Any = None) -> Any:
    rngs = nnx.Rngs(0)
    first = lm.LazyLinear(4, kernel_init=slow, rngs=rngs)
    return Net(first if shared is None else shared, lm.LazyLinear(3, kernel_init=slow, rngs=rngs))


def explicit() -> Any:
    rngs = nnx.Rngs(0)
    return Net(*(nnx.Linear(4, m, kernel_init=slow, rngs=rngs) for m in (4, 3)))


def assert_same(model: Any, want: Any) -> None:
    assert nnx.graphdef(model) == nnx.graphdef(want)
    for (path, a), (_, b) in zip(*(nnx.to_flat_state(nnx.state(m)) for m in (model, want)), strict=True):
        np.testing.assert_array_equal(a.get_raw_value(), b.get_raw_value(), err_msg=str(path))


def reported(model: Any) -> int:
    return lm.infer_shapes(model, X).total_parameters


OTHERS: dict[str, Callable[[Any], Any]] = {
    "call": lambda model: model(X),
    "materialize": lambda model: lm.materialize(model, X).total_parameters,
    "infer_shapes": reported,
    "summary": lambda model: lm.summary(model, X).total_parameters,
    "state_dict": lambda model: list(lm.state_dict(model)),
    "load": lambda model: lm.load_state_dict(model, lm.state_dict(explicit())).missing,
    "lm.jit": lambda model: lm.jit(lambda m, x: m(x))(model, X),
}


def beside(gate: Gate, one: Callable[[], Any], two: Callable[[], Any]) -> tuple[Any, Any]:
    """Run the first until it initializes, then the second, which begins while the first is inside."""
    results: dict[str, Any] = {}

    def run(name: str, work: Callable[[], Any]) -> None:
        try:
            results[name] = work()
        except BaseException as error:
            results[name] = error
        finally:
            if name == "second":
                gate.go_on.set()  # it needed no lock

    threads = [threading.Thread(target=run, args=("first", one), daemon=True)]
    threads[0].start()
    assert gate.inside.wait(60)
    threads.append(threading.Thread(target=run, args=("second", two), daemon=True))
    threads[1].start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return results["first"], results["second"]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("other", OTHERS)
def test_a_first_call_beside(other: str, shared: bool, gate: Gate) -> None:
    model = lazy()
    second = lazy(model.first) if shared else model
    want = explicit_without(gate)
    got, result = beside(gate, lambda: model(X), lambda: OTHERS[other](second))
    np.testing.assert_array_equal(got, want(X))
    assert_same(model, want)
    if other in ("call", "lm.jit"):
        np.testing.assert_allclose(result, want(X), rtol=1e-6)
    elif other == "state_dict":
        assert result == list(lm.state_dict(want))
    elif other == "load":
        assert result == []
    else:
        assert result == 35
    second(X)
    assert_same(second, want)


def explicit_without(gate: Gate) -> Any:
    """The explicit model; nobody stops at the gate for it."""
    gate.owner = 0
    made = explicit()
    gate.owner = None
    return made


@pytest.mark.parametrize("other", ["call", "materialize", "lm.jit"])
def test_a_first_call_that_fails_beside(other: str, gate: Gate) -> None:
    """The second finds the layer as it was, or as it became; the failed one leaves nothing behind."""

    class Refuses(Net):
        def __call__(self, x: jax.Array) -> jax.Array:
            y = self.second(self.first(x))
            if threading.current_thread().name == "fails":
                raise RuntimeError("no")
            return y

    made = lazy()
    model, want = Refuses(made.first, made.second), explicit_without(gate)

    def fails() -> Any:
        threading.current_thread().name = "fails"
        with pytest.raises(RuntimeError, match="no"):
            model(X)

    beside(gate, fails, lambda: OTHERS[other](model))
    for layer, expected in ((model.first, want.first), (model.second, want.second)):
        assert_same(layer, expected)
