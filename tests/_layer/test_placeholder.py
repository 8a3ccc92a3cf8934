"""A Variable without a shape: what it knows, allows and refuses, and how it becomes the ordinary Variable."""

import copy
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import array, assert_same_bits, assert_same_model, lazy_mlp, plain_mlp

import lazymods as lm
from lazymods._layer.placeholder import placeholder_type

KEY = jax.random.key(3)


class Gate(nnx.Variable[Any]):
    """A Variable type that lazymods has never heard of."""


def kernel(out: int = 4, **options: Any) -> Any:
    return lm.LazyLinear(out, rngs=nnx.Rngs(0), **options).kernel


def ramp(key: Any, shape: Any, dtype: Any) -> jax.Array:
    """An initializer that pickles, needs no key and tells its shape by its values."""
    del key
    return jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape).astype(dtype)


# ---------------------------------------------------------------- what is known

TARGETS = {
    nnx.Variable: lm.UninitializedVariable,
    nnx.Param: lm.UninitializedParameter,
    nnx.BatchStat: lm.UninitializedBuffer,
}


@pytest.mark.parametrize("target", [*TARGETS, nnx.Cache, nnx.LoRAParam, Gate], ids=lambda c: c.__name__)
def test_a_type_for_every_variable_type(target: type) -> None:
    made = placeholder_type(target)
    assert issubclass(made, lm.UninitializedVariable) and issubclass(made, target)
    assert made is placeholder_type(target) and made is TARGETS.get(target, made)
    one = made((None, 2))
    assert lm.is_lazy(one) and not lm.is_lazy(target(jnp.ones(2)))
    one.materialize((3, 2))
    assert type(one) is target
    assert_same_bits(one.get_value(), jnp.zeros((3, 2)))


def test_every_argument_may_be_left_out() -> None:
    one = lm.UninitializedParameter()
    assert one.dtype == jnp.float32
    for use in (lambda: one.shape, lambda: one.ndim, lambda: one.size, lambda: len(one)):
        with pytest.raises(lm.UninitializedError):
            use()
    one.materialize((2, 3))
    assert_same_bits(one.get_value(), jnp.zeros((2, 3)))


def test_what_it_knows() -> None:
    ten: Any = np.int64(10)
    one = lm.UninitializedParameter((None, ten), dtype="bfloat16", init=ramp, key=KEY, tag="left")
    assert one.shape == (None, 10) and type(one.shape) is tuple and type(one.shape[1]) is int
    assert (one.ndim, one.dtype, one.tag) == (2, jnp.bfloat16, "left")
    assert one.get_metadata()["tag"] == "left"
    assert list(one.pending.keys) == [KEY]


def test_sizes_of_a_whole_shape() -> None:
    one = lm.UninitializedParameter((3, 5), dtype=jnp.bfloat16)
    assert (one.size, one.nbytes, len(one)) == (15, 30, 3)


