"""What PyTorch's programs have in memory: training checkpoints, modules that were wrapped, tensors without numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flax import nnx

import lazymods as lm

torch = pytest.importorskip("torch", reason="PyTorch's modules and tensors are the sources")
averages = pytest.importorskip("torch.optim.swa_utils", reason="PyTorch averages")


def published() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def ours() -> Any:
    return nnx.Sequential(*(lm.LazyLinear(n, rngs=nnx.Rngs(0)) for n in (4, 2)))


def check(model: Any, state: dict[str, Any]) -> None:
    for i in (0, 1):
        np.testing.assert_array_equal(model.layers[i].kernel[...], state[f"{i}.weight"].numpy().T)
        np.testing.assert_array_equal(model.layers[i].bias[...], state[f"{i}.bias"].numpy())


def test_a_training_checkpoint() -> None:
    """As ``torch.load`` gives it: the part is found as in its file."""
    net = published()
    state = net.state_dict()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    source = {"epoch": 3, "model": state, "optimizer": optimizer.state_dict(), "args": {"lr": 0.1}}
    model = ours()
    result = lm.load(model, source, layout="torch")
    check(model, state)
    assert (result.root, result.notes) == ("model", ["taken from 'model', beside optimizer"])
    assert list(lm.export_torch(model, like=result)) == list(state)
    source["model_ema"] = {name: value + 1 for name, value in state.items()}
    with pytest.raises(lm.CheckpointError, match="several state dicts that fit the model: model, model_ema"):
        lm.load(ours(), source, layout="torch")
    lm.load(model, source, layout="torch", root="model_ema")
    check(model, source["model_ema"])


WRAPPED: dict[str, Callable[[str], str]] = {
    "torch.compile of a layer": lambda name: name.replace("0.", "0._orig_mod."),
    "checkpointed layers": lambda name: f"{name[:2]}_checkpoint_wrapped_module.{name[2:]}",
    "FSDP": lambda name: f"_fsdp_wrapped_module.{name[:2]}_fsdp_wrapped_module.{name[2:]}",
}


@pytest.mark.parametrize("name", WRAPPED)
def test_names_of_pytorch_s_wrappers(name: str) -> None:
    state = published().state_dict()
    file = {WRAPPED[name](key): value for key, value in state.items()}
    model = ours()
    result = lm.load(model, file, layout="torch")
    check(model, state)
    assert list(lm.export_torch(model, like=result)) == list(file)


def test_an_averaged_model() -> None:
    source = averages.AveragedModel(published())
    model = ours()
    result = lm.load(model, source, layout="torch")
    check(model, published().state_dict())
    source.load_state_dict({n: torch.as_tensor(np.array(v)) for n, v in lm.export_torch(model, like=result).items()})


def test_tensors_without_numbers() -> None:
    with pytest.raises(lm.ArgumentError) as caught:
        lm.load(lm.LazyLinear(4, rngs=nnx.Rngs(0)), torch.nn.LazyLinear(4), layout="torch")
    assert str(caught.value) == (
        "lm.load: source\n"
        "  got:    weight, bias without a shape\n"
        "  needed: tensors with values: PyTorch's lazy modules have none before their first call\n"
        "  write:  torch_module(x)  # once, before lm.load"
    )
    with pytest.raises(lm.StateDictError, match="a tensor on meta has no numbers"):
        lm.load(lm.LazyLinear(4, rngs=nnx.Rngs(0)), torch.nn.Linear(3, 4, device="meta"), layout="torch")


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(
    "make", [lambda eye: eye.to_sparse(), lambda eye: torch.quantize_per_tensor(eye, 1.0, 0, torch.qint8)]
)
def test_the_line_for_sparse_and_quantized_tensors(make: Callable[[Any], Any]) -> None:
    source = {"weight": make(torch.eye(4))}
    layer: Any = lm.LazyLinear(4, use_bias=False, rngs=nnx.Rngs(0))
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(layer, source, layout="torch")
    exec(caught.value.problems[0].write, {"source": source})
    lm.load(layer, source, layout="torch")
    np.testing.assert_array_equal(layer.kernel[...], np.eye(4))
