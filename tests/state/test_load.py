"""``load_state_dict``: the four pairings, what is refused, all or nothing, and where the values go."""

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    array,
    assert_same_bits,
    assert_same_model,
    assert_unchanged,
    contents,
    lazy_mlp,
    plain_mlp,
    raw,
    spec,
)
from jax.core import Tracer

import lazymods as lm

KEYS = ["fc1.kernel", "fc1.bias", "fc2.kernel", "fc2.bias"]
load = lm.load_state_dict


def linear(lazy: bool = False, seed: int = 0, **options: Any) -> Any:
    rngs = nnx.Rngs(seed)
    return lm.LazyLinear(4, rngs=rngs, **options) if lazy else nnx.Linear(3, 4, rngs=rngs, **options)


def entries(**changes: Any) -> dict[str, Any]:
    return {"kernel": jnp.ones((3, 4)), "bias": jnp.zeros(4)} | changes


ready_or_lazy = pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "ready"])


# ---------------------------------------------------------------- the four pairings


@pytest.mark.parametrize("make", [lazy_mlp, plain_mlp], ids=["lazy", "ready"])
def test_ready_into_either(make: Callable[[], Any]) -> None:
    model, want = make(), plain_mlp(seed=5)
    result = load(model, lm.state_dict(want))
    assert result == ([], [], []) and repr(result) == "<All keys matched successfully>"
    assert_same_model(model, want)
    assert model.fc1.in_features == 8
    assert_same_bits(model(array(2, 8)), want(array(2, 8)))


def test_lazy_into_lazy_twice() -> None:
    model = lazy_mlp()
    before = contents(model)
    for _ in range(2):
        assert not any(load(model, lm.state_dict(lazy_mlp(seed=3))))
        assert_unchanged(model, before)
    model(array(2, 8))
    assert_same_model(model, plain_mlp())


def test_lazy_into_ready_names_every_parameter() -> None:
    model = plain_mlp()
    before = contents(model)
    with pytest.raises(lm.UninitializedError) as caught:
        load(model, lm.state_dict(lazy_mlp()))
    assert [p.where for p in caught.value.problems] == [f"{k} (Param)" for k in sorted(KEYS)]
    assert_unchanged(model, before)


def test_half_lazy_into_lazy_and_back() -> None:
    half, model = lazy_mlp(seed=5), lazy_mlp()
    half.fc1(array(2, 8))
    load(model, lm.state_dict(half))
    assert type(model.fc1) is nnx.Linear and lm.uninitialized_paths(model) == ["fc2.kernel", "fc2.bias"]
    assert_same_bits(model.fc1.kernel.get_value(), half.fc1.kernel.get_value())
    load(model, lm.state_dict(half))
    model(array(2, 8))
    assert_same_bits(model.fc2.kernel.get_value(), plain_mlp().fc2.kernel.get_value())


