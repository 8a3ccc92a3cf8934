"""Rows 22, 23, 69-72, 76-85, 114 and 124-144: hooks, optimizers, subclasses, copies, ties and transforms."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import MLP, array, assert_same_bits, assert_same_model, lazy_mlp, plain_mlp, spec
from jax import export

import lazymods as lm


def lazy(out: int = 4, **options: Any) -> Any:
    return lm.LazyLinear(out, rngs=nnx.Rngs(0), **options)


def plain(size: int = 3, out: int = 4, **options: Any) -> Any:
    return nnx.Linear(size, out, rngs=nnx.Rngs(0), **options)


# ---------------------------------------------------------------- hooks


def test_pre_hook_on_the_first_call() -> None:
    layer, seen, x = lazy(), [], array(2, 3)

    def add_one(module: Any, args: Any) -> Any:
        seen.append(args[0].shape)
        return args[0] + 1.0

    lm.register_forward_pre_hook(layer, add_one)
    for _ in range(2):
        assert_same_bits(layer(x), plain()(x + 1.0))
    assert seen == [(2, 3)] * 2


def test_forward_hook_on_the_first_call() -> None:
    layer = lazy()
    lm.register_forward_hook(layer, lambda module, args, output: jnp.full_like(output, 7.0))
    assert_same_bits(layer(array(2, 3)), jnp.full((2, 4), 7.0))
    assert not lm.is_lazy(layer)


@pytest.mark.parametrize("prepend", [False, True], ids=["sees_the_ready_layer", "prepended_sees_the_lazy_layer"])
def test_order_of_hooks(prepend: bool) -> None:
    layer, seen = lazy(), []
    lm.register_forward_pre_hook(layer, lambda m, args: seen.append((lm.is_lazy(m), m.kernel.shape)), prepend=prepend)
    layer(array(2, 3))
    assert seen == [(True, (None, 4)) if prepend else (False, (3, 4))]


def narrow(module: Any, args: Any) -> Any:
    return (args[0][..., :2],)


def test_a_hook_that_narrows_the_input() -> None:
    layer, x = lazy(), array(2, 3)
    handle = lm.register_forward_pre_hook(layer, narrow)
    with pytest.raises((TypeError, lm.ShapeInferenceError)):  # sized for 3, given 2
        layer(x)
    assert lm.uninitialized_paths(layer) == ["kernel", "bias"]
    handle.remove()
    lm.register_forward_pre_hook(layer, narrow, prepend=True)
    assert_same_bits(layer(x), plain(2)(x[:, :2]))
    assert layer.in_features == 2


def test_another_class_s_forward_is_refused() -> None:
    layer = lazy()
    with pytest.raises(lm.UninitializedError, match=r"lm\.materialize"):
        nnx.Linear.__call__(layer, array(2, 3))
    assert lm.is_lazy(layer)
    assert_same_bits(layer.__call__(array(2, 3)), plain()(array(2, 3)))


# ---------------------------------------------------------------- classes written by hand


class Doubling(nnx.Module):
    def __init__(self, size: int) -> None:
        self.w = nnx.Param(jnp.full((size,), 2.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.w[None]


class LazyDoubling(lm.LazyModuleMixin, Doubling):
    def __init__(self) -> None:
        self.w = lm.UninitializedParameter()

    def initialize_parameters(self, x: Any) -> None:
        self.w.materialize(x.shape[-1:], jnp.full(x.shape[-1:], 2.0))


class Nothing(lm.LazyModuleMixin, nnx.Module):
    def __init__(self) -> None:
        self.w, self.v = lm.UninitializedParameter(), lm.UninitializedParameter((2,))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.w[...]


class HalfDone(Nothing):
    def initialize_parameters(self, x: Any) -> None:
        self.w.materialize(x.shape[-1:])


def test_initialize_parameters_is_missing() -> None:
    with pytest.raises(NotImplementedError, match=r"Nothing must define initialize_parameters"):
        Nothing()(array(2, 3))


def test_initialize_parameters_leaves_a_slot() -> None:
    model = nnx.Sequential(HalfDone())
    with pytest.raises(lm.UninitializedError) as error:
        model(array(2, 3))
    assert "layers.0 (HalfDone)" in str(error.value)
    assert "left v uninitialized" in str(error.value) and "self.v.materialize(shape)" in str(error.value)
    assert lm.uninitialized_paths(model) == ["layers.0.w", "layers.0.v"]  # the other is empty again


def test_without_a_class_to_become() -> None:
    layer = LazyDoubling()
    assert_same_bits(layer(jnp.ones((1, 3))), jnp.full((1, 3), 2.0))
    assert type(layer) is LazyDoubling and not lm.is_lazy(layer)
    layer.w[...] = jnp.ones(3)
    assert_same_bits(layer(jnp.ones((1, 3))), jnp.ones((1, 3)))  # not initialized again


class Scaled(lm.LazyLinear):
    """A user's subclass: a method of its own and a forward of its own."""

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Any:
        return 2 * super().__call__(inputs, out_sharding)

    def norm(self) -> jax.Array:
        return jnp.linalg.norm(self.kernel[...])


