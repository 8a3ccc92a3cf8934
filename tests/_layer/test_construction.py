"""Layers that are configured alike are configured once; nothing of that shows in any of them."""

import copy
import dataclasses
import gc
import pickle
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits, assert_same_model, raw

import lazymods as lm
from lazymods import _compat, _graph

X = jnp.ones((2, 6))


class Counted(nnx.Module):
    """Counts how often its constructor runs."""

    runs = 0

    def __init__(self, n: int, scale: Any = 1, sizes: Any = None, *, rngs: nnx.Rngs):
        type(self).runs += 1
        self.fc = nnx.Linear(n, 3, rngs=rngs)
        self.scale = scale
        self.sizes = sizes

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x)


LazyCounted = lm.lazy(Counted, infer=lambda config, x: {"n": x.shape[-1]})


def test_one_configuration_is_read_once() -> None:
    rngs = nnx.Rngs(0)
    first = LazyCounted(scale="once", rngs=rngs)
    runs = Counted.runs
    others = [LazyCounted(scale="once", rngs=rngs) for _ in range(3)]
    assert Counted.runs == runs
    first(X)
    runs = Counted.runs
    for other in others:
        other(X)
    assert Counted.runs == runs


def test_a_load_reads_one_configuration_once() -> None:
    source = [lm.LazyLinear(17, rngs=nnx.Rngs(i)) for i in range(3)]
    for layer in source:
        layer(X)
    target = nnx.List([lm.LazyLinear(17, rngs=nnx.Rngs(9)) for _ in range(3)])
    lm.load_state_dict(target, lm.state_dict(nnx.List(source)))
    assert_same_model(target, nnx.List(source))


@pytest.mark.parametrize(
    "values",
    [
        (1, True, 1.0),
        (0, False, 0.0, -0.0),
        (np.float32(0.0), np.float32(-0.0)),
        (0j, -0j, complex(0, -0.0)),
        ("1", b"1"),
    ],
)
def test_arguments_count_by_type_and_value(values: Any) -> None:
    for _ in range(2):
        for value in values:
            layer = LazyCounted(scale=value, sizes=(value, (value,)), rngs=nnx.Rngs(0))
            layer(X)
            for held in (layer.scale, layer.sizes[0], layer.sizes[1][0]):
                assert (type(held), repr(held)) == (type(value), repr(value))


def test_an_argument_that_changes_in_place_is_read_anew() -> None:
    sizes = [1, 2]
    first = LazyCounted(sizes=sizes, rngs=nnx.Rngs(0))
    second = LazyCounted(sizes=sizes, rngs=nnx.Rngs(0))
    sizes.append(3)
    third = LazyCounted(sizes=sizes, rngs=nnx.Rngs(0))
    assert first.sizes == second.sizes == [1, 2]
    assert third.sizes == [1, 2, 3]
    first.sizes.append(4)
    assert second.sizes == [1, 2]


class Config:
    """Ordinary settings: equal to themselves alone."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


@dataclasses.dataclass
class Settings:
    """Settings that can be changed."""

    width: int
    start: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Settings that take 1 for True, and of which two notes are one."""

    width: int
    start: Any
    note: str = dataclasses.field(default="", compare=False)


class Configured(nnx.Module):
    """All that it is follows from its settings."""

    def __init__(self, n: int, config: Any, *, rngs: nnx.Rngs) -> None:
        config = config[0] if isinstance(config, tuple) else config
        self.config = nnx.static(config)
        given = config if isinstance(config, dict) else vars(config)
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (n, given["width"])))
        self.start = nnx.Variable(jnp.full((n,), given["start"]))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel[...]


LazyConfigured = lm.lazy(Configured, infer=lambda config, x: {"n": x.shape[-1]})
CHANGING: dict[str, Any] = {"object": Config, "dataclass": Settings, "dict": dict, "namespace": types.SimpleNamespace}


def change(config: Any, **given: Any) -> None:
    (config if isinstance(config, dict) else vars(config)).update(given)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda c: c, lambda c: (c,)], ids=["", "in a tuple"])
