"""An error's traceback has the user's frames and none of lazymods; ``JAX_TRACEBACK_FILTERING=off`` shows all."""

# pyright: reportCallIssue=false, reportArgumentType=false

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import lazymods as lm
from lazymods import _compat

X = jnp.ones((2, 3))
OWN = str(Path(lm.__file__).parent)


def deep(x: Any) -> Any:
    raise KeyError("a user's own")


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.fc = lm.LazyLinear(4, rngs=rngs)

    def __call__(self, x: jax.Array) -> Any:
        return deep(self.fc(x))


class Fails(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.width = width

    def __call__(self, x: jax.Array) -> Any:
        return deep(x)


def infer(config: Any, x: Any) -> dict[str, int]:
    return {"width": x.shape[-1]}


def block() -> Block:
    return Block(rngs=nnx.Rngs(0))


def hook(module: Any, args: Any) -> Any:
    return deep(args)


def call(module: Any) -> Any:
    return module(X)


def hooked() -> None:
    layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    lm.register_forward_pre_hook(layer, hook)
    call(layer)


def on_the_fast_path() -> None:
    def double(x: Any) -> Any:
        return x * 2 if x.shape == (2, 3) else deep(x)

    compiled = lm.jit(double)
    compiled(X)
    compiled(X)
    compiled(X[0])


def in_an_operator() -> None:
    operator = lm.dispatch.Operator("doubled")
    operator.register("CompositeImplicitAutograd", deep)
    operator(X)


# What is called, and the functions of this file in the traceback, from the call on.
CASES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "lm.materialize": (lambda: lm.materialize(block(), X), ["<lambda>", "__call__", "deep"]),
    "lm.infer_shapes": (lambda: lm.infer_shapes(block(), X), ["<lambda>", "__call__", "deep"]),
    "lm.jit of a lazy model": (lambda: lm.jit(call)(block()), ["<lambda>", "call", "__call__", "deep"]),
    "lm.jit, called again": (on_the_fast_path, ["on_the_fast_path", "double", "deep"]),
    "lm.lower": (lambda: lm.lower(deep, X), ["<lambda>", "deep"]),
    "a first call": (
        lambda: lm.lazy(Fails, infer=infer)(rngs=nnx.Rngs(0))(X), ["<lambda>", "__call__", "deep"],
    ),
    "infer, as the cause": (
        lambda: lm.lazy(Fails, infer=lambda config, x: deep(x))(rngs=nnx.Rngs(0))(X), ["<lambda>"],
    ),
    "a hook": (hooked, ["hooked", "call", "hook", "deep"]),
    "lm.autograd.grad": (lambda: lm.autograd.grad(deep)(X), ["<lambda>", "deep"]),
    "lm.autograd.no_grad": (lambda: lm.autograd.no_grad(deep)(X), ["<lambda>", "deep"]),
    "an operator": (in_an_operator, ["in_an_operator", "deep"]),
    "a constructor": (lambda: lm.LazyLinear(784, 10), ["<lambda>"]),
    "lm.load": (lambda: lm.load(block(), {"other": X}), ["<lambda>"]),
    "lm.save": (lambda: lm.save(block(), "model.npz"), ["<lambda>"]),
    "in jax.jit": (lambda: jax.jit(call)(block()), ["<lambda>", "call", "__call__"]),
}  # fmt: skip


def frames(error: BaseException) -> Iterator[traceback.FrameSummary]:
    """The frames of an error and of all that it followed, of lazymods or of this file."""
    for one in (error, error.__cause__, error.__context__):
        for frame in traceback.extract_tb(None if one is None else one.__traceback__):
            if frame.filename.startswith((OWN, __file__)) and (one is error or frame.filename != __file__):
                yield frame


def caught(run: Callable[[], Any]) -> list[traceback.FrameSummary]:
    with pytest.raises(Exception) as info:
        run()
    return list(frames(info.value))[1:]  # without this function


@pytest.mark.parametrize("name", CASES)
def test_only_the_users_frames(name: str) -> None:
    run, functions = CASES[name]
    found = caught(run)
    assert [frame.name for frame in found if frame.filename == __file__] == functions
    assert not [frame for frame in found if frame.filename != __file__]


@pytest.mark.parametrize("name", CASES)
def test_all_frames(name: str) -> None:
    run, functions = CASES[name]
    with setting("off"):
        found = caught(run)
    assert [frame.name for frame in found if frame.filename == __file__] == functions
    assert [frame for frame in found if frame.filename != __file__]


@contextlib.contextmanager
def setting(mode: str) -> Iterator[None]:
    before = jax.config.jax_traceback_filtering  # type: ignore[attr-defined]
    jax.config.update("jax_traceback_filtering", mode)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


def test_frames_are_marked_for_ipython() -> None:
    with setting("tracebackhide"), pytest.raises(KeyError) as info:
        lm.materialize(block(), X)
    hidden = {
        frame.f_code.co_filename.startswith(OWN): "__tracebackhide__" in frame.f_locals
        for frame, _ in traceback.walk_tb(info.value.__traceback__)
        if frame.f_code.co_filename.startswith((OWN, __file__))
    }
    assert hidden == {True: True, False: False}


def test_one_own_frame_where_a_value_is_missing() -> None:
    for run in (lambda: block().fc.kernel + 1, lambda: block().fc.in_features):
        own = [frame for frame in caught(run) if frame.filename != __file__]
        assert len(own) == 1


def test_tracebacks_are_whole_without_the_names_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    _compat.hide_frames(KeyError())  # so that the module is there
    from lazymods._compat import tracebacks

    monkeypatch.setattr(tracebacks, "include_filename", None)
    assert any(frame.filename != __file__ for frame in caught(CASES["lm.load"][0]))


def test_an_error_that_the_user_handles_inside_is_left_alone() -> None:
    seen = []

    def f(x: Any) -> Any:
        try:
            lm.LazyLinear(784, 10)
        except lm.ConfigurationError as error:
            seen.append(len(list(frames(error))))
        return x

    lm.jit(f)(X)
    assert seen and seen[0] > 1  # it is inside of lm.jit, whose own errors would tell


def test_the_optimizer() -> None:
    model = block()
    optimizer = lm.LazyOptimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    assert not [f for f in caught(lambda: optimizer.update(model, nnx.state(model))) if f.filename != __file__]