def test_a_subclass_keeps_its_methods() -> None:
    layer, x = Scaled(4, rngs=nnx.Rngs(0)), array(2, 3)
    for _ in range(2):
        assert_same_bits(layer(x), 2 * plain()(x))
        assert type(layer) is Scaled and not lm.is_lazy(layer)
    assert_same_bits(layer.norm(), jnp.linalg.norm(plain().kernel[...]))


def test_an_init_pass_over_a_lazy_model_is_refused() -> None:
    model = lazy_mlp()
    with pytest.raises(lm.UninitializedError, match=r"fc1\.bias|fc1\.kernel"):
        for _, p in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            p[...] = 0.5 * p[...]
    assert lm.uninitialized_paths(model) == ["fc1.kernel", "fc1.bias", "fc2.kernel", "fc2.bias"]


# ---------------------------------------------------------------- optimizers and wrappers

OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9), "adam": optax.adam(0.1), "adamw": optax.adamw(0.1),
    "adamax": optax.adamax(0.1), "adadelta": optax.adadelta(0.1), "rprop": optax.rprop(0.1),
    "rmsprop": optax.rmsprop(0.1), "lbfgs": optax.lbfgs(0.1, linesearch=None), "nadam": optax.nadam(0.1),
    "radam": optax.radam(0.1), "adagrad": optax.adagrad(0.1),
}


def trained(model: Any, optimizer: Any) -> Any:
    x = array(2, 3)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes Python numbers with integer counts
        for _ in range(2):
            optimizer.update(model, nnx.grad(lambda m: jnp.square(m(x)).sum())(model))
    return model


@pytest.mark.parametrize("tx", [optax.sgd(0.1), *OPTIMIZERS.values()], ids=["sgd", *OPTIMIZERS])
def test_an_optimizer_made_before_the_first_call(tx: Any) -> None:
    model = lazy(2)
    optimizer, kernel = lm.LazyOptimizer(model, tx, wrt=nnx.Param), model.kernel
    model(array(2, 3))
    trained(model, optimizer)
    want = plain(3, 2)
    explicit = nnx.Optimizer(want, tx, wrt=nnx.Param)
    assert_same_model(model, trained(want, explicit))
    assert model.kernel is kernel and type(kernel) is nnx.Param
    assert_same_model(optimizer, explicit)


@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_with_state_is_refused(tx: Any) -> None:
    model = lazy_mlp()
    with pytest.raises(lm.UninitializedError, match=r"fc1\.(bias|kernel) \(UninitializedParameter of LazyLinear\)"):
        nnx.Optimizer(model, tx, wrt=nnx.Param)
    assert len(lm.uninitialized_paths(model)) == 4


@pytest.mark.parametrize("name", ["WeightNorm", "SpectralNorm"],
                         ids=["rows_71_136-report_a17-WeightNorm", "rows_72_136-report_a17-SpectralNorm"])