@pytest.mark.parametrize("shape", [3, ("a",), (2.0, 3), (-1, 4)], ids=str)
def test_nonsense_is_no_shape(shape: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        lm.UninitializedParameter(shape)


def test_x64_dtypes_are_canonical() -> None:
    with pytest.warns(UserWarning, match="float64"):
        made = jnp.zeros(1, jnp.float64).dtype
    assert lm.UninitializedParameter((1,), dtype=np.float64).dtype == made == jnp.float32


# ---------------------------------------------------------------- refused while lazy

BINARY = "add sub mul truediv floordiv mod pow matmul lshift rshift and_ or_ xor eq ne lt le gt ge".split()
IN_PLACE = "iadd isub imul itruediv ifloordiv imod ipow imatmul ilshift irshift iand ior ixor".split()
USES: dict[str, Callable[[Any], Any]] = {
    **{name: lambda p, name=name: getattr(operator, name)(p, 2) for name in BINARY + IN_PLACE},
    **{f"r{name}": lambda p, name=name: getattr(operator, name)(2, p) for name in BINARY},
    "divmod": lambda p: divmod(p, 2),
    "rdivmod": lambda p: divmod(2, p),
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "invert": operator.invert,
    "round": round,
    "int": int,
    "float": float,
    "complex": complex,
    "index": operator.index,
    "contains": lambda p: 1 in p,
    "iter": list,
    "reversed": reversed,
    "len": len,
    "getitem": lambda p: p[0],
    "getitem-all": lambda p: p[...],
    "setitem": lambda p: operator.setitem(p, 0, 1.0),
    "get_value": lambda p: p.get_value(),
    "size": lambda p: p.size,
    "nbytes": lambda p: p.nbytes,
    "np.asarray": np.asarray,
    "np.add": lambda p: np.ones((2, 4), np.float32) + p,
    "jnp.asarray": jnp.asarray,
    "jnp.sum": jnp.sum,
    "jnp.matmul": lambda p: jnp.ones((2, 3)) @ p,
    "jax.nn.relu": jax.nn.relu,
    "method": lambda p: p.sum(),
    "transpose": lambda p: p.T,
    "at": lambda p: p.at[0].set(1.0),
    "jit": lambda p: jax.jit(lambda v: v + 1)(p),
    "grad": lambda p: jax.grad(lambda v: jnp.sum(v**2))(p),
    "nnx.grad": lambda p: nnx.grad(lambda v: jnp.sum(v**2))(p),
    "to_device": lambda p: p.to_device(jax.devices()[0]),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_refused_by_path_and_layer(use: Callable[[Any], Any]) -> None:
    model = lazy_mlp()
    before = model.fc1.kernel.pending
    with pytest.raises(lm.UninitializedError) as caught:
        use(model.fc1.kernel)
    message = str(caught.value)
    assert "kernel" in message and "LazyLinear" in message and "lm.materialize(model" in message
    assert lm.is_lazy(model.fc1.kernel) and model.fc1.kernel.pending is before


@pytest.mark.parametrize("attribute", ["sharding", "addressable_shards", "nonsense"])
def test_an_array_attribute_is_pending(attribute: str) -> None:
    assert not hasattr(kernel(), attribute)


@pytest.mark.parametrize("tx", [optax.adam(1e-3), optax.sgd(0.1, momentum=0.9), optax.adamw(1e-3), optax.rmsprop(0.1)],
                         ids=["adam", "momentum", "adamw", "rmsprop"])
def test_ordinary_optimizer_names_what_is_lazy(tx: Any) -> None:
    model = lazy_mlp()
    with pytest.raises(lm.UninitializedError, match=r"fc\d\.(kernel|bias)"):
        nnx.Optimizer(model, tx, wrt=nnx.Param)


# ---------------------------------------------------------------- allowed while lazy


def test_repr() -> None:
    assert repr(kernel(10)) == "UninitializedParameter(shape=(?, 10), dtype=float32)"
    assert repr(lm.UninitializedBuffer(dtype=jnp.float16)) == "UninitializedBuffer(shape=?, dtype=float16)"
    tagged = lm.UninitializedParameter((None,), tag="a")
    assert repr(tagged) == "UninitializedParameter(shape=(?,), dtype=float32, tag='a')"


def test_repr_inside_a_module() -> None:
    lines = repr(lazy_mlp()).replace(" ", "")
    assert "kernel=UninitializedParameter(shape=(?,16),dtype=float32)" in lines
    assert "bias=UninitializedParameter(shape=(4,),dtype=float32)" in lines


def test_notebook_rendering(capsys: pytest.CaptureFixture[str]) -> None:
    nnx.display(kernel(10, kernel_metadata={"tag": "left"}))
    shown = capsys.readouterr().out
    for part in ("UninitializedParameter", "10", "float32", "left"):
        assert part in shown


@pytest.mark.parametrize("spelling", [jnp.bfloat16, "bfloat16", np.dtype("bfloat16"), jnp.dtype(jnp.bfloat16)],
                         ids=repr)
def test_dtype_spellings(spelling: Any) -> None:
    drawn = nnx.Linear(3, 4, rngs=nnx.Rngs(0)).kernel.get_value()
    one = kernel()
    one.dtype = spelling
    assert one.dtype == jnp.bfloat16 and one.astype(spelling).dtype == jnp.bfloat16
    one.materialize((3, 4))
    assert_same_bits(one.get_value(), drawn.astype(jnp.bfloat16))  # drawn as before, then cast


def test_astype_is_another_placeholder() -> None:
    one = kernel(kernel_metadata={"tag": "left"})
    twin = one.astype(jnp.float16)
    assert twin is not one and type(twin) is type(one)
    assert (one.dtype, twin.dtype, twin.shape, twin.tag) == (jnp.float32, jnp.float16, (None, 4), "left")


def test_a_copy_with_a_value_is_an_ordinary_variable() -> None:
    one = kernel(kernel_metadata={"tag": "left"})
    for made in (one.replace(jnp.ones((2, 4))), one.copy(jnp.ones((2, 4)))):
        assert type(made) is nnx.Param and made.tag == "left"
        assert_same_bits(made.get_value(), jnp.ones((2, 4)))
    assert lm.is_lazy(one) and lm.is_lazy(one.replace(tag="right")) and one.replace(tag="right").tag == "right"


def test_metadata_can_be_set_and_stays() -> None:
    layer = lm.LazyLinear(4, rngs=nnx.Rngs(0))
    layer.kernel.set_metadata(trainable=False, group="slow")
    layer(array(2, 3))
    assert type(layer.kernel) is nnx.Param
    assert layer.kernel.get_metadata()["trainable"] is False and layer.kernel.group == "slow"
    assert "group" not in layer.bias.get_metadata()  # pyright: ignore[reportOptionalMemberAccess]


def test_in_a_condition() -> None:
    assert bool(kernel()) is True  # Flax's norms ask `if self.scale`


def test_filters_state_and_split() -> None:
    model = nnx.List([lm.LazyLinear(4, rngs=nnx.Rngs(0)), lm.LazyBatchNorm(rngs=nnx.Rngs(0))])
    params, stats, rest = nnx.state(model, nnx.Param, nnx.BatchStat, ...)
    names = [[".".join(map(str, p)) for p, _ in nnx.to_flat_state(s)] for s in (params, stats, rest)]
    assert [sorted(n) for n in names] == [["0.bias", "0.kernel", "1.bias", "1.scale"], ["1.mean", "1.var"], []]
    assert jax.tree.leaves(nnx.state(model)) == []
    graphdef, state = nnx.split(model)
    assert nnx.graphdef(nnx.merge(graphdef, state)) == graphdef


def test_no_leaf_for_jax() -> None:
    model = lazy_mlp()
    assert jax.tree.leaves(model) == []
    assert jax.jit(lambda m, x: x + 1)(model, jnp.zeros(())) == 1
    assert lm.is_lazy(jax.tree.map(lambda a: a, model).fc1.kernel)


# ---------------------------------------------------------------- becoming a Variable


def test_materialize_draws_as_the_explicit_layer_would() -> None:
    layer, want = lm.LazyLinear(4, rngs=nnx.Rngs(0)), nnx.Linear(7, 4, rngs=nnx.Rngs(0))
    one = layer.kernel
    assert one.materialize((7, 4)) is None
    assert layer.kernel is one and type(one) is nnx.Param
    assert_same_bits(one.get_value(), want.kernel.get_value())
    assert one.get_metadata() == want.kernel.get_metadata()


def test_materialize_calls_the_initializer_with_key_shape_and_dtype() -> None:
    init = nnx.initializers.normal(0.5)
    one = lm.UninitializedParameter((None, 4), dtype=jnp.float16, init=init, key=KEY)
    one.materialize((3, 4))
    assert_same_bits(one.get_value(), init(KEY, (3, 4), jnp.float16))


def test_metadata_is_that_of_a_variable_made_by_hand() -> None:
    one, want = lm.UninitializedParameter(tag="left"), nnx.Param(jnp.zeros(3), tag="left")
    one.materialize((3,))
    assert one.get_metadata() == want.get_metadata()
    assert nnx.graphdef(nnx.List([one])) == nnx.graphdef(nnx.List([want]))


@pytest.mark.parametrize("value", [np.ones((7, 4)), jnp.ones((7, 4), jnp.float16), [[1.0] * 4] * 7],
                         ids=["numpy", "float16", "list"])
def test_a_value_is_cast_to_the_known_dtype(value: Any) -> None:
    one = kernel()
    one.materialize((7, 4), value)
    assert_same_bits(one.get_value(), jnp.ones((7, 4), jnp.float32))


def test_a_value_decides_the_dtype_where_none_is_known() -> None:
    one = lm.UninitializedParameter((None,))
    one.materialize((2,), jnp.ones(2, jnp.float16))
    assert_same_bits(one.get_value(), jnp.ones(2, jnp.float16))


@pytest.mark.parametrize("assign", [lambda p, v: operator.setitem(p, ..., v), lambda p, v: p.set_value(v)],
                         ids=["[...] =", "set_value"])
def test_assigning_a_whole_value_materializes(assign: Callable[[Any, Any], None]) -> None:
    layer = lm.LazyLinear(4, rngs=nnx.Rngs(0))
    assign(layer.kernel, jnp.full((3, 4), 2.0))
    assert type(layer.kernel) is nnx.Param
    assert_same_bits(layer(jnp.ones((1, 3))), jnp.full((1, 4), 6.0))
    assert type(layer) is nnx.Linear and nnx.graphdef(layer) == nnx.graphdef(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))


BAD_SHAPES: dict[str, Callable[[Any], Any]] = {
    "known-axis": lambda p: p.materialize((7, 11)),
    "rank": lambda p: p.materialize((7,)),
    "more-rank": lambda p: p.materialize((7, 4, 1)),
    "unknown": lambda p: p.materialize((None, 4)),
    "negative": lambda p: p.materialize((-7, 4)),
    "float": lambda p: p.materialize((7.0, 4)),
    "value": lambda p: p.materialize((7, 4), jnp.ones((6, 4))),
    "broadcast": lambda p: p.materialize((7, 4), jnp.ones((1, 4))),
    "scalar-value": lambda p: p.materialize((7, 4), 1.0),
    "assign": lambda p: operator.setitem(p, ..., jnp.ones((7, 5))),
}


@pytest.mark.parametrize("use", BAD_SHAPES.values(), ids=BAD_SHAPES)
def test_a_shape_that_contradicts_leaves_it_as_it_was(use: Callable[[Any], Any]) -> None:
    layer = lm.LazyLinear(4, rngs=nnx.Rngs(0))
    with pytest.raises(lm.ShapeInferenceError):
        use(layer.kernel)
    assert lm.is_lazy(layer.kernel) and layer.kernel.shape == (None, 4)
    layer(array(2, 3))
    assert_same_model(layer, nnx.Linear(3, 4, rngs=nnx.Rngs(0)))


def test_a_second_materialize_is_an_error() -> None:
    one = kernel()
    one.materialize((7, 4), jnp.ones((7, 4)))
    with pytest.raises((AttributeError, lm.LazyError)):
        one.materialize((7, 4))
    assert_same_bits(one.get_value(), jnp.ones((7, 4)))


def test_an_initializer_that_fails_leaves_it_as_it_was() -> None:
    def init(key: Any, shape: Any, dtype: Any) -> jax.Array:
        raise ZeroDivisionError("not today")

    one = lm.UninitializedParameter((None,), init=init, key=KEY)
    with pytest.raises(ZeroDivisionError, match="not today"):
        one.materialize((3,))
    assert lm.is_lazy(one)


def test_by_hand_then_the_rest_by_the_first_call() -> None:
    layer = lm.LazyLinear(4, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0))
    want = nnx.Linear(7, 4, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0))
    layer.kernel.materialize((7, 4))
    x = array(2, 7)
    assert_same_bits(layer(x), want(x))
    assert_same_model(layer, want)