def test_nothing_is_initialized() -> None:
    ran: list[Any] = []

    def init(key: Any, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
        jax.debug.callback(lambda: ran.append(shape))
        return jnp.zeros(shape, dtype)

    layer = lm.LazyLinear(4, kernel_init=init, bias_init=init, rngs=nnx.Rngs(0))
    load(layer, entries())
    jax.effects_barrier()
    assert ran == [] and type(layer) is nnx.Linear and layer.in_features == 3


def test_loaded_values_survive_the_first_call() -> None:
    layer = linear(lazy=True)
    load(layer, entries(kernel=jnp.full((3, 4), 2.0), bias=jnp.ones(4)))
    assert_same_bits(layer(jnp.ones((1, 3))), jnp.full((1, 4), 7.0))


def test_a_second_load_is_an_ordinary_one() -> None:
    layer = linear(lazy=True)
    load(layer, entries())
    with pytest.raises(lm.StateDictError):
        load(layer, entries(kernel=jnp.ones((5, 4))))
    load(layer, entries(kernel=jnp.full((3, 4), 3.0)))
    assert_same_bits(layer.kernel.get_value(), jnp.full((3, 4), 3.0))


# ---------------------------------------------------------------- partly filled


FINISH: dict[str, Callable[[Any], Any]] = {
    "call": lambda m: m(array(2, 3)),
    "spec": lambda m: lm.materialize(m, spec(2, 3)),
    "nnx.jit": lambda m: nnx.jit(lambda m, x: m(x))(m, array(2, 3)),
}


@pytest.mark.parametrize("finish", FINISH.values(), ids=FINISH)
@pytest.mark.parametrize("given", ["kernel", "bias"])
def test_a_partly_filled_layer_gets_the_rest(given: str, finish: Callable[[Any], Any]) -> None:
    init = nnx.initializers.normal()
    layer, want = linear(lazy=True, bias_init=init), linear(bias_init=init)
    result = load(layer, {given: entries()[given]}, strict=False)
    (missing,) = {"kernel", "bias"} - {given}
    assert result.missing == [missing]
    finish(layer)
    assert type(layer) is nnx.Linear
    assert_same_bits(getattr(layer, given).get_value(), entries()[given])
    np.testing.assert_allclose(raw(getattr(layer, missing)), raw(getattr(want, missing)), rtol=1e-6)


def test_a_partly_filled_layer_is_finished_if_its_sizes_follow() -> None:
    init = nnx.initializers.normal()
    layer, want = linear(lazy=True, bias_init=init), linear(bias_init=init)
    load(layer, {"kernel": jnp.ones((3, 4))}, strict=False)
    assert type(layer) is nnx.Linear
    assert layer.in_features == 3
    assert_same_bits(raw(layer.bias), raw(want.bias))
    other = linear(lazy=True)
    load(other, {"bias": jnp.ones(4)}, strict=False)
    assert lm.uninitialized_paths(other) == ["kernel"]


def test_a_layer_without_entries_stays_lazy() -> None:
    model = nnx.List([linear(lazy=True), lm.LazyEmbed(3, 2, rngs=nnx.Rngs(0))])  # whose sizes are known
    load(model, {"0.kernel": jnp.ones((3, 4)), "0.bias": jnp.ones(4)}, strict=False)
    assert lm.uninitialized_paths(model) == ["1.embedding"]


def test_the_rest_by_a_second_load() -> None:
    layer = linear(lazy=True)
    load(layer, {"kernel": jnp.ones((3, 4))}, strict=False)
    load(layer, {"bias": jnp.ones(4)}, strict=False)
    assert type(layer) is nnx.Linear
    assert_same_bits(layer(jnp.zeros((1, 3))), jnp.ones((1, 4)))


# ---------------------------------------------------------------- strict, missing, unexpected, mismatched


def test_strict_tells_every_problem_sorted_and_writes_nothing() -> None:
    for make in (plain_mlp, lazy_mlp):
        model = make()
        before = contents(model)
        sd = lm.state_dict(plain_mlp(seed=1)) | {"zzz": jnp.ones(1), "fc2.kernel": jnp.ones((9, 9))}
        sd |= {"fc1.kernel": jnp.ones((8, 16), jnp.complex64)}
        del sd["fc2.bias"]
        with pytest.raises(lm.StateDictError) as caught:
            load(model, sd)
        assert [p.where.split(" ")[0] for p in caught.value.problems] == ["fc1.kernel", "fc2.bias", "fc2.kernel", "zzz"]
        assert_unchanged(model, before)


def test_not_strict_lists_missing_and_unexpected() -> None:
    model, other = plain_mlp(), plain_mlp(seed=1)
    sd = lm.state_dict(other) | {"zzz": jnp.ones(1), "fc1.kernel.extra": 3}
    del sd["fc2.bias"], sd["fc1.bias"]
    result = load(model, sd, strict=False)
    assert result.missing == result.missing_keys == ["fc1.bias", "fc2.bias"]
    assert result.unexpected == result.unexpected_keys == ["zzz", "fc1.kernel.extra"] and result.mismatched == []
    assert repr(result) == (
        "LoadResult(missing=['fc1.bias', 'fc2.bias'], unexpected=['zzz', 'fc1.kernel.extra'], mismatched=[])")
    assert_same_bits(model.fc1.kernel.get_value(), other.fc1.kernel.get_value())
    assert_same_bits(lm.state_dict(model)["fc2.bias"], lm.state_dict(plain_mlp())["fc2.bias"])


@pytest.mark.parametrize("strict", [True, False])
@ready_or_lazy
def test_mismatched_is_an_error_or_skipped(lazy: bool, strict: bool) -> None:
    sd = lm.state_dict(plain_mlp(seed=1)) | {"fc2.kernel": jnp.ones((16, 9)), "fc1.bias": jnp.ones(())}
    model = lazy_mlp() if lazy else plain_mlp()
    before = contents(model)
    with pytest.raises(lm.StateDictError, match=r"fc1\.bias(.|\n)*fc2\.kernel"):
        load(model, sd, strict=strict)
    assert_unchanged(model, before)
    result = load(model, sd, strict=strict, mismatched="skip")
    assert sorted(result.mismatched) == ["fc1.bias", "fc2.kernel"] and not result.missing and not result.unexpected
    model(array(2, 8))
    want = plain_mlp()
    for name in ("fc1.kernel", "fc2.bias"):
        assert_same_bits(lm.state_dict(model)[name], sd[name])
    for name in ("fc1.bias", "fc2.kernel"):
        assert_same_bits(lm.state_dict(model)[name], lm.state_dict(want)[name])


@pytest.mark.parametrize("shape", [(7, 3), (4,), (), (3, 4, 1), (1, 4), (3, 1), (0, 4), (3, 5)], ids=str)
@ready_or_lazy
def test_known_axes_rank_and_no_broadcasting(lazy: bool, shape: tuple[int, ...]) -> None:
    layer = linear(lazy)
    before = contents(layer)
    if lazy and len(shape) == 2 and shape[1] == 4:
        load(layer, entries(kernel=jnp.ones(shape)))
        assert layer.in_features == shape[0]
        return
    with pytest.raises(lm.StateDictError, match=r"kernel|LazyLinear"):
        load(layer, entries(kernel=jnp.ones(shape)))
    assert_unchanged(layer, before)


def test_entries_of_one_layer_must_agree_on_its_sizes() -> None:
    norm = lm.LazyBatchNorm(rngs=nnx.Rngs(0))
    good = {k: jnp.ones(3) for k in ("scale", "bias", "mean", "var")}
    for name in good:
        with pytest.raises(lm.StateDictError, match="LazyBatchNorm"):
            load(norm, good | {name: jnp.ones(4)})
        assert len(lm.uninitialized_paths(norm)) == 4
    assert sorted(load(norm, good | {"mean": jnp.ones(4)}, mismatched="skip").mismatched) == sorted(good)
    load(norm, good)
    assert norm.num_features == 3


@pytest.mark.parametrize("bad, error, match", [
    ([1], TypeError, "got:    list\n  needed: a state dict, a mapping from names to arrays"),
    (None, TypeError, "got:    NoneType"),
    ({1: jnp.ones(1)}, TypeError, "got:    1\n  needed: names that are dotted strings"),
    ({("fc1", "kernel"): 1}, TypeError, r"got:    \('fc1', 'kernel'\)"),
], ids=["list", "none", "int-key", "tuple-key"])
def test_what_is_no_state_dict(bad: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        load(plain_mlp(), bad)


def test_other_options_are_refused() -> None:
    with pytest.raises(lm.ArgumentError, match="mismatched\n  got:    'drop'\n  needed: one of"):
        load(plain_mlp(), {}, mismatched="drop")
    with pytest.raises(TypeError):
        load(plain_mlp(), {}, False)  # type: ignore[misc]


def test_any_mapping_will_do_and_is_left_as_it_is() -> None:
    sd = lm.state_dict(plain_mlp(seed=5))
    copy = dict(sd)
    model = lazy_mlp()
    load(model, MappingProxyType(sd))
    assert_same_model(model, plain_mlp(seed=5))
    assert sd == copy or list(map(id, sd.values())) == list(map(id, copy.values()))


# ---------------------------------------------------------------- where the values go


def test_into_the_variables_that_are_there() -> None:
    model = plain_mlp()
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    variables = {k: v for k, v in nnx.to_flat_state(nnx.state(model))}
    kernel = model.fc1.kernel
    kernel.set_metadata(tag="kept")
    load(model, lm.state_dict(plain_mlp(seed=1)))
    assert model.fc1.kernel is kernel and kernel.tag == "kept" and len(variables) == 4
    optimizer.update(model, nnx.grad(lambda m: m.fc2.bias[...].sum())(model))
    assert_same_bits(lm.state_dict(model)["fc2.bias"], lm.state_dict(plain_mlp(seed=1))["fc2.bias"] - 1)


def test_lazy_variables_keep_identity_and_metadata() -> None:
    layer = linear(lazy=True, kernel_metadata={"tag": "kept"})
    kernel = layer.kernel
    load(layer, entries())
    assert layer.kernel is kernel and type(kernel) is nnx.Param and kernel.tag == "kept"


@pytest.mark.parametrize("other, fits", [(np.float64, True), (np.float16, True), (np.int64, False)])
def test_entries_of_a_tie_that_are_equal_in_two_dtypes(other: type, fits: bool) -> None:
    """Equal numbers are equal where one of the dtypes has all numbers of the other."""
    kernel = nnx.Param(jnp.zeros(2))
    model = nnx.Dict(a=kernel, b=kernel)
    entries = {"a": np.ones(2, np.float32), "b": np.ones(2, other)}
    if not fits:
        with pytest.raises(lm.StateDictError, match="another value than a"):
            lm.load_state_dict(model, entries)
        return
    lm.load_state_dict(model, entries)
    np.testing.assert_array_equal(kernel[...], np.ones(2))
    entries["b"] = np.array([1.0, 1.0009765625]).astype(other)
    with pytest.raises(lm.StateDictError, match="another value than a"):
        lm.load_state_dict(model, entries)


def test_numpy_values_are_copied() -> None:
    for model in (linear(lazy=True), linear()):
        kernel = np.ones((3, 4), np.float32)
        load(model, entries(kernel=kernel))
        kernel[:] = 7
        assert_same_bits(model.kernel.get_value(), jnp.ones((3, 4)))


def test_the_sharding_that_is_there_is_kept() -> None:
    sharding = jax.sharding.NamedSharding(jax.make_mesh((1,), ("d",)), jax.sharding.PartitionSpec("d"))
    layer = linear()
    layer.kernel.set_value(jax.device_put(layer.kernel.get_value(), sharding))
    load(layer, entries())
    assert layer.kernel.get_value().sharding == sharding
    assert_same_bits(layer.kernel.get_value(), jnp.ones((3, 4)))


def test_values_of_every_kind() -> None:
    class Holds(nnx.Module):
        def __init__(self) -> None:
            self.tree = nnx.Variable({"x": jnp.zeros(2), "y": [1, (jnp.ones(3),)]})
            self.raw, self.numpy = nnx.data(jnp.zeros(2)), nnx.data(np.zeros(2, np.float32))
            self.pair = nnx.data([jnp.ones(1), {("k", "w"): jnp.ones(2)}])
            self.count = nnx.Variable(0)

    model = Holds()
    load(model, {"tree.x": np.ones(2), "tree.y.0": 5, "tree.y.1.0": jnp.zeros(3), "raw": jnp.ones(2),
                 "numpy": jnp.ones(2), "pair.0": jnp.zeros(1), "pair.1.k.w": jnp.zeros(2), "count": 7})
    tree: Any = model.tree.get_value()
    assert_same_bits(tree["x"], jnp.ones(2))
    assert int(tree["y"][0]) == 5 and type(tree["y"][1]) is tuple
    assert_same_bits([tree["y"][1][0], model.raw, model.pair[0], model.pair[1]["k", "w"]],
                     [jnp.zeros(3), jnp.ones(2), jnp.zeros(1), jnp.zeros(2)])
    assert type(model.numpy) is np.ndarray and model.numpy.tolist() == [1.0, 1.0]
    assert int(model.count.get_value()) == 7


def test_a_numpy_array_keeps_its_64_bits() -> None:
    model = nnx.Dict(table=nnx.data(np.zeros(2, np.float64)), index=nnx.data(np.zeros(2, np.int64)))
    load(model, {"table": np.array([1 / 3, 1e300]), "index": np.array([2**40, -1])})
    assert model.table.dtype == np.float64 and model.table.tolist() == [1 / 3, 1e300]
    assert model.index.dtype == np.int64 and model.index.tolist() == [2**40, -1]


# ---------------------------------------------------------------- ties and shared layers


@ready_or_lazy
def test_ties_are_kept_whether_one_name_is_given_or_both(lazy: bool) -> None:
    def tied(lazy: bool, seed: int) -> Any:
        make: Any = lm.LazyLinear if lazy else partial(nnx.Linear, 3)
        a, b = (make(3, rngs=nnx.Rngs(seed)) for _ in range(2))
        b.kernel = a.kernel
        return nnx.List([a, b])

    want = tied(False, 4)
    sd = lm.state_dict(want)
    for drop in ((), ("1.kernel",), ("0.kernel",)):
        model = tied(lazy, 0)
        assert not any(load(model, {k: v for k, v in sd.items() if k not in drop}))
        assert model[0].kernel is model[1].kernel
        assert_same_model(model, want)
    model = tied(lazy, 0)
    before = contents(model)
    with pytest.raises(lm.StateDictError, match=r"1\.kernel(.|\n)*0\.kernel, to which it is tied"):
        load(model, sd | {"1.kernel": sd["1.kernel"] + 1})
    assert_unchanged(model, before)
    with pytest.raises(lm.StateDictError, match=r"0\.kernel\n(.|\n)*1\.kernel\n"):
        load(model, {k: v for k, v in sd.items() if "kernel" not in k})


def test_a_tie_of_which_one_entry_is_uninitialized() -> None:
    model = nnx.Dict(a=lm.UninitializedParameter((None,)))
    model.b = model.a
    for a, b in ((lm.UninitializedParameter((None,)), jnp.ones(2)), (jnp.ones(2), lm.UninitializedParameter((None,)))):
        twin: Any = nnx.clone(model)
        lm.load_state_dict(twin, {"a": a, "b": b})
        assert twin.a is twin.b and not lm.is_lazy(twin.a)
        assert_same_bits(twin.a.get_value(), jnp.ones(2))


def test_equal_entries_of_a_tie_in_any_form() -> None:
    model = nnx.Dict(a=nnx.Param(jnp.zeros(2)))
    model.b = model.a
    load(model, {"a": jnp.ones(2), "b": np.ones(2, np.float32)})
    assert_same_bits(model.b.get_value(), jnp.ones(2))
    nan = np.array([np.nan, 0.0], np.float32)
    load(model, {"a": nan, "b": nan.copy()})
    assert bool(jnp.isnan(model.a[0]))


def test_equal_entries_of_a_tie_of_random_keys() -> None:
    stream = nnx.Rngs(0).default
    state = {"a": stream, "b": stream}
    other = lm.state_dict({"a": nnx.Rngs(1).default, "b": nnx.Rngs(2).default}, include_rng=True)
    for given in (other, {"a.key": jax.random.key(1), "b.key": jax.random.key(2)}):
        with pytest.raises(lm.StateDictError, match=r"b\.key .*\n.*another value than a\.key, to which it is tied"):
            lm.load_state_dict(state, given, strict=False)
    assert_same_bits(stream.key.get_value(), nnx.Rngs(0).default.key.get_value())
    lm.load_state_dict(state, {"a.key": jax.random.key(1), "b.key": jax.random.key(1)}, strict=False)
    assert_same_bits(stream.key.get_value(), jax.random.key(1))


def test_an_entry_of_a_tie_that_was_deleted() -> None:
    model = nnx.Dict(a=nnx.Param(jnp.zeros(2)))
    model.b = model.a
    gone = jnp.ones(2)
    gone.delete()
    for given in ({"a": gone, "b": jnp.ones(2)}, {"a": jnp.ones(2), "b": gone}):
        with pytest.raises(lm.StateDictError, match="another value than a, to which it is tied"):
            load(model, given)
    assert_same_bits(model.a.get_value(), jnp.zeros(2))


def test_a_shared_lazy_layer() -> None:
    one = linear(lazy=True)
    model = nnx.Dict(x=one, y=nnx.List([one]))
    assert not any(load(model, {"y.0.kernel": jnp.ones((3, 4)), "x.bias": jnp.zeros(4)}))
    assert type(one) is nnx.Linear and model.y[0] is model.x


def test_a_wrapped_lazy_layer() -> None:
    def build(lazy: bool, seed: int) -> Any:
        inner = lm.LazyLinear(4, rngs=nnx.Rngs(seed)) if lazy else nnx.Linear(3, 4, rngs=nnx.Rngs(seed))
        return (lm.LazyWeightNorm if lazy else nnx.WeightNorm)(inner, rngs=nnx.Rngs(9))

    model, want = build(True, 0), build(False, 5)
    assert not any(load(model, lm.state_dict(want)))
    assert_same_model(model, want)


# ---------------------------------------------------------------- models made abstract, transforms, failures


@pytest.mark.parametrize("make", [lazy_mlp, plain_mlp], ids=["lazy", "ready"])
def test_into_a_model_made_abstract(make: Callable[[], Any]) -> None:
    model, want = nnx.eval_shape(make), plain_mlp(seed=5)
    assert not any(load(model, lm.state_dict(want)))
    assert_same_bits(model(array(2, 8)), want(array(2, 8)))
    assert_same_bits(nnx.state(model), nnx.state(want))


def test_shapes_alone_are_no_values() -> None:
    with pytest.raises(lm.StateDictError, match="ShapeDtypeStruct"):
        load(plain_mlp(), lm.state_dict(nnx.eval_shape(plain_mlp)))


@pytest.mark.parametrize("traced", [True, False], ids=["traced", "numpy"])
@pytest.mark.parametrize("make", [lambda: linear(lazy=True), lambda: linear(),
                                  lambda: nnx.Dict(kernel=nnx.data(jnp.zeros((3, 4))), bias=nnx.data(jnp.ones(4)))],
                         ids=["lazy", "ready", "raw"])
def test_no_tracer_is_stored_by_a_load_inside_a_transform(make: Callable[[], Any], traced: bool) -> None:
    model = make()
    given = {"kernel": np.ones((3, 4), np.float32), "bias": np.zeros(4, np.float32)}

    def body(sd: dict[str, Any]) -> int:
        load(model, sd if traced else given)
        return 0

    try:
        jax.jit(body)(given)
    except Exception as error:  # whatever says that it cannot be
        assert "trace" in str(error)
    else:
        assert not traced, "a traced value has no place in a model outside"
    for value in lm.state_dict(model).values():
        assert lm.is_lazy(value) or not isinstance(value, Tracer)


def test_inside_the_transform_that_built_the_model() -> None:
    def body(sd: dict[str, Any], x: jax.Array) -> jax.Array:
        model = linear(lazy=True)
        load(model, sd)
        return model(x)

    assert_same_bits(jax.jit(body)(entries(), jnp.ones((1, 3))), jnp.full((1, 4), 3.0))


def test_attributes_that_cannot_be_inferred_take_the_load_back() -> None:
    class ByHand(lm.LazyModuleMixin, nnx.Module):
        def __init__(self) -> None:
            self.w = lm.UninitializedParameter()

        def infer_attributes_from_state(self) -> None:
            raise LookupError("odd size")

    model = nnx.List([plain_mlp(), ByHand()])
    before = contents(model)
    sd = {f"0.{k}": v for k, v in lm.state_dict(plain_mlp(seed=5)).items()} | {"1.w": jnp.ones(3)}
    with pytest.raises(LookupError, match="odd size"):
        load(model, sd)
    assert_unchanged(model, before)