def test_wrapping_a_lazy_layer(name: str) -> None:
    x = array(2, 3)
    wrong = getattr(nnx, name)(lazy(), rngs=nnx.Rngs(1))
    with pytest.raises(lm.UninitializedError, match=r"lm\.materialize"):
        wrong(x)
    right = getattr(lm, f"Lazy{name}")(lazy(), rngs=nnx.Rngs(1))
    want = getattr(nnx, name)(plain(), rngs=nnx.Rngs(1))
    for _ in range(2):
        assert_same_bits(right(x), want(x))
    assert_same_model(right, want)


# ---------------------------------------------------------------- ties and copies

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy, "clone": nnx.clone, "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "split_merge": lambda m: nnx.merge(*nnx.split(m), copy=True),
}


def tied_pair(seed: int = 0) -> Any:
    r = nnx.Rngs(seed)
    pair = nnx.List([lm.LazyLinear(3, rngs=r), lm.LazyLinear(3, rngs=r)])
    pair[1].kernel = pair[0].kernel
    return pair


@pytest.mark.parametrize("copier", COPIES.values(), ids=COPIES)
def test_a_tie_holds(copier: Callable[[Any], Any]) -> None:
    pair = copier(tied_pair())
    assert len(nnx.to_flat_state(nnx.state(pair, nnx.Param))) == 3  # counted once
    pair[0].kernel.dtype = jnp.bfloat16
    pair[0].kernel.dtype = jnp.float32
    x = array(2, 3)
    pair[0](x)
    assert pair[1].kernel is pair[0].kernel and type(pair[0].kernel) is nnx.Param
    assert type(pair[0]) is nnx.Linear and lm.uninitialized_paths(pair[1]) == ["bias"]
    pair[1](x)
    r = nnx.Rngs(0)
    want = nnx.List([nnx.Linear(3, 3, rngs=r), nnx.Linear(3, 3, rngs=r)])
    want[1].kernel = want[0].kernel
    assert_same_model(pair, want)


def twice(layer: Any) -> Any:
    return nnx.Sequential(layer, layer)


def test_the_same_layer_twice() -> None:
    model, want, x = twice(lazy()), twice(plain(4)), array(2, 4)
    assert list(lm.state_dict(model)) == ["layers.0.kernel", "layers.0.bias", "layers.1.kernel", "layers.1.bias"]
    assert_same_bits(model(x), want(x))
    assert_same_model(model, want)


@pytest.mark.parametrize("use", [lm.materialize, lm.infer_shapes], ids=["materialize", "infer_shapes"])
def test_the_same_layer_twice_at_two_widths(use: Callable[..., Any]) -> None:
    model = twice(lazy())
    with pytest.raises(lm.ShapeInferenceError) as error:
        use(model, spec(2, 3))
    assert "layers.0 (LazyLinear)" in str(error.value)
    assert "in_features=4" in str(error.value) and "in_features=3" in str(error.value)
    assert lm.is_lazy(model.layers[0])


@pytest.mark.parametrize("kind", [lm.LazyLinear, lambda out, rngs: lm.LazyBatchNorm(rngs=rngs)],
                         ids=["row_126-report_a2-Linear", "row_127-report_a2-BatchNorm"])
@pytest.mark.parametrize("copier", COPIES.values(), ids=COPIES)
def test_the_copy_alone_is_called(copier: Callable[[Any], Any], kind: Any) -> None:
    layer = kind(4, rngs=nnx.Rngs(0))
    before = lm.uninitialized_paths(layer)
    twin = copier(layer)
    twin(array(2, 3))
    assert not lm.has_uninitialized_params(twin) and lm.uninitialized_paths(layer) == before


def test_a_pickle_keeps_what_is_known() -> None:
    layer = lazy(param_dtype=jnp.float16, kernel_metadata={"out_sharding": None, "tag": "here"})
    layer.bias.set_metadata(frozen=True)
    twin = pickle.loads(pickle.dumps(layer))
    assert twin.kernel.dtype == jnp.float16 and twin.kernel.tag == "here" and twin.bias.frozen
    twin(array(2, 3, dtype=jnp.float16))
    assert_same_bits(twin.kernel[...], plain(param_dtype=jnp.float16).kernel[...])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "bfloat16", jnp.float16], ids=["type", "name", "half"])