def test_update_with_the_state_of_a_ready_model() -> None:
    lazy, want = lazy_mlp(), plain_mlp(seed=5)
    nnx.update(lazy, nnx.state(want))
    x = array(2, 8)
    assert_same_bits(lazy(x), want(x))
    assert_same_model(lazy, want)


@pytest.mark.parametrize("context", [
    lambda f: jax.jit(f)(), lambda f: nnx.jit(f)(), lambda f: jax.eval_shape(f),
    lambda f: jax.vmap(lambda _: f())(jnp.zeros(2)), lambda f: jax.grad(lambda _: f() or 0.0)(1.0)],
    ids=["jax.jit", "nnx.jit", "eval_shape", "vmap", "grad"])
def test_materialized_by_hand_inside_a_transform(context: Callable[[Callable[[], None]], Any]) -> None:
    one = kernel()

    def body() -> None:
        one.materialize((7, 4))

    context(body)
    assert_same_bits(one.get_value(), nnx.Linear(7, 4, rngs=nnx.Rngs(0)).kernel.get_value())


def test_sharding_metadata_is_used() -> None:
    mesh = jax.make_mesh((1,), ("d",))
    metadata = {"out_sharding": (None, "d")}
    with jax.set_mesh(mesh):
        want = nnx.Linear(7, 4, kernel_metadata=metadata, rngs=nnx.Rngs(0)).kernel
        one = kernel(kernel_metadata=metadata)
        one.materialize((7, 4))
    assert one.get_value().sharding == want.get_value().sharding
    assert_same_bits(one.get_value(), want.get_value())


