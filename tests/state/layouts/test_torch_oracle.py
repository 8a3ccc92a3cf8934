"""Every module type against PyTorch itself: values to 1e-5, whatever the model was, and the way back bit for bit."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_model, contents
from torch_cases import CASES, Case, Net
from torch_files import imported, load, stored

import lazymods as lm
from lazymods.state.exporting import export_torch
from lazymods.state.layouts import from_torch

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here; test_closed_forms.py needs none")

BF16 = np.dtype(ml_dtypes.bfloat16)
BY_NAME = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
BOTH = pytest.mark.parametrize("which", ["lazy", "explicit"])


def to_numpy(tensor: Any) -> np.ndarray:
    """A tensor's values; bfloat16 through its bits."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(BF16)
    return tensor.detach().numpy()


def to_torch(array: np.ndarray) -> Any:
    """A tensor of an array's values."""
    return torch.tensor(array.view(np.int16)).view(torch.bfloat16) if array.dtype == BF16 else torch.tensor(array)


@functools.cache
def oracle(case: Case, dtype: str = "float32") -> tuple[Any, dict[str, np.ndarray], list[Any], np.ndarray]:
    """A module with values everywhere, its file with ``m`` as its name, inputs and the output (in float32)."""
    generator = torch.Generator().manual_seed(0)
    module = case.torch(torch.nn).eval()
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.empty(tensor.shape).uniform_(0.2, 1.2, generator=generator))
                tensor.mul_(torch.sign(torch.randn(tensor.shape, generator=generator)))
        for name, buffer in module.named_buffers():
            if name.endswith("running_var"):
                buffer.abs_()
        for name, parameter in module.named_parameters():
            if "GRU" in type(module).__name__ and "b_hn" not in case.name and name.startswith("bias_hh"):
                parameter[2 * len(parameter) // 3 :] = 0
        module = module.to(getattr(torch, dtype))
        file = {f"m.{k}": to_numpy(v.clone()) for k, v in module.state_dict().items()}
        module = module.float()
        x = torch.randn(case.shape, generator=generator)
        inputs = [x] + [torch.randn(case.more, generator=generator) for _ in range(2) if case.more]
        if case.kind == "ids":
            inputs = [torch.randint(0, 5, case.shape, generator=generator)]
        y = run_torch(case, module, inputs)
    return module, file, [i.numpy() for i in inputs], y


def run_torch(case: Case, module: Any, inputs: list[Any]) -> np.ndarray:
    """The output, features last."""
    x = inputs[0]
    with torch.no_grad():
        if case.kind == "attention":
            return module(x, inputs[1], inputs[1], need_weights=False)[0].numpy()
        if case.kind == "lstm cell":
            return module(x, (inputs[1], inputs[2]))[0].numpy()
        if case.kind == "cell":
            return module(x, inputs[1]).numpy()
        y = module(x)
    y = (y[0] if case.kind == "sequence" else y).numpy()
    return np.moveaxis(y, 1, -1) if case.kind == "channels" else y


def run_flax(case: Case, module: Any, inputs: list[Any]) -> np.ndarray:
    """The same for the twin."""
    x = np.moveaxis(inputs[0], 1, -1) if case.kind == "channels" else inputs[0]
    with jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("allow"):  # nnx.PReLU promotes its slopes
        if case.kind == "attention":
            y = module(x, inputs[1])
        elif case.kind == "lstm cell":
            y = module((inputs[2], inputs[1]), x)[1]
        elif case.kind == "cell":
            y = module(inputs[1], x)[1]
        else:
            y = module(jnp.asarray(x))
    return np.asarray(y).reshape(*np.shape(y)[:1], *x.shape[1:-1], -1) if case.kind == "plain" else np.asarray(y)


def built(case: Case, which: str) -> Net:
    return Net(getattr(case, which)(nnx.Rngs(0)))


@BOTH
@BY_NAME
def test_values(case: Case, which: str):
    _, file, inputs, want = oracle(case)
    net = built(case, which)
    load(net, file)
    got = run_flax(case, net.m, inputs)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


@BY_NAME
def test_a_lazy_model_becomes_the_explicit_one(case: Case):
    _, file, _, _ = oracle(case)
    lazy, explicit = built(case, "lazy"), built(case, "explicit")
    load(lazy, file)
    load(explicit, file)
    nnx.update(lazy, nnx.state(explicit, nnx.RngState))
    assert_same_model(lazy, explicit)


@BY_NAME
def test_an_abstract_model_gets_the_same_entries(case: Case):
    _, file, _, _ = oracle(case)
    abstract = nnx.eval_shape(lambda: built(case, "explicit"))
    got, want = imported(abstract, file), imported(built(case, "lazy"), file)
    assert not got.problems and got.entries.keys() == want.entries.keys()
    assert all(np.array_equal(got.entries[name], want.entries[name]) for name in want.entries)


@BY_NAME
def test_the_model_is_not_changed(case: Case):
    _, file, _, _ = oracle(case)
    net = built(case, "lazy")
    before = contents(net)
    imported(net, file)
    assert contents(net).keys() == before.keys() and lm.is_lazy(net.m) == lm.is_lazy(case.lazy(nnx.Rngs(0)))


@BY_NAME
def test_half_precision_is_kept_and_sums_are_exact(case: Case):
    _, file, inputs, want = oracle(case, "bfloat16")
    net = built(case, "lazy")
    found = imported(net, file)
    single = [name for name, sources in found.sources.items() if len(sources) == 1]
    assert all(found.entries[name].dtype == BF16 for name in single)
    load(net, file)
    np.testing.assert_allclose(run_flax(case, net.m, inputs), want, atol=1e-5, rtol=1e-5)


@BY_NAME
def test_every_entry_of_the_file_has_a_place(case: Case):
    _, file, _, _ = oracle(case)
    found = imported(built(case, "explicit"), file)
    used = {source for sources in found.sources.values() for source in sources}
    assert file.keys() - used <= {"m.num_batches_tracked"}
    assert not found.entries.keys() - lm.state_dict(built(case, "explicit")).keys()


@BY_NAME
def test_the_file_itself_is_seen_where_nothing_is_computed(case: Case):
    _, file, _, _ = oracle(case)
    tensors = stored(file)
    found = from_torch(built(case, "explicit"), tensors, None)
    for name, sources in found.sources.items():
        if len(sources) == 1:
            assert np.shares_memory(found.entries[name], tensors[sources[0]].read()), name


@BOTH
@BY_NAME
def test_pytorch_takes_the_export(case: Case, which: str):
    _, file, inputs, want = oracle(case)
    net = built(case, which)
    load(net, file)
    out = export_torch(net)
    assert all(value.flags.c_contiguous and value.flags.writeable for value in out.values())
    twin = case.torch(torch.nn).eval()
    tensors = {name.removeprefix("m."): to_torch(value) for name, value in out.items()}
    if not any("bias" in name for name in twin.state_dict()) and case.kind == "sequence":
        assert not any(value.any() for name, value in tensors.items() if name.startswith("bias"))
        tensors = {name: value for name, value in tensors.items() if not name.startswith("bias")}
    assert list(tensors) == list(twin.state_dict()) or sorted(tensors) == sorted(twin.state_dict())
    twin.load_state_dict(tensors)
    got = run_torch(case, twin, [torch.tensor(i) for i in inputs])
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)