def test_every_spelling_of_a_dtype(dtype: Any) -> None:
    by_argument, by_slot, at_the_end = lazy_mlp(), lazy_mlp(), lazy_mlp()
    for placeholder in lm.state_dict(by_slot).values():
        placeholder.dtype = dtype
    with jax.numpy_dtype_promotion("standard"):
        report = lm.materialize(by_argument, spec(2, 8), dtype=dtype)
        lm.materialize(by_slot, spec(2, 8))
        lm.materialize(at_the_end, spec(2, 8))
    for name, value in lm.state_dict(at_the_end).items():
        for model in (by_argument, by_slot):
            assert_same_bits(lm.state_dict(model)[name], value.astype(dtype))
    assert {p.dtype for row in report.rows for p in row.parameters} == {jnp.dtype(dtype)}


def test_parameters_are_counted() -> None:
    model = nnx.Sequential(plain(), lazy(out=5))
    report = lm.summary(model)
    assert [row.size for row in report.rows] == [16, None]
    assert report.total_parameters == 16 + 5 and not report.is_complete
    assert "(?, 5)" in str(report)
    assert lm.infer_shapes(model, spec(2, 3)).total_parameters == 16 + 25


def test_no_gradient_is_empty() -> None:
    model, x = lazy_mlp(), array(2, 8)
    for grad in (nnx.grad, nnx.value_and_grad):
        with pytest.raises(lm.UninitializedError, match="parameters to differentiate with respect to"):
            grad(lambda m: m(x).sum())(model)


def test_an_abstract_model_is_lazy_still() -> None:
    abstract = nnx.eval_shape(lazy_mlp)
    assert sorted(lm.uninitialized_paths(abstract)) == ["fc1.bias", "fc1.kernel", "fc2.bias", "fc2.kernel"]
    assert abstract.fc1.kernel.shape == (None, 16)
    want = plain_mlp(seed=3)
    lm.load_state_dict(abstract, lm.state_dict(want))
    assert abstract.fc1.in_features == 8
    assert_same_bits(abstract(array(2, 8)), want(array(2, 8)))


# ---------------------------------------------------------------- under transforms


def shard_mapped(model: Any, x: jax.Array) -> Any:
    mesh, whole = jax.make_mesh((1,), ("d",)), jax.sharding.PartitionSpec()
    return jax.shard_map(lambda m, x: m(x), mesh=mesh, in_specs=whole, out_specs=whole)(model, x)


@pytest.mark.parametrize("transform", [
    lambda m, x: jax.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, x),
    shard_mapped,
    lambda m, x: export.export(jax.jit(lambda m, x: m(x)))(m, x),
    lambda m, x: jax.jit(lambda m, x: m(x)).lower(m, x),
], ids=["row_135-vmap", "row_135-shard_map", "row_138-export", "row_138-lower"])
def test_a_lazy_model_as_argument_is_refused(transform: Callable[[Any, Any], Any]) -> None:
    model, x = lazy_mlp(), array(2, 8)
    with pytest.raises(lm.UninitializedError, match=r"fc1 \(LazyLinear"):
        transform(model, x)
    assert_same_bits(model(x), plain_mlp()(x))


def test_a_compiled_model_takes_other_batch_sizes() -> None:
    model, want = lazy_mlp(), plain_mlp()
    run = nnx.jit(lambda m, x: m(x))
    for batch in (2, 5):
        assert run(model, array(batch, 8)).shape == (batch, 4)
        assert_same_model(model, want)


def test_export_with_a_symbolic_batch() -> None:
    model, want = lazy_mlp(), plain_mlp()
    (batch,) = export.symbolic_shape("b")
    exported = export.export(jax.jit(lambda x: model(x)))(jax.ShapeDtypeStruct((batch, 8), jnp.float32))
    assert_same_model(model, want)
    for n in (1, 3):
        assert jnp.allclose(exported.call(array(n, 8)), want(array(n, 8)), rtol=1e-6)