def test_identity_keeps_ties() -> None:
    a, b = lm.LazyLinear(8, rngs=nnx.Rngs(0)), lm.LazyLinear(8, rngs=nnx.Rngs(1))
    b.kernel = a.kernel
    b(array(2, 8))
    assert a.kernel is b.kernel and type(a.kernel) is nnx.Param and lm.is_lazy(a)
    a(array(2, 8))
    assert type(a) is type(b) is nnx.Linear
    assert_same_bits(b.kernel.get_value(), nnx.Linear(8, 8, rngs=nnx.Rngs(0)).kernel.get_value())


# ---------------------------------------------------------------- copies

COPIERS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "Variable.copy": lambda p: p.copy(),
    "clone": lambda p: nnx.clone(nnx.List([p]))[0],
    "split-merge": lambda p: nnx.merge(*nnx.split(nnx.List([p])), copy=True)[0],
    "tree-map": lambda p: jax.tree.map(lambda a: a, p),
    "jax.jit": lambda p: jax.jit(lambda v: v)(p),
}


@pytest.mark.parametrize("copier", COPIERS.values(), ids=COPIERS)
@pytest.mark.parametrize("make", [lm.UninitializedParameter, lm.UninitializedBuffer, placeholder_type(Gate)],
                         ids=["param", "buffer", "other"])
