"""Hooks around ``state_dict`` and ``load_state_dict``: what they see, may change, and may refuse."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import assert_same_bits, lazy_mlp, plain_mlp

import lazymods as lm

KEYS = ["fc1.kernel", "fc1.bias", "fc2.kernel", "fc2.bias"]


def linear(lazy: bool) -> Any:
    return lm.LazyLinear(4, rngs=nnx.Rngs(0)) if lazy else nnx.Linear(3, 4, rngs=nnx.Rngs(0))


def from_torch(module: Any, sd: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename and transpose, as PyTorch's weights need."""
    sd[f"{prefix}kernel"] = sd.pop(f"{prefix}weight").T


ready_or_lazy = pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "ready"])

# ---------------------------------------------------------------- state_dict


def test_pre_hooks_run_before_the_values_are_collected() -> None:
    model, seen = plain_mlp(), []

    def reset(module: Any, prefix: str, keep_vars: bool) -> None:
        seen.append((module is model.fc2, prefix, keep_vars))
        module.bias.set_value(jnp.full(4, 7.0))

    lm.register_state_dict_pre_hook(model.fc2, reset)
    assert_same_bits(lm.state_dict(model)["fc2.bias"], jnp.full(4, 7.0))
    assert seen == [(True, "fc2.", True)]


def test_post_hooks_edit_the_whole_dict_children_first() -> None:
    model, seen = plain_mlp(), []

    def note(module: Any, sd: dict[str, Any], prefix: str, meta: Any) -> None:
        seen.append((prefix, list(sd), meta))

    def drop(module: Any, sd: dict[str, Any], prefix: str, meta: Any) -> None:
        del sd[f"{prefix}bias"]

    lm.register_state_dict_post_hook(model, note)
    lm.register_state_dict_post_hook(model.fc2, note)
    lm.register_state_dict_post_hook(model.fc2, drop)
    assert list(lm.state_dict(model)) == KEYS[:3]
    assert seen == [("fc2.", KEYS, {}), ("", KEYS[:3], {})]


@ready_or_lazy
def test_a_removed_hook_runs_no_more(lazy: bool) -> None:
    layer = linear(lazy)
    handle = lm.register_state_dict_post_hook(layer, lambda m, sd, p, meta: sd.clear())
    assert lm.state_dict(layer) == {}
    with lm.register_state_dict_pre_hook(layer, lambda *_: None):
        handle.remove()
    assert list(lm.state_dict(layer)) == ["kernel", "bias"]
    assert nnx.graphdef(layer) == nnx.graphdef(linear(lazy))


# ---------------------------------------------------------------- load


@ready_or_lazy
def test_a_pre_hook_renames_and_reshapes_before_anything_is_checked(lazy: bool) -> None:
    model: Any = nnx.Dict(a=nnx.List([linear(lazy)]), b=nnx.Param(jnp.zeros(1)))
    lm.register_load_state_dict_pre_hook(model.a[0], from_torch)
    given = {"a.0.weight": jnp.arange(12.0).reshape(4, 3), "a.0.bias": jnp.ones(4), "b": jnp.ones(1)}
    before = dict(given)
    assert not any(lm.load_state_dict(model, given))
    assert given.keys() == before.keys()
    assert_same_bits(model.a[0].kernel.get_value(), jnp.arange(12.0).reshape(4, 3).T)
    assert model.a[0].in_features == 3 and isinstance(model.a[0], nnx.Linear) and not lm.is_lazy(model.a[0])


def test_what_a_pre_hook_sees() -> None:
    model, seen = lazy_mlp(), []

    def look(module: Any, sd: Any, *rest: Any) -> None:
        seen.append((module is model.fc2, sorted(sd), *rest))

    lm.register_load_state_dict_pre_hook(model.fc2, look)
    for strict in (True, False):
        lm.load_state_dict(model, lm.state_dict(plain_mlp()), strict=strict)
    assert seen == [(True, ["fc2.bias", "fc2.kernel"], "fc2.", {}, strict, [], [], []) for strict in (True, False)]