def test_a_symbolic_feature_axis_is_refused() -> None:
    model = lazy_mlp()
    (features,) = export.symbolic_shape("f")
    with pytest.raises(lm.ShapeInferenceError, match="symbolic size"):
        export.export(jax.jit(lambda x: model(x)))(jax.ShapeDtypeStruct((2, features), jnp.float32))
    assert lm.is_lazy(model.fc1)


def test_vmap_on_the_first_call() -> None:
    model, want, x = lazy_mlp(), plain_mlp(), array(2, 8)
    assert jnp.allclose(jax.vmap(model)(x), want(x), rtol=1e-6)
    assert_same_model(model, want)


@pytest.mark.parametrize("jit", [False, True], ids=["python", "jit"])
def test_a_functional_call_leaves_the_model_as_it_is(jit: bool) -> None:
    model, want, x = lazy_mlp(), plain_mlp(seed=4), array(2, 8)
    graphdef, _ = nnx.split(model)

    def run(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, state)(x)

    out = (jax.jit(run) if jit else run)(nnx.state(want), x)
    assert jnp.allclose(out, want(x), rtol=1e-6)
    assert lm.uninitialized_paths(model) == ["fc1.kernel", "fc1.bias", "fc2.kernel", "fc2.bias"]
    assert_same_bits(model(x), plain_mlp()(x))


@pytest.mark.parametrize("use", [lambda m, x: m(x), lm.materialize, lm.infer_shapes],
                         ids=["call", "materialize", "infer_shapes"])
@pytest.mark.parametrize("row", ["row_114-loaded", "row_141-called"])
def test_another_width_afterwards(row: str, use: Callable[..., Any]) -> None:
    model, want = lazy_mlp(), plain_mlp()
    model(array(2, 8)) if row == "row_141-called" else lm.load_state_dict(model, lm.state_dict(want))
    with pytest.raises((TypeError, lm.ShapeInferenceError), match="8") as error:
        use(model, array(2, 5))
    if use in (lm.materialize, lm.infer_shapes):  # lazymods is in charge: it names the layer
        assert "fc1 (Linear)" in str(error.value) and "f32[2,5]" in str(error.value)
    assert_same_model(model, want)


@pytest.mark.slow
def test_lazy_layers_draw_where_explicit_ones_do() -> None:
    def mixed(size: int | None) -> Any:
        r = nnx.Rngs(7)
        first = lm.LazyLinear(6, rngs=r) if size is None else nnx.Linear(size, 6, rngs=r)
        second = nnx.Linear(6, 5, rngs=r)
        return nnx.Sequential(first, second, nnx.Dropout(0.5, rngs=r), MLP(5, rngs=r))

    model, want, x = mixed(None), mixed(3), array(2, 3)
    assert_same_bits(model(x), want(x))
    assert_same_model(model, want)


def test_no_pass_sees_a_size_of_zero() -> None:
    norm = lm.LazyBatchNorm(rngs=nnx.Rngs(0))
    assert not hasattr(norm, "num_features")
    with pytest.raises(lm.UninitializedError, match="num_features"):
        nnx.BatchNorm(norm.num_features, axis_name="batch", rngs=nnx.Rngs(0))
    synced = lm.LazyBatchNorm(axis_name="batch", rngs=nnx.Rngs(0))
    want = nnx.BatchNorm(3, axis_name="batch", rngs=nnx.Rngs(0))
    x = array(2, 4, 3)
    got = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0), axis_name="batch")(synced, x)
    assert jnp.allclose(got, nnx.vmap(lambda m, x: m(x), in_axes=(None, 0), axis_name="batch")(want, x), rtol=1e-6)
    assert_same_model(synced, want)


@pytest.mark.parametrize("lazy_cls", [lm.LazyBatchNorm1d, lm.LazyBatchNorm, lm.LazyLayerNorm, lm.LazyInstanceNorm1d])
def test_a_size_given_by_habit_is_no_epsilon(lazy_cls: Any) -> None:
    with pytest.raises(TypeError, match="keyword") as error:
        lazy_cls(64, rngs=nnx.Rngs(0))
    assert isinstance(error.value, lm.LazyError) and lazy_cls.__name__ in str(error.value)
