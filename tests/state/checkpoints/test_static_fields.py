"""Numbers and texts in static fields of registered classes are state; functions and other objects there are not."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import lazymods as lm

static: Any = functools.partial(flax.struct.field, pytree_node=False)


@flax.struct.dataclass
class Run:
    weight: Any
    epoch: Any = static(default=0)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["name", "epoch"])
@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    weight: jax.Array
    name: str
    epoch: int


@jax.tree_util.register_pytree_node_class
class Plain:
    def __init__(self, weight: Any, epoch: Any) -> None:
        self.weight, self.epoch = weight, epoch
        self.twice = epoch * 2 if isinstance(epoch, int) else None  # follows from it

    def tree_flatten(self) -> Any:
        return (self.weight,), {"epoch": self.epoch}

    @classmethod
    def tree_unflatten(cls, held: Any, children: Any) -> "Plain":
        [weight] = children
        return cls(weight, held["epoch"])


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Settings:
    rate: float
    names: tuple[Any, ...] = ()


class Trained(TrainState):
    epoch: int = static(default=0)
    settings: Any = static(default=None)


def make_state(k: int) -> dict[str, Any]:
    weight = jnp.full(2, float(k))
    trained = Trained.create(
        apply_fn=print, params={"w": weight}, tx=optax.sgd(0.1), epoch=k, settings=Settings(k / 2, (f"n{k}", (k,)))
    )
    return {
        "run": Run(weight, k),
        "deep": [{"run": Run(Run(weight, f"inner {k}"), 2**70 + k)}, (Run(weight, k / 4),)],
        "slotted": Slotted(weight, f"name {k}", k),
        "plain": Plain(weight, k),
        "settings": Settings(k / 8),
        "trained": trained,
        "variable": nnx.Variable(Run(weight, bool(k % 2))),
    }


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ""])
def test_static_fields_come_back(suffix: str, tmp_path: Path) -> None:
    lm.save(make_state(5), tmp_path / f"s{suffix}")
    state = make_state(2)
    functions = state["trained"].apply_fn, state["trained"].tx
    lm.load(state, tmp_path / f"s{suffix}")
    assert state["run"].epoch == 5 and type(state["run"].epoch) is int and state["run"].weight.tolist() == [5, 5]
    assert state["deep"][0]["run"].epoch == 2**70 + 5 and state["deep"][0]["run"].weight.epoch == "inner 5"
    assert state["deep"][1][0].epoch == 1.25
    assert (state["slotted"].name, state["slotted"].epoch) == ("name 5", 5)
    assert (state["plain"].epoch, state["plain"].twice) == (5, 10)
    assert state["settings"] == Settings(0.625)
    trained = state["trained"]
    assert (trained.epoch, trained.settings) == (5, Settings(2.5, ("n5", (5,))))
    assert (trained.apply_fn, trained.tx) == functions and trained.params["w"].tolist() == [5, 5]
    variable = state["variable"].get_raw_value()
    assert variable.epoch is True and variable.weight.tolist() == [5, 5]


def test_their_names() -> None:
    assert list(lm.state_dict({"run": Run(jnp.ones(1), 3), "plain": Plain(jnp.ones(1), 4)})) == [
        *("run.weight", "run.epoch", "plain.0", "plain.epoch")
    ]


def test_an_object_that_two_hold_is_not_changed() -> None:
    """It is nobody's to change: the state gets another in its place."""
    shared = Run(jnp.ones(2), 1)
    state = {"run": shared}
    lm.load_state_dict(state, {"run.weight": jnp.zeros(2), "run.epoch": 7})
    assert (state["run"].epoch, shared.epoch, shared.weight.tolist()) == (7, 1, [1, 1])


def test_a_text_for_a_number_leaves_all_as_it_was() -> None:
    state = {"run": Run(jnp.ones(2), 1)}
    with pytest.raises(lm.StateDictError, match=r"run\.epoch"):
        lm.load_state_dict(state, {"run.weight": jnp.zeros(2), "run.epoch": "seven"})
    assert state["run"].epoch == 1 and state["run"].weight.tolist() == [1, 1]


def test_an_array_in_a_static_field_comes_back(tmp_path: Path) -> None:
    state = {"run": Run(jnp.ones(2), np.arange(3))}
    lm.save(state, tmp_path / "s.npz")
    fresh = {"run": Run(jnp.ones(2), np.zeros(3, int))}
    lm.load(fresh, tmp_path / "s.npz")
    assert fresh["run"].epoch.tolist() == [0, 1, 2]


def test_what_else_is_static_is_no_entry() -> None:
    state = {"run": Run(jnp.ones(2), (print, optax.sgd(0.1), None, jnp.float32))}
    assert list(lm.state_dict(state)) == ["run.weight"]


HANDED_ON = {
    "as another type": (float, lambda aux: aux, 3.0, 5.0),
    "as bytes": (str.encode, bytes.decode, "old", "new"),
    "computed": (lambda held: held + 0, lambda aux: aux, 3, 5),
    "in an object": (Settings, lambda aux: aux.rate, 3.0, 5.0),
}


@pytest.mark.parametrize(("give", "take", "old", "new"), HANDED_ON.values(), ids=HANDED_ON)
def test_what_a_class_makes_of_a_field_before_it_hands_it_on(
    give: Any, take: Any, old: Any, new: Any, tmp_path: Path
) -> None:
    """It was the template's after a load, and nobody was told."""

    @jax.tree_util.register_pytree_node_class
    class Holder:
        def __init__(self, weight: Any, held: Any) -> None:
            self.weight, self.held = weight, held
            self.count = 7  # which is no part of it

        def tree_flatten(self) -> Any:
            return (self.weight,), give(self.held)

        @classmethod
        def tree_unflatten(cls, aux: Any, children: Any) -> "Holder":
            (weight,) = children
            return cls(weight, take(aux))

    lm.save({"h": Holder(jnp.ones(2), new)}, tmp_path / "s.npz")
    state = {"h": Holder(jnp.zeros(2), old)}
    lm.load(state, tmp_path / "s.npz")
    assert state["h"].held == new and type(state["h"].held) is type(new)
    assert list(lm.state_dict(state)) == ["h.0", "h.held"] and state["h"].weight.tolist() == [1, 1]