@BY_NAME
def test_a_file_without_two_biases_comes_back_bit_for_bit(case: Case):
    _, file, _, _ = oracle(case)
    file = {name: np.zeros_like(value) if "bias_hh" in name else value for name, value in file.items()}
    net = built(case, "lazy")
    load(net, file)
    out = export_torch(net)
    for name, value in file.items():
        assert out[name].dtype == value.dtype and out[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@BY_NAME
def test_flax_to_pytorch_to_flax_is_bit_for_bit(case: Case, dtype: Any):
    net = built(case, "explicit")
    rng = np.random.default_rng(0)
    state = nnx.state(net, nnx.Not(nnx.RngState))
    nnx.update(net, jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape), dtype), state))
    out = export_torch(net)
    assert all(v.dtype == dtype for name, v in out.items() if not name.endswith("num_batches_tracked"))
    twin = built(case, "explicit")
    nnx.update(twin, jax.tree.map(jnp.zeros_like, state_of_dtype(twin, dtype)))
    load(twin, out)
    for name, value in lm.state_dict(net).items():
        assert np.asarray(lm.state_dict(twin)[name]).tobytes() == np.asarray(value).tobytes(), name


def state_of_dtype(net: nnx.Module, dtype: Any) -> nnx.State[Any, Any]:
    return jax.tree.map(lambda a: a.astype(dtype), nnx.state(net, nnx.Not(nnx.RngState)))