@pytest.mark.parametrize("make", CHANGING.values(), ids=CHANGING)
def test_settings_that_change_are_those_of_the_moment(make: Any, wrap: Any) -> None:
    """A sweep over one object of settings: each layer is what the explicit one is that is made beside it."""
    config = make(width=4, start=0.0)
    layers, wants = [], []
    for width, start in ((4, 0.5), (7, 1), (9, True)):
        change(config, width=width, start=start)
        layers.append(LazyConfigured(config=wrap(config), rngs=nnx.Rngs(0)))
        wants.append(Configured(6, wrap(config), rngs=nnx.Rngs(0)))
        layers.append(copy.deepcopy(layers[-1]))
        layers.append(pickle.loads(pickle.dumps(layers[-1])))
        wants += wants[-1:] * 2
    change(config, width=11, start=2.0)
    for layer, want in zip(layers, wants, strict=True):
        layer(X)
        assert_same_bits(layer.kernel.get_value(), want.kernel.get_value())
        assert_same_bits(layer.start.get_value(), want.start.get_value())


def test_an_array_that_changes_is_that_of_the_moment() -> None:
    class Shifted(nnx.Module):
        def __init__(self, n: int, shift: Any, *, rngs: nnx.Rngs) -> None:
            self.fc = nnx.Linear(n, 3, rngs=rngs)
            self.shift = nnx.Variable(jnp.asarray(shift))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.fc(x) + self.shift[...]

    shift = np.ones((1, 3), np.float32)
    layer = lm.lazy(Shifted, infer=lambda config, x: {"n": x.shape[-1]})(shift=shift, rngs=nnx.Rngs(0))
    shift[...] = 5
    layer(X)
    assert_same_bits(layer.shift.get_value(), jnp.ones((1, 3)))


def test_equal_settings_of_other_types_are_others() -> None:
    for _ in range(2):
        for start in (1, True, 1.0, 0.0, -0.0):
            given = Frozen(4, start), frozenset({start})
            layer = LazyConfigured(config=given[0], rngs=nnx.Rngs(0))
            layer(X)
            assert_same_model(layer, Configured(6, given[0], rngs=nnx.Rngs(0)))
            counted = LazyCounted(scale=given[1], rngs=nnx.Rngs(0))
            counted(X)
            assert repr(counted.scale) == repr(given[1])
    for note in ("one", "two"):
        assert LazyConfigured(config=Frozen(4, 1.0, note), rngs=nnx.Rngs(0)).config.note == note


def test_bound_methods_and_fresh_functions() -> None:
    class Start:
        def __init__(self, value: float) -> None:
            self.value = value

        def init(self, key: Any, shape: Any, dtype: Any) -> jax.Array:
            return jnp.full(shape, self.value, dtype)

    for value in (1.0, 2.0, 3.0):
        for init in (Start(value).init, lambda key, shape, dtype, value=value: jnp.full(shape, value, dtype)):
            layer = lm.LazyLinear(3, kernel_init=init, rngs=nnx.Rngs(0))
            layer(X)
            assert_same_bits(layer.kernel.get_value(), jnp.full((6, 3), value))


def test_other_streams_are_another_configuration() -> None:
    for make in (lambda: nnx.Rngs(0), lambda: nnx.Rngs(params=1), lambda: nnx.Rngs(jax.random.key(0, impl="rbg"))):
        layer, want = lm.LazyLinear(3, rngs=make()), nnx.Linear(6, 3, rngs=make())
        layer(X)
        assert_same_model(layer, want)


def test_nothing_keeps_the_rngs() -> None:
    rngs = nnx.Rngs(0)
    lm.LazyLinear(23, rngs=rngs)
    stream = weakref.ref(rngs.default)
    del rngs
    gc.collect()
    assert stream() is None


def test_an_argument_lives_as_long_as_it_is_remembered() -> None:
    def init(key: Any, shape: Any, dtype: Any) -> jax.Array:
        return jnp.zeros(shape, dtype)

    lm.LazyLinear(3, kernel_init=init, rngs=nnx.Rngs(0))
    alive = weakref.ref(init)
    del init
    gc.collect()
    assert alive() is not None  # or another function could get its identity


# ---------------------------------------------------------------- what Flax checks


