"""No layer of Flax is forgotten, and each lazy class takes Flax's arguments in Flax's order."""

import inspect
from typing import Any

import pytest
from flax import nnx
from layers import TABLE

import lazymods as lm
from lazymods import nn as lazy_nn

# Flax's classes whose constructor needs no size of the input.
WITHOUT_INPUT_SIZE = {
    "Bidirectional": "takes two recurrent networks, whose cells may be lazy",
    "Dict": "a container",
    "Dropout": "a rate and a mode",
    "List": "a container",
    "Module": "the base class",
    "PReLU": "one slope for every feature",
    "RNN": "takes a cell, which may be lazy",
    "RNNCellBase": "the base class of the cells",
    "RoPE": "embedding_size is optional, and only sizes a table that can be computed at the call",
    "Sequential": "a container",
}
# What the constructors call a size of the input; wrapped layers bring sizes of their own.
INPUT_SIZES = {"in_features", "num_features", "in_kv_features", "kernel_shape", "layer_instance"}
# Flax's arguments that a lazy class does not take, because the first call tells them.
INFERRED = {"in_features", "num_features", "kernel_shape"}
RANKED = {"Conv", "ConvTranspose", "BatchNorm", "InstanceNorm"}


def flax_modules() -> dict[str, Any]:
    """Every module class that flax.nnx exports."""
    return {n: c for n, c in vars(nnx).items() if isinstance(c, type) and issubclass(c, nnx.Module)}


def lazy_layers() -> dict[str, Any]:
    """Every public lazy layer."""
    return {n: c for n, c in vars(lazy_nn).items() if n.startswith("Lazy") and isinstance(c, type)}


def required(cls: Any) -> set[str]:
    """The arguments without a default, and rngs."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD} - {"self", "rngs"}


def test_every_layer_of_flax_has_a_lazy_twin() -> None:
    twins = {c.cls_to_become.__name__ for c in lazy_layers().values()}
    forgotten = set(flax_modules()) - twins - set(WITHOUT_INPUT_SIZE)
    assert not forgotten, f"flax.nnx has {sorted(forgotten)}: give them a lazy twin, or say why they need none"
    assert not twins & set(WITHOUT_INPUT_SIZE)


@pytest.mark.parametrize("name", sorted(WITHOUT_INPUT_SIZE))
def test_exclusions_need_no_input_size(name: str) -> None:
    if name not in flax_modules():
        assert name == "RoPE"  # newer than the oldest flax supported
        return
    assert not required(flax_modules()[name]) & INPUT_SIZES


@pytest.mark.parametrize("name", sorted(flax_modules().keys() - WITHOUT_INPUT_SIZE.keys()))
def test_twin_becomes_the_class_of_its_name(name: str) -> None:
    ranks = [f"Lazy{name}{rank}d" for rank in (1, 2, 3)] if name in RANKED else []
    for lazy_name in (f"Lazy{name}", *ranks):
        twin = getattr(lm, lazy_name)
        assert twin is getattr(lazy_nn, lazy_name)
        assert twin.cls_to_become is flax_modules()[name]
        assert issubclass(twin, flax_modules()[name])


@pytest.mark.parametrize("name", sorted(lazy_layers()))
def test_arguments_are_those_of_flax(name: str) -> None:
    """In Flax's order without the inferred ones; every option by keyword; rngs last."""
    cls = lazy_layers()[name]
    target = dict(inspect.signature(cls.cls_to_become.__init__).parameters)
    del target["self"]
    own = inspect.signature(cls).parameters
    assert list(own)[-1] == "rngs"
    needed = required(cls.cls_to_become) - INFERRED
    for p in own.values():
        by_position = p.kind is p.POSITIONAL_OR_KEYWORD
        if p.name in target:
            asked = p.name in needed and target[p.name].kind is not p.KEYWORD_ONLY
            assert by_position == asked, p.name
            assert p.default is target[p.name].default or p.name in needed, p.name
        else:
            assert not by_position, p.name
    common = [n for n in own if n in target and n != "rngs"]
    positional = [n for n in common if own[n].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional == [n for n in target if n in positional]
    assert [n for n in common if n not in positional] == [n for n in target if n in common and n not in positional]
    variadic = {n for n, p in target.items() if p.kind is p.VAR_KEYWORD}
    assert set(target) - variadic - INFERRED == set(common) | {"rngs"}


@pytest.mark.slow
def test_table_has_every_lazy_layer() -> None:
    seen: set[Any] = set()
    for row in TABLE:
        seen |= {type(node) for _, node in nnx.iter_graph(row.lazy(nnx.Rngs(0))) if isinstance(node, nnx.Module)}
    assert not set(lazy_layers().values()) - seen


def test_table_has_a_main_row_for_every_family() -> None:
    families = {row.family for row in TABLE}
    assert {row.family for row in TABLE if row.main} == families
    assert families == set(flax_modules()) - set(WITHOUT_INPUT_SIZE) | {"RNN", "Bidirectional", "ResetAfterGRUCell"}
    assert len({row.name for row in TABLE}) == len(TABLE)
