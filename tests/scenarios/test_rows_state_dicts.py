"""Rows 106-123 and 145-168: state dicts of lazy and ready models, and loading them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import array, assert_same_bits, assert_same_model, lazy_mlp, plain_mlp, raw

import lazymods as lm

KEYS = ["fc1.kernel", "fc1.bias", "fc2.kernel", "fc2.bias"]


def lazy(out: int = 4, **options: Any) -> Any:
    return lm.LazyLinear(out, rngs=nnx.Rngs(0), **options)


def plain(size: int = 3, out: int = 4, *, seed: int = 0, **options: Any) -> Any:
    return nnx.Linear(size, out, rngs=nnx.Rngs(seed), **options)


def ones(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.ones(shape, dtype)


# ---------------------------------------------------------------- loading into lazy layers


def lazy_norm() -> Any:
    return lm.LazyBatchNorm(rngs=nnx.Rngs(0))


def plain_norm() -> Any:
    return nnx.BatchNorm(3, rngs=nnx.Rngs(0))


PARTIAL: dict[str, tuple[Any, Any, dict[str, jax.Array], list[str]]] = {
    "Linear": (lazy, plain, {"kernel": ones(3, 4)}, ["bias"]),
    "Linear-bias": (lazy, plain, {"bias": ones(4)}, ["kernel"]),
    "BatchNorm": (lazy_norm, plain_norm, {"var": 2 * ones(3)}, ["scale", "bias", "mean"]),
}


@pytest.mark.parametrize("make, explicit, entries, missing", PARTIAL.values(), ids=PARTIAL)
def test_partial_strict_load_is_atomic(make: Any, explicit: Any, entries: Any, missing: list[str]) -> None:
    layer = make()
    before = lm.state_dict(layer)
    with pytest.raises(lm.StateDictError) as error:
        lm.load_state_dict(layer, entries)
    assert all(f"{name}\n  got:    no entry" in str(error.value) for name in missing)
    assert all(a is b for a, b in zip(lm.state_dict(layer).values(), before.values(), strict=True))
    assert lm.is_lazy(layer)


@pytest.mark.parametrize("make, explicit, entries, missing", PARTIAL.values(), ids=PARTIAL)
def test_a_partial_load_then_forward(make: Any, explicit: Any, entries: Any, missing: Any) -> None:
    layer, want, x = make(), explicit(), array(2, 3)
    assert sorted(lm.load_state_dict(layer, entries, strict=False).missing) == sorted(missing)
    for name, value in entries.items():
        getattr(want, name)[...] = value
    assert_same_bits(layer(x), want(x))
    assert_same_model(layer, want)


def test_the_first_input_must_agree_with_what_was_loaded() -> None:
    layer = lazy()
    lm.load_state_dict(layer, {"bias": ones(4)}, strict=False)  # tells no input size
    assert lm.uninitialized_paths(layer) == ["kernel"]
    lm.load_state_dict(layer, {"kernel": ones(3, 4)}, strict=False)
    with pytest.raises(TypeError, match=r"\(5,\)|\(2, 5\)"):  # Flax's own: it is an nnx.Linear by now
        layer(array(2, 5))


def lazy_conv() -> Any:
    return lm.LazyConv2d(4, 3, rngs=nnx.Rngs(0))


WRONG: dict[str, tuple[Any, tuple[int, ...], str, str]] = {
    "row_111-report_a24-out_features": (lazy, (3, 7), "f32[3,7]", "(?, 4)"),
    "row_112-report_a24-kernel_size": (lazy_conv, (5, 5, 2, 4), "f32[5,5,2,4]", "(3, 3, ?, 4)"),
    "row_113-report_a24-rank": (lazy_conv, (2, 4), "f32[2,4]", "(3, 3, ?, 4)"),
    "row_158-axis_too_many": (lazy, (1, 3, 4), "f32[1,3,4]", "(?, 4)"),
}


@pytest.mark.parametrize("make, shape, got, known", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "row_154-not_strict"])
def test_known_axes_are_checked(make: Any, shape: tuple[int, ...], got: str, known: str, strict: bool) -> None:
    layer = make()
    with pytest.raises(lm.StateDictError) as error:
        lm.load_state_dict(layer, {"kernel": ones(*shape), "bias": ones(4)}, strict=strict)
    assert "kernel (UninitializedParameter)" in str(error.value)
    assert got in str(error.value) and known in str(error.value)
    assert lm.uninitialized_paths(layer) == ["kernel", "bias"]


def test_a_bias_that_the_layer_has_not() -> None:
    layer = lazy(use_bias=False)
    text = r"bias\n  got:    f32\[4\], an entry that the model has no parameter for"
    with pytest.raises(lm.StateDictError, match=text):
        lm.load_state_dict(layer, lm.state_dict(plain()))
    assert lm.is_lazy(layer)
    assert lm.load_state_dict(layer, lm.state_dict(plain()), strict=False) == ([], ["bias"], [])
    assert type(layer) is nnx.Linear and layer.bias is None


@pytest.mark.parametrize("own", [jnp.float32, jnp.float16, jnp.bfloat16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("given", [np.float64, np.float16, np.int8, np.bool_], ids=lambda d: d.__name__)
def test_values_are_cast_to_the_layer_s_dtype(own: Any, given: Any) -> None:
    layer = lazy(2, param_dtype=own)
    value = np.array([[1, 0], [0, 1], [1, 1]], given)
    lm.load_state_dict(layer, {"kernel": value, "bias": np.zeros(2, given)})
    assert_same_bits(layer.kernel[...], jnp.array([[1, 0], [0, 1], [1, 1]], own))
    assert_same_bits(layer.bias[...], jnp.zeros(2, own))


BAD_VALUES = {
    "none": None, "text": "weights", "nested_list": [[1.0, 2.0]], "object_array": np.array([[None]]),
    "text_array": np.array([["a"]]), "module": plain(), "key": jax.random.key(0),
}


@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES)
def test_what_is_no_array_is_named(value: Any) -> None:
    layer = lazy()
    with pytest.raises(lm.StateDictError, match=r"kernel(.|\n)*an array of numbers") as error:
        lm.load_state_dict(layer, {"kernel": value, "bias": ones(4)})
    assert type(value).__name__ in str(error.value)
    assert lm.uninitialized_paths(layer) == ["kernel", "bias"]


def test_numpy_arrays_are_taken() -> None:
    layer = lazy()
    lm.load_state_dict(layer, {"kernel": np.ones((3, 4), np.float32), "bias": np.zeros(4, np.float32)})
    assert all(isinstance(v, jax.Array) for v in lm.state_dict(layer).values())
    assert_same_bits(layer(ones(1, 3)), jnp.full((1, 4), 3.0))


# ---------------------------------------------------------------- hooks


def rename(module: Any, sd: Any, prefix: str, *_: Any) -> None:
    sd[f"{prefix}kernel"] = sd.pop(f"{prefix}weight").T


@pytest.mark.parametrize("make", [lazy, plain], ids=["row_119-report_a31-lazy", "row_120-ready"])
def test_a_hook_renames_before_lazymods_reads(make: Callable[[], Any]) -> None:
    layer = make()
    model = nnx.Sequential(layer)
    lm.register_load_state_dict_pre_hook(layer, rename)
    weight = array(4, 3, seed=5)
    given = {"layers.0.weight": weight, "layers.0.bias": ones(4)}
    kept = dict(given)
    assert lm.load_state_dict(model, given) == ([], [], [])
    assert given == kept and list(given) == list(kept)  # the caller's dict is the caller's
    assert type(layer) is nnx.Linear and layer.in_features == 3
    assert_same_bits(layer.kernel[...], weight.T)


@pytest.mark.parametrize("make", [lazy, plain], ids=["lazy", "ready"])
def test_extra_state(make: Callable[[], Any]) -> None:
    loaded: list[Any] = []

    def save(module: Any, sd: Any, prefix: str, metadata: Any) -> None:
        sd[f"{prefix}_extra_state"] = np.array([3])

    def load(module: Any, sd: Any, prefix: str, *_: Any) -> None:
        loaded.append(sd.pop(f"{prefix}_extra_state", None))

    layer, other = make(), make()
    model, bare = nnx.Sequential(layer), nnx.Sequential(other)
    lm.register_state_dict_post_hook(layer, save)
    sd = lm.state_dict(model)
    assert list(sd) == ["layers.0.kernel", "layers.0.bias", "layers.0._extra_state"]
    assert lm.load_state_dict(bare, sd, strict=False).unexpected == ["layers.0._extra_state"]
    lm.register_load_state_dict_pre_hook(other, load)
    assert lm.load_state_dict(bare, sd) == ([], [], [])
    assert loaded == [np.array([3])]


def test_state_dict_pre_hook() -> None:
    model, calls = plain_mlp(), []
    handle = lm.register_state_dict_pre_hook(model.fc2, lambda m, prefix, keep_vars: calls.append((type(m), prefix)))
    lm.state_dict(model)
    handle.remove()
    lm.state_dict(model)
    assert calls == [(nnx.Linear, "fc2.")]


def test_state_dict_post_hook() -> None:
    model = plain_mlp()

    def drop(module: Any, sd: Any, prefix: str, metadata: Any) -> None:
        del sd[f"{prefix}bias"]

    lm.register_state_dict_post_hook(model.fc1, drop)
    assert list(lm.state_dict(model)) == ["fc1.kernel", "fc2.kernel", "fc2.bias"]
    lm.register_state_dict_post_hook(model.fc2, lambda module, sd, prefix, metadata: dict(sd))
    with pytest.raises(RuntimeError, match="returned a value"):
        lm.state_dict(model)


def test_load_pre_hooks_see_their_own_part() -> None:
    model, seen = lazy_mlp(), []

    def look(module: Any, sd: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], unexpected: list[str],
             errors: list[str]) -> None:
        seen.append((prefix, sorted(sd), strict))

    for module in (model, model.fc2):
        lm.register_load_state_dict_pre_hook(module, look)
    lm.load_state_dict(model, lm.state_dict(plain_mlp()))
    assert seen == [("", sorted(KEYS), True), ("fc2.", ["fc2.bias", "fc2.kernel"], True)]


def test_a_pre_hook_may_refuse() -> None:
    model = lazy_mlp()

    def refuse(*arguments: Any) -> None:
        arguments[-1].append("trained on other classes")

    lm.register_load_state_dict_pre_hook(model.fc2, refuse)
    with pytest.raises(lm.StateDictError, match="trained on other classes"):
        lm.load_state_dict(model, lm.state_dict(plain_mlp()))
    assert lm.uninitialized_paths(model) == KEYS


def test_load_post_hooks_decide_what_is_missing() -> None:
    model, order = lazy_mlp(), []
    entries = {k: v for k, v in lm.state_dict(plain_mlp()).items() if k != "fc2.bias"}

    def forgive(module: Any, keys: Any) -> None:
        order.append(type(module).__name__)
        keys.missing.clear()

    lm.register_load_state_dict_post_hook(model, forgive)
    lm.register_load_state_dict_post_hook(model.fc1, lambda module, keys: order.append(type(module).__name__))
    assert lm.load_state_dict(model, entries) == ([], [], [])
    assert order == ["Linear", "MLP"]  # children first, and they have become their class
    assert_same_bits(raw(model.fc2.bias), jnp.zeros(4))  # initialized: its size follows from the kernel


@pytest.mark.parametrize("hook, error", [(lambda module, keys: keys.missing.append("another"), lm.StateDictError),
                                         (lambda module, keys: keys, RuntimeError)], ids=["adds", "returns"])
def test_a_post_hook_that_refuses_leaves_the_model_as_it_was(hook: Any, error: Any) -> None:
    model = lazy_mlp()
    lm.register_load_state_dict_post_hook(model, hook)
    with pytest.raises(error, match=r"another|returned a value"):
        lm.load_state_dict(model, lm.state_dict(plain_mlp(seed=3)))
    assert lm.uninitialized_paths(model) == KEYS
    assert_same_bits(model(array(2, 8)), plain_mlp()(array(2, 8)))


# ---------------------------------------------------------------- whole models


def test_nested_load() -> None:
    model = nnx.Sequential(lazy_mlp(), lazy_mlp(out=3))
    want = nnx.Sequential(plain_mlp(seed=3), plain_mlp(4, seed=4, out=3))
    assert lm.load_state_dict(model, lm.state_dict(want)) == ([], [], [])
    assert_same_model(model, want)
    assert_same_bits(model(array(2, 8)), want(array(2, 8)))


def test_one_child_s_entries_alone_load_nothing() -> None:
    model = lazy_mlp()
    first = {k: v for k, v in lm.state_dict(plain_mlp(seed=3)).items() if k.startswith("fc1")}
    with pytest.raises(lm.StateDictError) as error:
        lm.load_state_dict(model, first)
    assert "fc2.kernel" in str(error.value) and "fc2.bias" in str(error.value) and "fc1" not in str(error.value)
    assert lm.uninitialized_paths(model) == KEYS


class Everything(nnx.Module):
    """Parameters, statistics, a child, an empty slot, and what no state dict holds."""

    def __init__(self) -> None:
        self.child = plain(2, 2, use_bias=False)
        self.b = nnx.Param(ones(2))
        self.nothing = None
        self.a = nnx.BatchStat(ones(3))
        self.cache = nnx.Cache(ones(4))
        self.seen = nnx.Intermediate(ones(5))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        self.list = nnx.List([nnx.Param(ones(6)), nnx.Dict({"x": nnx.Param(ones(7))})])


def test_names_and_their_order() -> None:
    assert list(lm.state_dict(Everything())) == ["child.kernel", "b", "a", "list.0", "list.1.x"]


@pytest.mark.parametrize("make", [lazy, plain], ids=["lazy", "ready"])
def test_a_module_under_two_names(make: Callable[[], Any]) -> None:
    layer = make()
    sd = lm.state_dict(nnx.Dict({"a": layer, "b": layer}))
    assert list(sd) == ["a.kernel", "a.bias", "b.kernel", "b.bias"]
    assert sd["a.kernel"] is sd["b.kernel"] and sd["a.bias"] is sd["b.bias"]


def test_values_are_live_and_do_not_change() -> None:
    layer = plain()
    sd = lm.state_dict(layer)
    assert sd["bias"] is layer.bias.get_value()
    layer.bias[...] = ones(4)
    assert_same_bits(sd["bias"], jnp.zeros(4))  # JAX arrays are immutable: a state dict is a moment's


def test_a_child_s_state_dict_has_no_prefix() -> None:
    model, want = lazy_mlp(), plain_mlp(seed=3)
    assert list(lm.state_dict(model.fc1)) == ["kernel", "bias"]
    lm.load_state_dict(model.fc1, lm.state_dict(want.fc1))
    assert type(model.fc1) is nnx.Linear and lm.is_lazy(model.fc2)


@pytest.mark.parametrize("again", [dict, lambda sd: dict(reversed(sd.items()))], ids=["copied", "reversed"])
def test_a_state_dict_is_an_ordinary_dict(again: Callable[[Any], Any]) -> None:
    want = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
    want(array(5, 3))
    sd = lm.state_dict(want)
    assert type(sd) is dict
    model = nnx.Sequential(lazy(), lm.LazyBatchNorm(rngs=nnx.Rngs(0)))
    lm.load_state_dict(model, again(sd))
    assert_same_model(model, want)


def clash() -> Any:
    return nnx.Dict({"a.b": nnx.Param(ones(2)), "a": nnx.Dict({"b": nnx.Param(jnp.zeros(2))})})


@pytest.mark.parametrize("use", [lm.state_dict, lambda m: lm.load_state_dict(m, {"a.b": ones(2)})],
                         ids=["save", "load"])
def test_two_entries_of_one_name_are_an_error(use: Callable[[Any], Any]) -> None:
    with pytest.raises(lm.LazyError, match=r"a\.b"):
        use(clash())


@pytest.mark.parametrize("wrong", [[("kernel", 1)], None, "kernel", {0: ones(2)}],
                         ids=["pairs", "none", "text", "int_key"])
def test_what_is_no_mapping_from_names(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"mapping from names|dotted strings"):
        lm.load_state_dict(lazy(), wrong)


def test_everything_that_is_wrong_at_once() -> None:
    model = plain_mlp()
    before = lm.state_dict(model)
    entries = {"fc1.kernel": ones(9, 9), "zzz": ones(1), "fc2.kernel": ones(16, 4),
               "fc1.bias": ones(16, dtype=jnp.complex64)}
    with pytest.raises(lm.StateDictError) as error:
        lm.load_state_dict(model, entries)
    heading, *rest = str(error.value).splitlines()
    assert "MLP" in heading and "nothing was loaded" in heading
    places = [line.split()[0] for line in rest if not line.startswith(" ")]
    assert places == ["fc1.bias", "fc1.kernel", "fc2.bias", "zzz"]  # sorted by path
    assert "f32[9,9]" in str(error.value) and "(8, 16)" in str(error.value)
    assert all(a is b for a, b in zip(lm.state_dict(model).values(), before.values(), strict=True))


def test_what_a_load_returns() -> None:
    model, entries = plain_mlp(), lm.state_dict(plain_mlp(seed=3))
    result = lm.load_state_dict(model, entries)
    assert "All keys matched successfully" in repr(result)
    entries["zzz"] = entries.pop("fc2.bias")
    result = lm.load_state_dict(model, entries, strict=False)
    assert (result.missing, result.unexpected, result.mismatched) == (["fc2.bias"], ["zzz"], [])
    assert (result.missing_keys, result.unexpected_keys) == (["fc2.bias"], ["zzz"])
    assert "fc2.bias" in repr(result) and "zzz" in repr(result)


@pytest.mark.parametrize("given", [ones(1), ones(1, 1)], ids=["vector", "matrix"])
def test_no_broadcasting_to_a_scalar_or_back(given: jax.Array) -> None:
    scalar, vector = nnx.Dict({"w": nnx.Param(jnp.ones(()))}), nnx.Dict({"w": nnx.Param(ones(1))})
    with pytest.raises(lm.StateDictError, match=r"shape \(\)"):
        lm.load_state_dict(scalar, {"w": given})
    with pytest.raises(lm.StateDictError, match=r"shape \(1,\)"):
        lm.load_state_dict(vector, {"w": jnp.ones(())})


CASTS: dict[str, tuple[Any, Any, bool]] = {
    "complex_to_real": (np.array([1 + 2j]), jnp.float32, False),
    "complex_without_imaginary_part": (np.array([1 + 0j]), jnp.float32, False),
    "real_to_complex": (np.array([1.5]), jnp.complex64, True),
    "int_to_float": (np.array([3]), jnp.float32, True),
    "whole_float_to_int": (np.array([3.0]), jnp.int8, True),
    "fraction_to_int": (np.array([3.5]), jnp.int8, False),
    "nan_to_int": (np.array([np.nan]), jnp.int32, False),
    "int_out_of_range": (np.array([300]), jnp.int8, False),
    "negative_to_unsigned": (np.array([-1]), jnp.uint8, False),
    "two_to_bool": (np.array([2]), jnp.bool_, False),
}


@pytest.mark.parametrize("value, dtype, fits", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("is_lazy", [False, True], ids=["ready", "lazy"])
def test_a_load_casts(value: Any, dtype: Any, fits: bool, is_lazy: bool) -> None:
    slot: Any = lm.UninitializedParameter((None,), dtype=dtype) if is_lazy else nnx.Param(jnp.zeros(1, dtype))
    model = nnx.Dict({"w": slot})
    if fits:
        lm.load_state_dict(model, {"w": value})
        assert_same_bits(slot[...], jnp.asarray(value.astype(dtype)))
    else:
        with pytest.raises(lm.StateDictError, match=r"w \("):
            lm.load_state_dict(model, {"w": value})
        assert lm.is_lazy(slot) if is_lazy else not slot[...].any()


def tied(first: Any, second: Any) -> Any:
    second.kernel = first.kernel
    return nnx.List([first, second])


@pytest.mark.parametrize("make", [lambda: tied(lazy(3), lazy(3)), lambda: tied(plain(3, 3), plain(3, 3))],
                         ids=["lazy", "ready"])
def test_a_load_writes_into_the_variables(make: Callable[[], Any]) -> None:
    model, want = make(), tied(plain(3, 3, seed=4), plain(3, 3, seed=5))
    kernel = model[0].kernel
    optimizer = lm.LazyOptimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    lm.load_state_dict(model, lm.state_dict(want))
    assert model[0].kernel is model[1].kernel is kernel
    assert_same_model(model, want)
    gradient = nnx.grad(lambda m: m[1].kernel[...].sum())(model)
    optimizer.update(model, gradient)
    assert_same_bits(kernel[...], want[0].kernel[...] - 1.0)


@pytest.mark.parametrize("make", [lambda: tied(lazy(3), lazy(3)), lambda: tied(plain(3, 3), plain(3, 3))],
                         ids=["lazy", "ready"])
def test_tied_entries_that_differ(make: Callable[[], Any]) -> None:
    model, entries = make(), lm.state_dict(tied(plain(3, 3, seed=4), plain(3, 3, seed=5)))
    before = lm.state_dict(model)
    with pytest.raises(lm.StateDictError, match=r"1\.kernel(.|\n)*another value than 0\.kernel"):
        lm.load_state_dict(model, entries | {"1.kernel": ones(3, 3)})
    assert all(a is b for a, b in zip(lm.state_dict(model).values(), before.values(), strict=True))
    one_name = {k: v for k, v in entries.items() if k != "0.kernel"}
    assert lm.load_state_dict(model, one_name) == ([], [], [])
    assert_same_bits(model[0].kernel[...], entries["1.kernel"])