def test_flax_checks_what_a_subclass_adds() -> None:
    class Adds(lm.LazyLinear):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(3, **kwargs)
            self.extra: list[Any] = []
            self.extra.append(jnp.ones(2))

    with pytest.raises(ValueError, match="unexpected data"):
        Adds(rngs=nnx.Rngs(0))


def test_flax_checks_a_layer_later() -> None:
    layer = lm.LazyLinear(3, rngs=nnx.Rngs(0))
    nnx.pytreelib.check_pytree(layer)
    vars(layer)["use_bias"] = [jnp.ones(2)]
    with pytest.raises(ValueError, match="unexpected data"):
        nnx.pytreelib.check_pytree(layer)


def test_which_attributes_are_data() -> None:
    layer, want = lm.LazyLinear(3, rngs=nnx.Rngs(0)), nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    other = lm.LazyLinear(3, rngs=nnx.Rngs(0))
    assert _compat.data_names(layer)[_graph.STATE] is False
    layer.extra = nnx.data(1)  # pyright: ignore[reportAttributeAccessIssue]
    assert "extra" not in _compat.data_names(other)
    layer(X)
    other(X)
    assert _compat.data_names(other) == _compat.data_names(want)
    assert _compat.data_names(layer) == {**_compat.data_names(want), "extra": True}


# ---------------------------------------------------------------- counters


@contextmanager
def nowhere() -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    "context",
    [nowhere, lambda: jax.default_device(jax.devices()[0]), lambda: jax.set_mesh(jax.make_mesh((1,), ("x",)))],
)
@pytest.mark.parametrize("start", [0, 7, 2**32 - 1])
@pytest.mark.parametrize("committed", [False, True])
def test_a_counter_is_what_adding_gives(context: Any, start: int, committed: bool) -> None:
    count = jnp.uint32(start)
    if committed:
        count = jax.device_put(count, jax.devices()[0])
    with context():
        got, want = _compat.counted(count, 2), count + np.uint32(2)
    assert_same_bits(got, want)
    assert (got.sharding, got.committed, got.weak_type) == (want.sharding, want.committed, want.weak_type)


def test_a_counter_in_a_trace_and_on_the_host() -> None:
    assert jax.jit(lambda c: _compat.counted(c, 2))(jnp.uint32(3)) == 5
    assert jax.vmap(lambda c: _compat.counted(c, 2))(jnp.arange(3, dtype=jnp.uint32)).tolist() == [2, 3, 4]
    assert _compat.counted(np.uint32(3), 2) == 5


def test_a_hook_on_a_counter_runs() -> None:
    class Later(nnx.RngCount):
        def get_value(self, **kwargs: Any) -> Any:
            return super().get_value(**kwargs) + np.uint32(1)

    with pytest.warns(UserWarning, match="hooks are deprecated"):
        hooked = nnx.RngCount(jnp.uint32(3), tag="default", on_get_value=lambda _, value: value + np.uint32(1))
    for count in (hooked, Later(jnp.uint32(3), tag="default")):
        assert _compat.value_of(count) == count.get_value() == 4


# ---------------------------------------------------------------- constants


@pytest.fixture
def compiles() -> Iterator[Any]:
    """Count the programs that XLA compiles."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        names.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: sum("backend_compile" in name for name in names)
    jax.monitoring.unregister_event_duration_listener(listen)


def test_zeros_and_ones_compile_nothing(compiles: Any) -> None:
    layers = [lm.LazyLayerNorm(rngs=nnx.Rngs(0)) for _ in range(3)]
    before = compiles()
    for width, layer in zip((137, 139, 149), layers, strict=True):
        lm.materialize(layer, jax.ShapeDtypeStruct((2, width), jnp.float32))
    assert compiles() == before
    jnp.zeros((151, 3))  # as Flax makes them
    assert compiles() > before
    for width, layer in zip((137, 139, 149), layers, strict=True):
        want = nnx.LayerNorm(width, rngs=nnx.Rngs(0))
        for name, expected in lm.state_dict(want).items():
            got = lm.state_dict(layer)[name]
            assert_same_bits(raw(got), raw(expected))
            assert (got.committed, got.weak_type) == (expected.committed, expected.weak_type)