def test_pre_hooks_run_parents_first_each_on_what_the_one_before_left() -> None:
    model = plain_mlp()

    def strip(module: Any, sd: dict[str, Any], *_: Any) -> None:
        for name in [n for n in sd if n.startswith("module.")]:
            sd[name.removeprefix("module.")] = sd.pop(name)

    def scale(module: Any, sd: dict[str, Any], prefix: str, *_: Any) -> None:
        sd[f"{prefix}bias"] = sd[f"{prefix}bias"] + 5

    lm.register_load_state_dict_pre_hook(model, strip)
    lm.register_load_state_dict_pre_hook(model.fc2, scale)
    lm.load_state_dict(model, {f"module.{k}": v for k, v in lm.state_dict(plain_mlp(seed=5)).items()})
    assert_same_bits(lm.state_dict(model)["fc2.bias"], jnp.full(4, 5.0))
    assert_same_bits(model.fc1.kernel.get_value(), plain_mlp(seed=5).fc1.kernel.get_value())


def test_a_pre_hook_may_add_and_drop_entries() -> None:
    model = plain_mlp()

    def edit(module: Any, sd: dict[str, Any], *_: Any) -> None:
        del sd["num_batches_tracked"]
        sd["fc2.bias"] = jnp.full(4, 3.0)

    lm.register_load_state_dict_pre_hook(model, edit)
    sd = {k: v for k, v in lm.state_dict(plain_mlp()).items() if k != "fc2.bias"} | {"num_batches_tracked": 7}
    assert not any(lm.load_state_dict(model, sd))
    assert_same_bits(lm.state_dict(model)["fc2.bias"], jnp.full(4, 3.0))


def test_errors_that_a_pre_hook_collects_are_all_raised() -> None:
    model = lazy_mlp()

    def refuse(module: Any, sd: Any, prefix: str, *rest: Any) -> None:
        rest[-1].append(f"not {prefix}")

    for layer in (model.fc1, model.fc2):
        lm.register_load_state_dict_pre_hook(layer, refuse)
    with pytest.raises(lm.StateDictError, match=r"not fc1\.(.|\n)*not fc2\."):
        lm.load_state_dict(model, lm.state_dict(plain_mlp()))
    assert lm.uninitialized_paths(model) == KEYS


def test_post_hooks_see_the_result_children_first() -> None:
    model, seen = lazy_mlp(), []

    def look(module: Any, result: lm.LoadResult) -> None:
        seen.append((type(module).__name__, lm.has_uninitialized_params(module), list(result.missing)))

    for node in (model, model.fc1, model.fc2):
        lm.register_load_state_dict_post_hook(node, look)
    lm.load_state_dict(model, lm.state_dict(plain_mlp()))
    assert seen == [("Linear", False, []), ("Linear", False, []), ("MLP", False, [])]


@ready_or_lazy
def test_a_post_hook_decides_what_is_missing_and_unexpected(lazy: bool) -> None:
    def forgive(module: Any, result: lm.LoadResult) -> None:
        result.missing.clear()
        result.unexpected.remove("old")

    layer = linear(lazy)
    lm.register_load_state_dict_post_hook(layer, forgive)
    assert lm.load_state_dict(layer, {"kernel": jnp.ones((3, 4)), "old": jnp.ones(1)}) == ([], [], [])
    assert_same_bits(layer.kernel.get_value(), jnp.ones((3, 4)))


@ready_or_lazy
def test_a_post_hook_may_make_a_load_fail_and_nothing_stays(lazy: bool) -> None:
    layer = linear(lazy)
    kernel = None if lazy else layer.kernel.get_value()
    handle = lm.register_load_state_dict_post_hook(layer, lambda m, result: result.missing.append("more"))
    good = {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}
    with pytest.raises(lm.StateDictError, match="more\n  got:    no entry"):
        lm.load_state_dict(layer, good)
    assert lm.load_state_dict(nnx.clone(layer), good, strict=False).missing == ["more"]
    handle.remove()
    if lazy:
        assert type(layer) is lm.LazyLinear and lm.uninitialized_paths(layer) == ["kernel", "bias"]
    else:
        assert layer.kernel.get_value() is kernel
    lm.load_state_dict(layer, good)
    assert_same_bits(layer.bias.get_value(), jnp.ones(4))  # pyright: ignore[reportOptionalMemberAccess]


