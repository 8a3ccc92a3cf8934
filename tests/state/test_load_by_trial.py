"""Loads into lazy layers whose sizes follow by no formula: found by trying, or left to the first call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deciding import Default
from flax import nnx

import lazymods as lm

normal = nnx.initializers.lecun_normal()


class Square(nnx.Module):
    def __init__(self, n: int, *, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(normal(rngs.params(), (n * n, 3)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x[:, :, None] * x[:, None, :]).reshape(x.shape[0], -1) @ self.w


class Hidden(nnx.Module):
    """A width that is the same at all small sizes."""

    def __init__(self, n: int, *, rngs: nnx.Rngs) -> None:
        h = max(8, n // 4)
        self.a = nnx.Linear(n, h, rngs=rngs)
        self.b = nnx.Linear(h, n, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(self.a(x))


class Depth(nnx.Module):
    def __init__(self, depth: int, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(depth)])
        self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = self.drop(layer(x))
        return x


class Capped(nnx.Module):
    def __init__(self, n: int, *, rngs: nnx.Rngs) -> None:
        self.n = n
        self.fc = nnx.Linear(min(n, 5), 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x[:, :5])


class Even(nnx.Module):
    """Refuses most sizes."""

    def __init__(self, n: int, *, rngs: nnx.Rngs) -> None:
        if n % 4:
            raise ValueError(f"{n} is no multiple of 4")
        self.w = nnx.Param(normal(rngs.params(), (n, n * n)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w


class Both(nnx.Module):
    """A size that is required, and one that has a default."""

    def __init__(self, n: int, m: int = 2, *, rngs: nnx.Rngs) -> None:
        self.fc = nnx.Linear(n, m, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x)


class Conditioned(nnx.Module):
    """Projections of what it is conditioned on, if it is: the second may only be there with the first."""

    def __init__(self, n: int, a: int | None = None, b: int | None = None, *, rngs: nnx.Rngs) -> None:
        self.a, self.b = a, b
        self.norm = nnx.LayerNorm(n, rngs=rngs)
        self.of_a = None if a is None else nnx.Linear(a, n, rngs=rngs)
        self.of_b = None if a is None or b is None else nnx.Linear(b, n, rngs=rngs)

    def __call__(self, x: jax.Array, y: Any = None, z: Any = None) -> jax.Array:
        x = self.norm(x)
        x = x if self.of_a is None else x + self.of_a(y)
        return x if self.of_b is None else x + self.of_b(z)


class Demanding(Conditioned):
    """The same with one option that has to be given, and may be None."""

    def __init__(self, n: int, a: int | None, *, rngs: nnx.Rngs) -> None:
        super().__init__(n, a, rngs=rngs)


class Either(nnx.Module):
    """Two optional sizes that make the same."""

    def __init__(self, n: int, a: int | None = None, b: int | None = None, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(n, rngs=rngs)
        size = a if b is None else b
        self.fc = None if size is None else nnx.Linear(size, n, rngs=rngs)


class Halved(nnx.Module):
    """An optional size of which only the half is in the file."""

    def __init__(self, n: int, a: int | None = None, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(n, rngs=rngs)
        self.fc = None if a is None else nnx.Linear(a // 2, n, rngs=rngs)


class Product(nnx.Module):
    """Two sizes of which only the product is in the file."""

    def __init__(self, n: int, k: int, *, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(normal(rngs.params(), (n * k, 3)))

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return (x[:, :, None] * y[:, None, :]).reshape(x.shape[0], -1) @ self.w


def n(config: Any, x: Any) -> dict[str, int]:
    return {"n": x.shape[-1]}


def depth(config: Any, x: Any) -> dict[str, int]:
    return {"depth": x.shape[0]}


def n_and_k(config: Any, x: Any, y: Any) -> dict[str, int]:
    return {"n": x.shape[-1], "k": y.shape[-1]}


def conditioned(config: Any, x: Any, y: Any = None, z: Any = None) -> dict[str, int | None]:
    sizes = {k: None if v is None else v.shape[-1] for k, v in {"a": y, "b": z}.items()}
    return {"n": x.shape[-1], **sizes}


def demanded(config: Any, x: Any, y: Any = None) -> dict[str, int | None]:
    return {"n": x.shape[-1], "a": None if y is None else y.shape[-1]}


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "square": (Square, n, {"n": 5}),
    "hidden, small": (Hidden, n, {"n": 6}),
    "hidden, large": (Hidden, n, {"n": 60}),
    "one deep": (Depth, depth, {"depth": 1}),
    "three deep": (Depth, depth, {"depth": 3}),
    "below the cap": (Capped, n, {"n": 3}),
    "only some sizes": (Even, n, {"n": 8}),
    "the default": (Default, n, {"n": 3}),
    "not the default": (Default, n, {"n": 5}),
    "neither default": (Both, n, {"n": 5, "m": 4}),
    "no option": (Conditioned, conditioned, {"n": 4}),
    "an option": (Conditioned, conditioned, {"n": 4, "a": 3}),
    "an option as large": (Conditioned, conditioned, {"n": 4, "a": 4}),
    "two options": (Conditioned, conditioned, {"n": 4, "a": 3, "b": 6}),
    "required, and none": (Demanding, demanded, {"n": 4, "a": None}),
    "required, and one": (Demanding, demanded, {"n": 4, "a": 3}),
}


class Model(nnx.Module):
    def __init__(self, layer: Any, head: Any) -> None:
        self.layers = nnx.List([layer, head])


def assert_same(model: Any, want: Any) -> None:
    assert nnx.graphdef(model) == nnx.graphdef(want)
    got, expected = lm.state_dict(model), lm.state_dict(want)
    assert list(got) == list(expected)
    for name, value in got.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize("way", ["load", "file", "inside a model"])
@pytest.mark.parametrize("name", CASES)
def test_sizes_are_those_of_the_entries(name: str, way: str, tmp_path: Path) -> None:
    cls, infer, sizes = CASES[name]
    model, want = lm.lazy(cls, infer=infer)(rngs=nnx.Rngs(0)), cls(**sizes, rngs=nnx.Rngs(1))
    if way == "inside a model":
        model = Model(model, lm.LazyLinear(3, rngs=nnx.Rngs(2)))
        want = Model(want, nnx.Linear(7, 3, rngs=nnx.Rngs(3)))
    if way == "file":
        lm.save(want, tmp_path / "model.safetensors")
        lm.load(model, tmp_path / "model.safetensors")
    else:
        lm.load_state_dict(model, lm.state_dict(want))
    assert not lm.is_lazy(model) and not lm.has_uninitialized_params(model)
    assert_same(model, want)


@pytest.mark.parametrize(
    ("cls", "infer", "sizes", "x"),
    [
        (Capped, n, {"n": 9}, (jnp.ones((2, 9)),)),
        (Product, n_and_k, {"n": 4, "k": 6}, (jnp.ones((2, 4)), jnp.ones((2, 6)))),
    ],
)
def test_what_several_sizes_give_waits_for_the_first_call(cls: Any, infer: Any, sizes: Any, x: Any) -> None:
    """The values are the file's at once; the attributes are those of the call's sizes."""
    model, want = lm.lazy(cls, infer=infer)(rngs=nnx.Rngs(0)), cls(**sizes, rngs=nnx.Rngs(1))
    lm.load_state_dict(model, lm.state_dict(want))
    assert lm.is_lazy(model) and not lm.has_uninitialized_params(model)
    np.testing.assert_array_equal(model(*x), want(*x))
    assert_same(model, want)


@pytest.mark.parametrize("cls", [Either, Halved])
def test_options_that_can_not_be_told_are_refused(cls: Any) -> None:
    model = lm.lazy(cls, infer=conditioned)(rngs=nnx.Rngs(0))
    before = lm.uninitialized_paths(model)
    with pytest.raises(lm.StateDictError, match=r"fc\.kernel"):
        lm.load_state_dict(model, lm.state_dict(cls(4, 6, rngs=nnx.Rngs(1))))
    assert lm.uninitialized_paths(model) == before


X, Y, Z = jnp.ones((2, 4)), jnp.ones((2, 3)), jnp.ones((2, 6))


def jitted(model: Any, *args: Any) -> Any:
    return lm.jit(lambda m, *a: m(*a))(model, *args)


@pytest.mark.parametrize("size", [lambda m, *a: m(*a), lm.materialize, jitted])
@pytest.mark.parametrize("args", [(X,), (X, Y), (X, Y, Z), (X, None, Z)], ids=["x", "xy", "xyz", "xz"])
@pytest.mark.parametrize("cls", [Conditioned, Demanding])
def test_a_call_tells_that_a_size_is_none(cls: Any, args: Any, size: Any) -> None:
    most = 3 if cls is Conditioned else 2
    model = lm.lazy(cls, infer=conditioned if cls is Conditioned else demanded)(rngs=nnx.Rngs(0))
    args = args[:most]
    sizes: list[Any] = [None if a is None else a.shape[-1] for a in (*args, None, None)][:most]
    want = cls(*sizes, rngs=nnx.Rngs(0))
    size(model, *args)
    assert_same(model, want)
    np.testing.assert_array_equal(model(*args), want(*args))


def test_none_for_a_size_that_has_to_be_a_number_is_told_in_the_words_of_the_class() -> None:
    layer = lm.lazy(Both, infer=lambda config, x: {"n": None})(rngs=nnx.Rngs(0))
    with pytest.raises(lm.ShapeInferenceError, match="n=None") as caught:
        layer(X)
    assert "sizes that Both takes; it says: " in str(caught.value) and lm.is_lazy(layer)


def test_a_size_that_the_caller_gave_is_not_changed() -> None:
    model = lm.lazy(Default, infer=lambda config, x: {})(n=3, rngs=nnx.Rngs(0))
    with pytest.raises(lm.StateDictError, match="shape"):
        lm.load_state_dict(model, lm.state_dict(Default(5, rngs=nnx.Rngs(1))))
    assert lm.uninitialized_paths(model) == ["fc.kernel", "fc.bias", "bias"]
    model(jnp.ones((2, 3)))
    assert_same(model, Default(3, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("name", CASES)
def test_what_fits_no_sizes_is_refused_and_changes_nothing(name: str) -> None:
    cls, infer, sizes = CASES[name]
    model, want = lm.lazy(cls, infer=infer)(rngs=nnx.Rngs(0)), cls(**sizes, rngs=nnx.Rngs(0))
    before = lm.uninitialized_paths(model)
    first = next(iter(lm.state_dict(want)))
    for wrong in ({"nobody": np.ones(2, np.float32)}, {first: np.ones((5, 7, 2), np.float32)}):
        with pytest.raises(lm.StateDictError):
            lm.load_state_dict(model, lm.state_dict(want) | wrong)
        assert lm.uninitialized_paths(model) == before
    lm.load_state_dict(model, lm.state_dict(want))
    assert_same(model, want)


@pytest.mark.slow
def test_a_hook_that_refuses_after_all_leaves_the_layer_as_it_was() -> None:
    model = lm.lazy(Hidden, infer=n)(rngs=nnx.Rngs(0))
    before = {p: lm.state_dict(model)[p].shape for p in lm.uninitialized_paths(model)}

    def refuse(*args: Any) -> None:
        raise RuntimeError("no")

    handle = lm.register_load_state_dict_post_hook(model, refuse)
    with pytest.raises(RuntimeError, match="no"):
        lm.load_state_dict(model, lm.state_dict(Hidden(60, rngs=nnx.Rngs(1))))
    handle.remove()
    assert {p: lm.state_dict(model)[p].shape for p in lm.uninitialized_paths(model)} == before
    model(jnp.ones((2, 6)))
    assert_same(model, Hidden(6, rngs=nnx.Rngs(0)))
