"""LazyModuleMixin: classes written by hand, and subclasses of the lazy layers."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import array, assert_same_bits, assert_same_model, spec

import lazymods as lm


def along_rows(w: Any, x: jax.Array) -> jax.Array:
    """A vector repeated for every row of ``x``: rank promotion is off."""
    return jnp.broadcast_to(w[...], x.shape)


class Scale(nnx.Module):
    """The layer with sizes."""

    def __init__(self, features: int, *, rngs: nnx.Rngs):
        self.w = nnx.Param(nnx.initializers.normal()(rngs.params(), (features,), jnp.float32))
        self.features = features

    def __call__(self, x: jax.Array, *, gain: float = 1.0) -> jax.Array:
        return gain * x * along_rows(self.w, x)


class LazyScale(lm.LazyModuleMixin, Scale):
    """The same without."""

    cls_to_become = Scale

    def __init__(self, *, rngs: nnx.Rngs):
        self.w = lm.UninitializedParameter((None,), init=nnx.initializers.normal(), key=rngs.params())
        self.features = 0

    def initialize_parameters(self, x: Any, *, gain: float = 1.0) -> None:
        del gain
        self.features = x.shape[-1]
        self.w.materialize((self.features,))

    def infer_attributes_from_state(self) -> None:
        self.features = self.w.shape[0]


class Keeps(lm.LazyModuleMixin, nnx.Module):
    """Keeps its class; its size depends on a keyword."""

    def __init__(self) -> None:
        self.w = lm.UninitializedParameter()
        self.calls = 0

    def initialize_parameters(self, x: Any, *, times: int = 1) -> None:
        self.calls += 1
        self.w.materialize((times * x.shape[-1],), jnp.ones(times * x.shape[-1]))

    def __call__(self, x: jax.Array, *, times: int = 1) -> jax.Array:
        y = jnp.tile(x, times)
        return y + along_rows(self.w, y)


class Grows(lm.LazyModuleMixin, nnx.Module):
    """Makes a lazy child when it is initialized."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.w = lm.UninitializedParameter((None,))
        self.child: Any = nnx.data(None)
        self.rngs = rngs

    def initialize_parameters(self, x: Any) -> None:
        self.w.materialize((x.shape[-1],))
        self.child = lm.LazyLinear(4, rngs=self.rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.child(x + along_rows(self.w, x))


class Half(lm.LazyModuleMixin, nnx.Module):
    """Leaves one of two slots empty."""

    def __init__(self) -> None:
        self.w, self.b = lm.UninitializedParameter(), lm.UninitializedBuffer()

    def initialize_parameters(self, x: Any) -> None:
        self.w.materialize((x.shape[-1],))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * along_rows(self.w, x)


class Shouting(lm.LazyLinear):
    """A subclass of a lazy layer with a forward and a method of its own."""

    def __call__(self, inputs: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 10 * super().__call__(inputs)

    def width(self) -> int:
        return self.kernel.shape[1]


class Halved(lm.LazyLinear):
    """A subclass that changes what is initialized."""

    def initialize_parameters(self, *args: Any, **kwargs: Any) -> Any:
        made = super().initialize_parameters(*args, **kwargs)
        self.kernel[...] = self.kernel[...] / 2
        return made


class Quiet(lm.LazyLinear):
    """A subclass whose ``initialize_parameters`` keeps what ``super()`` returns to itself."""

    def initialize_parameters(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_parameters(*args, **kwargs)
        self.bias[...] = self.bias[...] + 1  # pyright: ignore[reportOptionalSubscript]


class NamesATarget(lm.LazyLinear):
    """A subclass that says what it becomes."""

    cls_to_become = nnx.Linear


def scale(seed: int = 0) -> LazyScale:
    return LazyScale(rngs=nnx.Rngs(seed))


def want_scale(features: int = 3, seed: int = 0) -> Scale:
    return Scale(features, rngs=nnx.Rngs(seed))


# ---------------------------------------------------------------- written by hand


def test_becomes_its_class() -> None:
    layer, want, x = scale(), want_scale(), array(2, 3)
    assert layer.has_uninitialized_params() and lm.is_lazy(layer) and type(layer) is LazyScale
    assert_same_bits(layer(x), want(x))
    assert_same_model(layer, want)
    assert set(vars(layer)) == set(vars(want))


def test_keeps_its_class_without_a_target() -> None:
    layer, x = Keeps(), array(2, 3)
    assert_same_bits(layer(x), x + 1)
    assert_same_bits(layer(x), x + 1)
    assert type(layer) is Keeps and layer.calls == 1
    assert not layer.has_uninitialized_params() and not lm.is_lazy(layer)


WITH_KEYWORDS: dict[str, Callable[[Any, Any], Any]] = {
    "call": lambda m, x: m(x, times=2),
    "keywords": lambda m, x: m(times=2, x=x),
    "materialize": lambda m, x: lm.materialize(m, x, times=2),
    "materialize-keywords": lambda m, x: lm.materialize(m, x=x, times=2),
    "nnx.jit": lambda m, x: nnx.jit(lambda m, x: m(x, times=2))(m, x),
}


@pytest.mark.parametrize("how", WITH_KEYWORDS.values(), ids=WITH_KEYWORDS)
def test_keywords_reach_initialize_parameters(how: Callable[[Any, Any], Any]) -> None:
    layer = Keeps()
    how(layer, array(2, 3))
    assert_same_bits(layer.w.get_value(), jnp.ones(6))
    assert not lm.is_lazy(layer)


FIRST_CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "python": lambda m, x: m(x),
    "materialize": lambda m, x: lm.materialize(m, x),
    "materialize-spec": lambda m, x: lm.materialize(m, spec(*x.shape)),
    "jax.jit": lambda m, x: jax.jit(lambda x: m(x))(x),
    "vmap": lambda m, x: jax.vmap(lambda row: m(row))(x),
    "grad": lambda m, x: jax.grad(lambda x: m(x).sum())(x),
    "nnx.jit": lambda m, x: nnx.jit(lambda m, x: m(x))(m, x),
    "nnx.vmap": lambda m, x: nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, x),
    "nnx.remat": lambda m, x: nnx.remat(lambda m, x: m(x))(m, x),
}


@pytest.mark.parametrize("first", FIRST_CALLS.values(), ids=FIRST_CALLS)
def test_first_call_in_every_context(first: Callable[[Any, Any], Any]) -> None:
    model = nnx.Dict(inner=scale())
    model.inner.w.set_metadata(tag="kept")
    first(model.inner, array(2, 3))
    want = want_scale()
    want.w.set_metadata(tag="kept")
    assert_same_model(model.inner, want)


@pytest.mark.parametrize("copier", [copy.deepcopy, nnx.clone, lambda m: nnx.merge(*nnx.split(m), copy=True)],
                         ids=["deepcopy", "clone", "split-merge"])
def test_a_copy_is_lazy_for_itself(copier: Callable[[Any], Any]) -> None:
    layer = scale()
    twin = copier(layer)
    twin(array(2, 5))
    assert_same_model(twin, want_scale(5))
    layer(array(2, 3))
    assert_same_model(layer, want_scale(3))


def test_pickle_before_and_after() -> None:
    layer = Keeps()
    twin = pickle.loads(pickle.dumps(layer))
    assert type(twin) is Keeps and lm.is_lazy(twin)
    twin(array(2, 3))
    again = pickle.loads(pickle.dumps(twin))
    assert type(again) is Keeps and not lm.is_lazy(again) and lm.is_lazy(layer)
    assert_same_bits(again.w.get_value(), jnp.ones(3))


def test_a_load_fills_it_and_infers_its_attributes() -> None:
    layer = scale()
    assert not any(lm.load_state_dict(layer, {"w": jnp.array([2.0, 4.0])}))
    assert type(layer) is Scale and layer.features == 2
    assert_same_bits(layer(jnp.ones((1, 2))), jnp.array([[2.0, 4.0]]))


@pytest.mark.parametrize("first", FIRST_CALLS.values(), ids=FIRST_CALLS)
def test_a_lazy_child_made_at_initialization(first: Callable[[Any, Any], Any]) -> None:
    layer, want = Grows(rngs=nnx.Rngs(0)), nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    first(layer, array(2, 3))
    assert not lm.has_uninitialized_params(layer) and not lm.is_lazy(layer)
    assert_same_model(layer.child, want)
    assert_same_bits(layer(array(2, 3)), want(array(2, 3)))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("first", FIRST_CALLS.values(), ids=FIRST_CALLS)
def test_a_slot_left_empty_is_an_error_and_nothing_stays(first: Callable[[Any, Any], Any]) -> None:
    layer = Half()
    with pytest.raises(lm.UninitializedError, match=r"left b uninitialized"):
        first(layer, array(2, 3))
    assert lm.uninitialized_paths(layer) == ["w", "b"] and lm.is_lazy(layer)


def test_initialize_parameters_that_fails_half_way() -> None:
    class Stumbles(Half):
        def initialize_parameters(self, x: Any) -> None:
            super().initialize_parameters(x)
            raise OSError("no table")

    layer = Stumbles()
    for first in (lambda: layer(array(2, 3)), lambda: lm.materialize(layer, array(2, 3))):
        with pytest.raises(OSError, match="no table"):
            first()
        assert lm.uninitialized_paths(layer) == ["w", "b"] and lm.is_lazy(layer)


def test_a_forward_that_fails_leaves_it_lazy() -> None:
    layer = scale()
    with pytest.raises(TypeError):
        layer(array(2, 3), gain="loud")  # pyright: ignore[reportArgumentType]
    assert type(layer) is LazyScale and layer.features == 0 and lm.uninitialized_paths(layer) == ["w"]
    layer(array(2, 5))
    assert_same_model(layer, want_scale(5))


def test_initialize_parameters_is_required() -> None:
    class Unfinished(lm.LazyModuleMixin, nnx.Module):
        def __init__(self) -> None:
            self.w = lm.UninitializedParameter()

        def __call__(self, x: jax.Array) -> jax.Array:
            return x

    with pytest.raises(NotImplementedError, match="Unfinished must define initialize_parameters"):
        Unfinished()(array(2, 3))


def test_unknown_attributes_stay_unknown() -> None:
    layer = lm.LazyLinear(4, rngs=nnx.Rngs(0))
    with pytest.raises(AttributeError, match="'LazyLinear' object has no attribute 'blah'"):
        _ = layer.blah  # pyright: ignore[reportAttributeAccessIssue]
    layer(array(2, 3))
    with pytest.raises(AttributeError, match="blah"):
        _ = layer.blah  # pyright: ignore[reportAttributeAccessIssue]


# ---------------------------------------------------------------- subclasses of the lazy layers


@pytest.mark.parametrize("first", FIRST_CALLS.values(), ids=FIRST_CALLS)
def test_a_subclass_keeps_its_class_and_methods(first: Callable[[Any, Any], Any]) -> None:
    layer, want, x = Shouting(4, rngs=nnx.Rngs(0)), nnx.Linear(3, 4, rngs=nnx.Rngs(0)), array(2, 3)
    first(layer, x)
    assert type(layer) is Shouting and not lm.is_lazy(layer)
    assert (layer.width(), layer.in_features) == (4, 3)
    assert_same_bits(layer.kernel.get_value(), want.kernel.get_value())
    assert_same_bits(layer(x), 10 * want(x))


def test_a_subclass_forward_runs_once_on_the_first_call() -> None:
    layer, x = Shouting(4, rngs=nnx.Rngs(0)), array(2, 3)
    assert_same_bits(layer(x), 10 * nnx.Linear(3, 4, rngs=nnx.Rngs(0))(x))


@pytest.mark.parametrize("first", FIRST_CALLS.values(), ids=FIRST_CALLS)
def test_a_subclass_may_change_what_is_initialized(first: Callable[[Any, Any], Any]) -> None:
    layer, want = Halved(4, rngs=nnx.Rngs(0)), nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    first(layer, array(2, 3))
    assert type(layer) is Halved and not lm.is_lazy(layer)
    assert_same_bits(layer.kernel.get_value(), want.kernel.get_value() / 2)
    assert_same_bits(layer.bias.get_value(), lm.state_dict(want)["bias"])  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("first", FIRST_CALLS.values(), ids=FIRST_CALLS)
def test_initialize_parameters_need_not_return_anything(first: Callable[[Any, Any], Any]) -> None:
    layer, want = Quiet(4, rngs=nnx.Rngs(0)), nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    first(layer, array(2, 3))
    assert type(layer) is Quiet and not lm.is_lazy(layer) and layer.in_features == 3
    assert_same_bits(layer.kernel.get_value(), want.kernel.get_value())
    assert_same_bits(layer.bias.get_value(), jnp.ones(4))  # pyright: ignore[reportOptionalMemberAccess]


def test_a_subclass_that_names_a_target_becomes_it() -> None:
    layer = NamesATarget(4, rngs=nnx.Rngs(0))
    layer(array(2, 3))
    assert_same_model(layer, nnx.Linear(3, 4, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("cls", [Shouting, Halved, NamesATarget], ids=lambda c: c.__name__)
def test_a_subclass_pickles_and_loads(cls: Any) -> None:
    twin = pickle.loads(pickle.dumps(cls(4, rngs=nnx.Rngs(0))))
    assert type(twin) is cls and lm.is_lazy(twin)
    want = nnx.Linear(3, 4, rngs=nnx.Rngs(1))
    lm.load_state_dict(twin, lm.state_dict(want))
    assert type(twin) is (nnx.Linear if cls is NamesATarget else cls) and twin.in_features == 3
    assert_same_bits(twin.kernel.get_value(), want.kernel.get_value())


def test_a_subclass_with_attributes_of_its_own() -> None:
    class Named(lm.LazyLinear):
        def __init__(self, out_features: int, name: str, *, rngs: nnx.Rngs):
            super().__init__(out_features, rngs=rngs)
            self.name, self.scale = name, nnx.Param(jnp.ones(out_features))

        def __call__(self, inputs: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
            y = super().__call__(inputs)
            return y * along_rows(self.scale, y)

    layer, x = Named(4, "left", rngs=nnx.Rngs(0)), array(2, 3)
    assert_same_bits(layer(x), nnx.Linear(3, 4, rngs=nnx.Rngs(0))(x))
    assert layer.name == "left" and type(layer.scale) is nnx.Param and lm.uninitialized_paths(layer) == []


def test_built_in_layers_are_mixins() -> None:
    for layer in (lm.LazyLinear(3, rngs=nnx.Rngs(0)), lm.LazyBatchNorm(rngs=nnx.Rngs(0))):
        assert isinstance(layer, lm.LazyModuleMixin) and layer.has_uninitialized_params()
        layer(array(2, 3))
        assert not isinstance(layer, lm.LazyModuleMixin)


class WithToken(nnx.Module):
    """A placeholder for a file to fill, in a module that infers nothing."""

    def __init__(self) -> None:
        self.fc, self.cls = lm.LazyLinear(4, rngs=nnx.Rngs(0)), lm.UninitializedParameter((1, None))

    def __call__(self, x: Any) -> Any:
        return self.fc(x) + self.cls[...]


@pytest.mark.parametrize("size", [lm.infer_shapes, lm.materialize, lambda model, x: model(x)])
def test_a_placeholder_of_a_plain_module_names_what_would_size_it(size: Callable[..., Any]) -> None:
    with pytest.raises(lm.UninitializedError) as error:
        size(WithToken(), array(2, 3))
    assert str(error.value) == (
        "cls (UninitializedParameter)\n"
        "  got:    a use of its value, while it is an uninitialized parameter of shape (1, ?)\n"
        "  needed: its sizes, which nothing infers: WithToken is no lazy module, and only a checkpoint could tell "
        "them\n"
        "  write:  def initialize_parameters(self, x): self.cls.materialize((1, x.shape[-1]))"
        "  # in class WithToken(lm.LazyModuleMixin, nnx.Module)"
    )


def test_what_that_line_says_does_it() -> None:
    class Mended(lm.LazyModuleMixin, WithToken):
        def initialize_parameters(self, x: Any) -> None:
            self.cls.materialize((1, 4))

    model = Mended()
    lm.materialize(model, array(2, 3))
    assert type(model.cls) is nnx.Param and model.cls.shape == (1, 4)
    loaded = WithToken()
    lm.load(loaded, lm.state_dict(model))
    np.testing.assert_array_equal(loaded(array(2, 3)), model(array(2, 3)))
