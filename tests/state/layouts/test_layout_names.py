"""Which of a file's entries go where: shared modules, wrappers, unknown types, and what stays as it is."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from torch_files import imported, load, normal, stored

import lazymods as lm
from lazymods.state.exporting import export_torch
from lazymods.state.layouts import from_torch

R = nnx.Rngs
LINEAR = {"weight": normal(3, 3), "bias": normal(3)}


def under(prefix: str, file: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{prefix}.{name}": value for name, value in file.items()}


class Holder(nnx.Module):
    """Holds what it is given, by name."""

    def __init__(self, **parts: Any) -> None:
        for name, part in parts.items():
            setattr(self, name, part)


def hold(**parts: Any) -> Any:
    return Holder(**parts)


def test_what_no_module_claims_is_the_very_object_under_its_own_name():
    tensors = stored({"fc.weight": normal(3, 3), "position_ids": np.arange(3), "fc.kernel_": normal(2)})
    tensors |= {"epoch": 3, "fc.bias": "no tensor"}
    found = from_torch(hold(fc=lm.LazyLinear(3, rngs=R(0))), tensors, None)
    assert list(found.entries) == ["fc.kernel", "position_ids", "fc.kernel_", "epoch", "fc.bias"]
    assert all(found.entries[name] is tensors[name] for name in list(found.entries)[1:])
    assert found.sources["fc.kernel"] == ("fc.weight",) and found.sources["epoch"] == ("epoch",)


def test_names_of_flax_are_not_of_this_layout():
    tensors = stored({"fc.kernel": normal(3, 4)})
    found = from_torch(hold(fc=lm.LazyLinear(3, rngs=R(0))), tensors, None)
    assert found.entries["fc.kernel"] is tensors["fc.kernel"]


def test_only_what_a_module_claims_is_read():
    class Untouchable:
        shape, dtype = (3,), np.dtype(np.float32)

        def read(self) -> None:
            raise AssertionError

    other = Untouchable()
    found = from_torch(hold(fc=lm.LazyLinear(3, rngs=R(0))), {"other": other, "fc.weight": other}, None)
    assert found.entries == {"other": other, "fc.weight": other}


def test_counters_are_swallowed():
    found = imported(hold(norm=lm.LazyBatchNorm(rngs=R(0))), {"norm.num_batches_tracked": np.array(3)})
    assert found.entries == {} and not found.problems


@pytest.mark.parametrize("names", [("a",), ("b",), ("a", "b")])
def test_a_shared_module_reads_either_name(names: tuple[str, ...]):
    layer = lm.LazyLinear(3, rngs=R(0))
    model = hold(a=layer, b=layer)
    load(model, {k: v for name in names for k, v in under(name, LINEAR).items()})
    assert np.array_equal(model.a.kernel[...], LINEAR["weight"].T) and model.a is model.b
    assert list(export_torch(model)) == ["a.weight", "a.bias", "b.weight", "b.bias"]


def test_a_shared_module_is_flattened_before_under_either_name():
    layer = lm.LazyLinear(3, use_bias=False, rngs=R(0))
    found = imported(hold(a=layer, b=layer), {"b.weight": normal(3, 6)}, {"a": (2, 3)})
    assert np.array_equal(found.entries["b.kernel"], normal(3, 3, 2).swapaxes(1, 2).reshape(3, 6).T)


def test_a_tie_between_layers_takes_one_name_or_both():
    model = hold(embed=nnx.Embed(3, 3, rngs=R(0)), head=nnx.Linear(3, 3, use_bias=False, rngs=R(0)))
    model.head.kernel = model.embed.embedding  # as it is: the tie is of Flax's arrays
    load(model, {"embed.weight": normal(3, 3)})
    assert np.array_equal(model.head.kernel[...], normal(3, 3))


def test_modules_in_containers():
    model = hold(layers=nnx.List([lm.LazyLinear(3, rngs=R(0)), nnx.Dict(fc=lm.LazyLinear(3, rngs=R(0)))]))
    load(model, under("layers.0", LINEAR) | under("layers.1.fc", LINEAR))
    assert np.array_equal(model.layers[1].fc.kernel[...], LINEAR["weight"].T)


def test_a_layer_is_a_model_as_well():
    layer = lm.LazyLinear(3, rngs=R(0))
    load(layer, LINEAR)
    assert np.array_equal(layer.kernel[...], LINEAR["weight"].T)
    rnn = nnx.RNN(lm.LazySimpleCell(3, rngs=R(0)))
    load(rnn, {"weight_ih_l0": normal(3, 3), "weight_hh_l0": normal(3, 3)})
    assert list(export_torch(rnn)) == ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]


def test_a_dict_of_models():
    found = imported({"model": hold(fc=lm.LazyLinear(3, rngs=R(0)))}, under("model.fc", LINEAR))
    assert list(found.entries) == ["model.fc.kernel", "model.fc.bias"]


class Scaled(nnx.Linear):
    """A user's layer: a Linear and a parameter of its own."""

    def __init__(self, n_in: int, n_out: int, *, rngs: nnx.Rngs) -> None:
        super().__init__(n_in, n_out, rngs=rngs)
        self.gain = nnx.Param(jnp.ones((2, 3)))