REGISTER: dict[str, Callable[..., Any]] = {
    "state_dict_pre": lm.register_state_dict_pre_hook,
    "state_dict_post": lm.register_state_dict_post_hook,
    "load_state_dict_pre": lm.register_load_state_dict_pre_hook,
    "load_state_dict_post": lm.register_load_state_dict_post_hook,
}


@pytest.mark.parametrize("kind", REGISTER)
@ready_or_lazy
def test_a_hook_that_raises_leaves_the_model_as_it_was(lazy: bool, kind: str) -> None:
    model = nnx.List([linear(lazy), linear(False)])

    def fail(*_: Any) -> None:
        raise OSError("hook")

    REGISTER[kind](model[1], fail)
    before = {k: v.pending if lm.is_lazy(v) else v for k, v in nnx.to_flat_state(nnx.state(model))}
    with pytest.raises(OSError, match="hook"):
        if kind.startswith("state_dict"):
            lm.state_dict(model)
        else:
            ones = {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}
            lm.load_state_dict(model, {f"{i}.{k}": v for i in "01" for k, v in ones.items()})
    after = {k: v.pending if lm.is_lazy(v) else v for k, v in nnx.to_flat_state(nnx.state(model))}
    assert list(after) == list(before) and lm.is_lazy(model[0]) is lazy
    assert_same_bits(model[1].kernel.get_value(), linear(False).kernel.get_value())


@pytest.mark.parametrize("kind", REGISTER)
def test_a_value_that_a_hook_returns_would_be_lost(kind: str) -> None:
    layer = linear(False)
    REGISTER[kind](layer, lambda *args: {"kernel": 1})
    with pytest.raises(RuntimeError, match=f"a {kind} hook of Linear returned a value; edit in place instead"):
        lm.load_state_dict(layer, lm.state_dict(layer))


COPIERS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "clone": nnx.clone,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "split-merge": lambda m: nnx.merge(*nnx.split(m)),
}


@pytest.mark.parametrize("copier", COPIERS.values(), ids=COPIERS)
@ready_or_lazy
def test_copies_keep_load_hooks(lazy: bool, copier: Callable[[Any], Any]) -> None:
    layer = linear(lazy)
    lm.register_load_state_dict_pre_hook(layer, from_torch)
    twin = copier(layer)
    lm.load_state_dict(twin, {"weight": jnp.ones((4, 3)), "bias": jnp.zeros(4)})
    assert_same_bits(twin.kernel.get_value(), jnp.ones((3, 4)))
    assert lm.is_lazy(layer) is lazy


def test_a_hook_may_remove_itself_while_it_runs() -> None:
    layer, seen = linear(False), []
    handles: list[Any] = []

    def once(*_: Any) -> None:
        seen.append("once")
        handles.pop().remove()

    handles.append(lm.register_load_state_dict_pre_hook(layer, once))
    lm.register_load_state_dict_pre_hook(layer, lambda *_: seen.append("always"))
    for _ in range(2):
        lm.load_state_dict(layer, lm.state_dict(layer))
    assert seen == ["once", "always", "always"]


def test_forward_hooks_do_not_run_in_a_load() -> None:
    layer, seen = linear(True), []
    lm.register_forward_pre_hook(layer, lambda *_: seen.append(1))
    lm.load_state_dict(layer, {"kernel": jnp.ones((3, 4)), "bias": jnp.zeros(4)})
    assert seen == [] and isinstance(layer, nnx.Linear) and not isinstance(layer, lm.LazyLinear)
    layer(jnp.ones((1, 3)))
    assert seen == [1]
