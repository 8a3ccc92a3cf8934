"""``infer_shapes``, ``materialize`` and ``summary`` when something fails: all or nothing, and named by path."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import array, assert_same_model, assert_unchanged, contents, lazy_mlp, plain_mlp, spec

import lazymods as lm

PATHS = ["fc1.kernel", "fc1.bias", "fc2.kernel", "fc2.bias"]
both = pytest.mark.parametrize("find", [lm.infer_shapes, lm.materialize, lm.summary], ids=lambda f: f.__name__)


class Twice(nnx.Module):
    def __init__(self, out: int, *, rngs: nnx.Rngs):
        self.block = nnx.Dict(fc=lm.LazyLinear(out, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.block.fc(self.block.fc(x))


class Bad(nnx.Module):
    """Everything goes well up to the last layer."""

    def __init__(self, last: Any, *, rngs: nnx.Rngs):
        self.stem = lm.LazyLinear(4, rngs=rngs)
        self.norm = lm.LazyBatchNorm(rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.ready = nnx.BatchNorm(4, rngs=rngs)
        self.last = last
        self.seen = nnx.List([])

    def __call__(self, x: jax.Array) -> jax.Array:
        self.seen.append(nnx.Intermediate(x))
        return self.last(self.ready(self.drop(self.norm(self.stem(x)))))


# ---------------------------------------------------------------- all or nothing


def by_hand(fail: Callable[[], None]) -> Any:
    class ByHand(lm.LazyModuleMixin, nnx.Module):
        def __init__(self) -> None:
            self.w, self.log = lm.UninitializedParameter(), nnx.List([])

        def initialize_parameters(self, x: Any) -> None:
            self.log.append(nnx.Variable(jnp.ones(1)))
            self.w.materialize(x.shape)
            fail()

        def __call__(self, x: jax.Array) -> jax.Array:
            return x

    return ByHand()


def raise_lookup() -> None:
    raise LookupError("no table")


class Raises(nnx.Module):
    def __call__(self, x: jax.Array) -> Any:
        raise LookupError("no table")


class Identity(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x


SHAPES = lm.ShapeInferenceError
LAST: dict[str, tuple[Callable[[], Any], type[BaseException], str]] = {
    "rank": (lambda: lm.LazyConv2d(4, (3, 3), rngs=nnx.Rngs(1)), SHAPES, r"last \(LazyConv2d\)"),
    "groups": (lambda: lm.LazyGroupNorm(num_groups=3, rngs=nnx.Rngs(1)), SHAPES, r"last \(LazyGroupNorm\)"),
    "ready-width": (lambda: nnx.Linear(7, 2, rngs=nnx.Rngs(1)), SHAPES, r"last \(Linear\)\n  got:    f32\[2,4\]"),
    "embed": (lambda: lm.LazyEmbed(rngs=nnx.Rngs(1)), SHAPES, r"last \(LazyEmbed\)"),
    "by-hand": (lambda: by_hand(raise_lookup), LookupError, "no table"),
    "own-error": (Raises, LookupError, "no table"),
    "interrupt": (lambda: by_hand(lambda: (_ for _ in ()).throw(KeyboardInterrupt("stop"))), KeyboardInterrupt, "stop"),
}


@pytest.mark.parametrize("find", [lm.infer_shapes, lm.materialize], ids=lambda f: f.__name__)
@pytest.mark.parametrize("last, error, match", LAST.values(), ids=LAST)
def test_all_or_nothing(last: Any, error: type[BaseException], match: str, find: Callable[..., Any]) -> None:
    model = Bad(last(), rngs=nnx.Rngs(0))
    before = contents(model)
    for x in (spec(2, 8), array(2, 8)):
        with pytest.raises(error, match=match):
            find(model, x)
        assert_unchanged(model, before)
        assert len(model.seen) == 0
    model.last = Identity()
    rngs = nnx.Rngs(0)
    stem, norm, drop = nnx.Linear(8, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    lm.materialize(model, spec(2, 8))
    for got, want in zip((model.stem, model.norm, model.drop), (stem, norm, drop), strict=True):
        assert_same_model(got, want)


@both
def test_a_layer_used_at_two_widths(find: Callable[..., Any]) -> None:
    model = Twice(4, rngs=nnx.Rngs(0))
    with pytest.raises(lm.ShapeInferenceError) as caught:
        find(model, spec(2, 3))
    assert str(caught.value).splitlines() == [
        "block.fc (LazyLinear)",
        "  got:    f32[2,4] (in_features=4) after f32[2,3] (in_features=3)",
        "  needed: the same sizes at every call: its parameters have one shape",
        "  write:  self.other = lm.LazyLinear(features, rngs=rngs)  # a layer of its own for each width",
    ]
    assert lm.uninitialized_paths(model) == ["block.fc.kernel", "block.fc.bias"]
    assert find(model, spec(2, 4)).output.shape == (2, 4)


@both
def test_a_ready_layer_that_gets_another_width_is_named(find: Callable[..., Any]) -> None:
    with pytest.raises(lm.ShapeInferenceError, match=r"^fc1 \(Linear\)\n  got:    f32\[2,9\]\n"):
        find(plain_mlp(), spec(2, 9))


DECIDES: dict[str, Callable[[jax.Array], Any]] = {
    "if": lambda y: y if y.sum() > 0 else -y,
    "while": lambda y: next(y for _ in iter(lambda: bool(y.max() > 10), True)),
    "int": lambda y: y * int(y[0, 0]),
    "float": lambda y: y * float(y[0, 0]),
    "item": lambda y: y * y[0, 0].item(),
    "numpy": lambda y: jnp.asarray(np.asarray(y)),
    "mask": lambda y: y[y > 0],
    "index": lambda y: y[: int(y.argmax())],
}


@both
@pytest.mark.parametrize("decide", DECIDES.values(), ids=DECIDES)
def test_a_forward_that_decides_on_values(decide: Callable[[jax.Array], Any], find: Callable[..., Any]) -> None:
    class Decides(nnx.Module):
        def __init__(self) -> None:
            self.fc = lm.LazyLinear(3, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> Any:
            return decide(self.fc(x))

    model = Decides()
    said = r"Decides\n(.|\n)*values of arrays(.|\n)*write:  model\(x\), once"
    with pytest.raises(lm.ShapeInferenceError, match=said):
        find(model, array(2, 4))
    assert lm.uninitialized_paths(model) == ["fc.kernel", "fc.bias"]


@both
@pytest.mark.parametrize("args", [(), (spec(2, 8), spec(1)), (3,), (None,), ((2, 8),), ("x",)], ids=str)
def test_arguments_that_the_forward_does_not_take(args: tuple[Any, ...], find: Callable[..., Any]) -> None:
    model = lazy_mlp()
    if find is lm.summary and not args:
        assert not find(model).is_complete
    else:
        with pytest.raises(lm.ShapeInferenceError, match=r"MLP|fc1"):
            find(model, *args)
    assert lm.uninitialized_paths(model) == PATHS


@both
def test_other_errors_of_the_forward_come_through_with_a_note(find: Callable[..., Any]) -> None:
    model = nnx.Sequential(lm.LazyLinear(3, rngs=nnx.Rngs(0)), nnx.Sequential(Raises()))
    with pytest.raises(LookupError, match="no table") as caught:
        find(model, spec(2, 4))
    assert caught.value.__notes__[:1] == ["in an abstract run of the model, at layers.1.layers.0 (Raises)"]