def test_a_subclass_is_what_it_comes_from_and_its_own_parameters_stay():
    model = hold(fc=Scaled(3, 3, rngs=R(0)))
    load(model, under("fc", LINEAR | {"gain": normal(2, 3)}))
    assert np.array_equal(model.fc.kernel[...], LINEAR["weight"].T)
    assert np.array_equal(model.fc.gain[...], normal(2, 3))
    assert np.array_equal(export_torch(model)["fc.gain"], normal(2, 3))


def test_a_wrapper_leaves_its_attribute_out_of_all_names():
    model = hold(fc=nnx.WeightNorm(Scaled(3, 3, rngs=R(0)), use_scale=False, rngs=R(0)))
    file = {"weight_g": np.ones((3, 1), np.float32), "weight_v": normal(3, 3), "bias": normal(3), "gain": normal(2, 3)}
    load(model, under("fc", file))
    assert np.array_equal(model.fc.layer_instance.gain[...], normal(2, 3))
    assert "fc.gain" in export_torch(model)


def test_adapters_keep_their_names_beside_a_base_by_pytorchs():
    model = hold(fc=lm.LazyLoRALinear(3, lora_rank=2, rngs=R(0)))
    load(model, under("fc", LINEAR | {"lora.lora_a": normal(3, 2), "lora.lora_b": normal(2, 3)}))
    assert np.array_equal(model.fc.kernel[...], LINEAR["weight"].T)
    assert np.array_equal(model.fc.lora.lora_a[...], normal(3, 2))
    base = hold(fc=lm.LazyLoRA(2, 3, base_module=lm.LazyLinear(3, rngs=R(0)), rngs=R(0)))
    load(base, under("fc", under("base_module", LINEAR) | {"lora_a": normal(3, 2), "lora_b": normal(2, 3)}))
    assert np.array_equal(base.fc.base_module.kernel[...], LINEAR["weight"].T)


class Twice(nnx.Module):
    """A user's cell: not one of PyTorch's."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.dense = lm.LazyLinear(3, rngs=rngs)


def test_a_cell_of_the_users_is_a_module_of_its_own():
    model = hold(rnn=nnx.RNN(Twice(rngs=R(0))))  # pyright: ignore[reportArgumentType]
    found = imported(model, under("rnn.cell.dense", LINEAR))
    assert list(found.entries) == ["rnn.cell.dense.kernel", "rnn.cell.dense.bias"]


def test_a_layer_that_the_model_has_by_name_is_no_further_layer():
    class Deep(nnx.RNN):
        """Has the second layer's weights as parameters of its own."""

        def __init__(self, *, rngs: nnx.Rngs) -> None:
            super().__init__(nnx.SimpleCell(3, 3, rngs=rngs))
            self.weight_ih_l1 = nnx.Param(jnp.zeros((3, 3)))

    model = hold(rnn=Deep(rngs=R(0)))
    found = imported(model, {"rnn.weight_ih_l1": normal(3, 3)})
    assert list(found.entries) == ["rnn.weight_ih_l1"] and not found.problems


def test_norms_of_queries_and_keys_are_modules_of_their_own():
    model = hold(a=nnx.MultiHeadAttention(2, 4, normalize_qk=True, decode=False, rngs=R(0)))
    found = imported(model, {"a.query_ln.weight": normal(2)})
    assert list(found.entries) == ["a.query_ln.scale"]


def test_random_state_has_no_place_in_a_file():
    model = hold(drop=nnx.Dropout(0.5, rngs=R(0)), fc=nnx.Linear(3, 3, rngs=R(0)))
    load(model, under("fc", LINEAR))
    assert list(export_torch(model)) == ["fc.weight", "fc.bias"]


def test_a_model_that_holds_itself():
    model = hold(fc=lm.LazyLinear(3, rngs=R(0)))
    model.again = model
    found = imported(model, under("fc", LINEAR))
    assert list(found.entries) == ["fc.kernel", "fc.bias"]


def test_the_sizes_of_flatten_are_those_of_a_lazy_kernel():
    model = hold(m=lm.LazyLinearGeneral(2, axis=(-2, -1), use_bias=False, rngs=R(0)))
    load(model, {"m.weight": normal(2, 6)}, {"m": (2, 3)})
    assert np.array_equal(model.m.kernel[...], normal(2, 3, 2).transpose(2, 1, 0))


@pytest.mark.parametrize("name", ["bias_ih", "bias_hh"])
def test_one_bias_is_enough(name: str):
    found = imported(lm.LazySimpleCell(3, rngs=R(0)), {name: normal(3)})
    assert np.array_equal(found.entries["dense_i.bias"], normal(3)) and found.sources["dense_i.bias"] == (name,)