def test_copies_know_all_that_the_original_knows(make: Any, copier: Callable[[Any], Any]) -> None:
    one = make((None, 4), dtype=jnp.float16, init=ramp, key=KEY, tag="left")
    twin = copier(one)
    assert twin is not one and type(twin) is type(one)
    assert (twin.shape, twin.dtype, twin.tag) == ((None, 4), jnp.float16, "left")
    assert [jax.random.key_data(k).tolist() for k in twin.pending.keys] == [jax.random.key_data(KEY).tolist()]
    twin.materialize((2, 4))
    assert lm.is_lazy(one)
    assert_same_bits(twin.get_value(), jnp.arange(8.0).reshape(2, 4).astype(jnp.float16))


def test_a_layers_own_placeholder_pickles_alone() -> None:
    twin = pickle.loads(pickle.dumps(kernel()))
    twin.materialize((7, 4))
    assert_same_bits(twin.get_value(), nnx.Linear(7, 4, rngs=nnx.Rngs(0)).kernel.get_value())


def test_an_initializer_that_does_not_pickle_is_named() -> None:
    one = lm.UninitializedParameter((None, 4), init=lambda key, shape, dtype: jnp.zeros(shape, dtype))
    with pytest.raises(lm.SerializationError, match="init"):
        pickle.dumps(one)


# ---------------------------------------------------------------- questions


def test_questions() -> None:
    model: Any = nnx.Dict(a=lazy_mlp(), b=nnx.List([plain_mlp()]), c=nnx.Param(jnp.ones(2)))
    assert lm.has_uninitialized_params(model) is True
    assert lm.uninitialized_paths(model) == ["a.fc1.kernel", "a.fc1.bias", "a.fc2.kernel", "a.fc2.bias"]
    assert [lm.is_lazy(v) for v in (model, model.a.fc1, model.a.fc1.kernel, model.b, model.c, 3, None)] == [
        False, True, True, False, False, False, False]
    model.a.fc1(array(2, 8))
    assert lm.uninitialized_paths(model) == ["a.fc2.kernel", "a.fc2.bias"]
    model.a.fc2(array(2, 16))
    assert lm.has_uninitialized_params(model) is False and lm.uninitialized_paths(model) == []


def test_a_shared_placeholder_is_listed_under_each_name() -> None:
    one = kernel()
    assert lm.uninitialized_paths(nnx.Dict(a=one, b=nnx.List([one]))) == ["a", "b.0"]
