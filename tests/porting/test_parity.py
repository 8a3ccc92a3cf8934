"""``lm.parity``: each kind of mistake in a port is named, with the layer, the reason and what to write."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_unchanged, contents

import lazymods as lm

torch = pytest.importorskip("torch", reason="parity compares with PyTorch")
nn = torch.nn
R = nnx.Rngs
SAME = {"fc1": (4, 4, 8)}


class TorchNet(nn.Module):
    """A convolution, a norm, a flatten, an activation and a sum: what ports get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.fc1 = nn.Linear(8 * 4 * 4, 16)
        self.fc2 = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        x = self.drop(torch.relu(self.bn(self.conv(x)))).flatten(1)
        x = self.fc1(x)
        x = x + self.fc2(nn.functional.gelu(3 * x))
        return torch.softmax(self.norm(x), -1)


class Net(nnx.Module):
    """Its port, right by default."""

    def __init__(self, *, padding: Any = ((1, 1), (1, 1)), bn_eps: float = 1e-5, eps: float = 1e-5, wrong: str = ""):
        rngs = R(0)
        strides = 1 if wrong == "strides" else 2
        self.conv = lm.LazyConv(8, (3, 3), strides=strides, padding=padding, rngs=rngs)
        self.bn = lm.LazyBatchNorm(epsilon=bn_eps, rngs=rngs)
        self.fc1, self.fc2 = lm.LazyLinear(16, rngs=rngs), lm.LazyLinear(16, rngs=rngs)
        self.norm = lm.LazyLayerNorm(epsilon=eps, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.wrong = wrong

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.bn(self.conv(x))
        x = self.drop(x if self.wrong == "relu" else jax.nn.relu(x)).reshape(len(x), -1)
        x = self.fc1(x)
        y = self.fc2(nnx.gelu((2 if self.wrong == "factor" else 3) * x, approximate=self.wrong == "gelu"))
        x = y if self.wrong == "sum" else x + y
        x = self.norm(x)
        return x if self.wrong == "softmax" else jax.nn.softmax(x)


@pytest.fixture(scope="module")
def torch_net() -> Any:
    """The module, with statistics and scales that are no identity."""
    torch.manual_seed(0)
    net = TorchNet()
    with torch.no_grad():
        net.bn.running_mean.normal_()
        net.bn.running_var.uniform_(0.5, 2)
        net.bn.weight.normal_()
        net.fc1.weight.mul_(0.1)
    return net.eval()


@pytest.fixture(scope="module")
def file(torch_net: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the module saves."""
    path = tmp_path_factory.mktemp("parity") / "net.pt"
    torch.save(torch_net.state_dict(), path)
    return path


def image(seed: int = 0) -> Any:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def loaded(file: Path, flatten: Any = SAME, **options: Any) -> tuple[Net, Any]:
    model = Net(**options)
    result = lm.load(model, file, layout="torch", flatten=flatten)
    model.eval()
    return model, result


def test_a_right_port_agrees_layer_by_layer(torch_net: Any, file: Path):
    model, result = loaded(file)
    report = lm.parity(model, torch_net, image(), result)
    assert report.agrees
    assert report.first is None
    assert (report.reason, report.write, report.notes) == ("", "", ())
    rows = [(r.path, r.layer, r.torch_path, r.torch_layer, r.shape) for r in report.rows]
    assert rows == [
        ("conv", "Conv", "conv", "Conv2d", "f32[2,4,4,8]"),
        ("bn", "BatchNorm", "bn", "BatchNorm2d", "f32[2,4,4,8]"),
        ("fc1", "Linear", "fc1", "Linear", "f32[2,16]"),
        ("fc2", "Linear", "fc2", "Linear", "f32[2,16]"),
        ("norm", "LayerNorm", "norm", "LayerNorm", "f32[2,16]"),
        ("", "Net", "", "TorchNet", "f32[2,16]"),
    ]
    assert all(r.relative < 1e-5 for r in report.rows)
    text = str(report)
    assert text == repr(report)
    assert text.startswith("all 6 outputs agree; the largest relative difference is ")
    assert [line.split()[0] for line in text.splitlines()[3:9]] == ["conv", "bn", "fc1", "fc2", "norm", "(output)"]


class Mistake(NamedTuple):
    name: str
    options: dict[str, Any]
    first: str
    reason: str
    write: str


MISTAKES = [
    Mistake("padding", {"padding": "SAME"}, "conv",
            "padding='SAME' at strides (2, 2) pads ((0, 1), (0, 1)), PyTorch ((1, 1), (1, 1))",
            "padding=((1, 1), (1, 1))"),
    Mistake("valid", {"padding": ((1, 1), (2, 0))}, "conv",
            "padding=((1, 1), (2, 0)) at strides (2, 2) pads ((1, 1), (2, 0)), PyTorch ((1, 1), (1, 1))",
            "padding=((1, 1), (1, 1))"),
    Mistake("batch norm's epsilon", {"bn_eps": 1e-2}, "bn", "epsilon=0.01, PyTorch has eps=1e-05", "epsilon=1e-05"),
    Mistake("layer norm's epsilon", {"eps": 1e-2}, "norm", "epsilon=0.01, PyTorch has eps=1e-05", "epsilon=1e-05"),
    Mistake("flatten", {"flatten": None}, "fc1",
            "the map before it is flattened channels last here, channels first in PyTorch",
            'lm.load(..., layout="torch", flatten={"fc1": (4, 4, 8)})'),
    Mistake("relu", {"wrong": "relu"}, "fc1",
            "what is computed between the output of bn (BatchNorm) and the input of fc1 (Linear): all before it agrees",
            ""),
    Mistake("factor", {"wrong": "factor"}, "fc2",
            "what is computed between the output of fc1 (Linear) and the input of fc2 (Linear): all before it agrees",
            ""),
    Mistake("sum", {"wrong": "sum"}, "norm", "PyTorch adds the output of fc1 (Linear) to it, the model does not",
            "a sum with the output of fc1 (Linear)"),
    Mistake("softmax", {"wrong": "softmax"}, "",
            "of the output of norm (LayerNorm) the model takes nothing, PyTorch softmax",
            "nnx.softmax(x) for x, the output of norm (LayerNorm)"),
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.name)
@pytest.mark.parametrize("with_result", [True, False])
def test_a_mistake_is_named(torch_net: Any, file: Path, mistake: Mistake, with_result: bool):
    is_told = mistake.name == "flatten"
    with pytest.warns(UserWarning, match="flattened channels last") if is_told else contextlib.nullcontext():
        model, result = loaded(file, **mistake.options)
    report = lm.parity(model, torch_net, image(), result if with_result else None)
    assert report.first is not None
    assert (report.first.path, report.reason, report.write) == (mistake.first, mistake.reason, mistake.write)
    at = report.rows.index(report.first)
    assert all(row.agrees for row in report.rows[:at])
    assert f"{mistake.first or 'the output'} (" in str(report).splitlines()[0]
    assert f"  why:    {mistake.reason}" in str(report)


@pytest.mark.slow
def test_strides_are_told(torch_net: Any, file: Path):
    model = Net(wrong="strides")
    with pytest.warns(UserWarning, match="flattened channels last"):
        lm.load(model, file, layout="torch")
    model.fc1.kernel = nnx.Param(jnp.ones((512, 16)))  # so that the model runs
    report = lm.parity(model, torch_net, image())
    assert report.first is not None
    assert (report.first.path, report.first.difference) == ("conv", float("inf"))
    assert (report.reason, report.write) == ("strides=(1, 1), PyTorch has stride=(2, 2)", "strides=(2, 2)")


@pytest.mark.slow
def test_gelu_and_its_tanh_form(torch_net: Any, file: Path):
    class Mlp(nnx.Module):
        def __init__(self, approximate: bool):
            self.up, self.down = lm.LazyLinear(16, rngs=R(0)), lm.LazyLinear(4, rngs=R(1))
            self.approximate = approximate

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.down(nnx.gelu(self.up(x), approximate=self.approximate))

    def twin(form: str) -> Any:
        net = nn.Sequential()
        net.up, net.gelu, net.down = nn.Linear(8, 16), nn.GELU(form), nn.Linear(16, 4)
        return net

    forms = {"none": "gelu (exact)", "tanh": "gelu (tanh form)"}
    code = {"none": "nnx.gelu(x, approximate=False)", "tanh": "nnx.gelu(x)"}
    x = 3 * np.random.default_rng(0).standard_normal((4, 8)).astype("f4")
    for form, other in (("none", "tanh"), ("tanh", "none")):
        net, model = twin(form), Mlp(form == "none")
        state = net.state_dict()
        lm.load_state_dict(model, {k.replace("weight", "kernel"): v.detach().numpy().T for k, v in state.items()})
        report = lm.parity(model, net, x)
        assert report.first is not None
        assert report.first.path == "down"
        where = "the output of up (Linear)"
        assert report.reason == f"of {where} the model takes {forms[other]}, PyTorch {forms[form]}"
        assert report.write == f"{code[form]} for x, {where}"
        close = lm.parity(model, net, x, tolerance=0.1)  # the same is told where the numbers pass
        assert close.agrees
        assert close.notes == (f"down: {report.reason}; write {report.write}",)


@pytest.mark.slow
def test_modes(torch_net: Any, file: Path):
    model, result = loaded(file)
    torch_net.train()
    before = {k: v.clone() for k, v in torch_net.state_dict().items()}
    report = lm.parity(model, torch_net, image(), result)
    assert (report.first.path if report.first else None, report.write) == ("bn", "torch_module.eval()")
    assert report.reason == (
        "PyTorch's BatchNorm2d normalizes by the batch, as in training, the model by the running statistics"
    )
    assert all(torch.equal(v, before[k]) for k, v in torch_net.state_dict().items())
    assert torch_net.training
    torch_net.eval()
    torch_net.drop.train()
    report = lm.parity(model, torch_net, image(), result)
    assert (report.first.path if report.first else None, report.write) == ("fc1", "torch_module.eval()")
    assert report.reason == "PyTorch's drop drops values at random, as in training"
    torch_net.eval()
    model.train()
    before = contents(model)
    report = lm.parity(model, torch_net, image(), result)
    assert (report.first.path if report.first else None, report.write) == ("bn", "model.eval()")
    assert_unchanged(model, before)
    model.eval()
    assert lm.parity(model, torch_net, image(), result).agrees


@pytest.mark.parametrize("change", ["other", "transposed", "reordered"])
def test_other_parameters(torch_net: Any, file: Path, change: str):
    model, _ = loaded(file)
    kernel = model.fc2.kernel
    made: dict[str, Callable[[], Any]] = {
        "other": lambda: kernel[...] + 0.5,
        "transposed": lambda: kernel[...].T,
        "reordered": lambda: kernel[...][:, ::-1],
    }
    kernel[...] = made[change]()
    report = lm.parity(model, torch_net, image())
    texts = {
        "other": "its weight is not PyTorch's: they differ by 0.5",
        "transposed": "its weight is PyTorch's transposed",
        "reordered": "its weight has PyTorch's numbers in another order: a flatten, a flip, or heads or gates",
    }
    assert report.first is not None
    assert (report.first.path, report.reason) == ("fc2", texts[change])


def test_images_in_either_layout(torch_net: Any, file: Path):
    model, result = loaded(file)
    x = image()
    last = x.permute(0, 2, 3, 1)
    for given in (x, x.numpy(), jnp.asarray(x.numpy()), last, last.numpy(), x.double().numpy()):
        assert lm.parity(model, torch_net, given, result).agrees
    assert lm.parity(model, torch_net, x, result, model_inputs=jnp.asarray(last.numpy())).agrees
    assert lm.parity(model, torch_net, (x,), result).agrees
    assert lm.parity(model, torch_net, {"x": x}, result).agrees


def test_a_square_image_is_in_pytorch_s_layout():
    class Both(nnx.Module):
        def __init__(self) -> None:
            self.conv = lm.LazyConv(8, (3, 3), rngs=R(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.conv(x)

    model, net, conv = Both(), nn.Sequential(), nn.Conv2d(8, 8, 3, padding=1)
    net.conv = conv
    lm.load_state_dict(model, {"conv.kernel": conv.weight.detach().numpy().transpose(2, 3, 1, 0),
                               "conv.bias": conv.bias.detach().numpy()})  # fmt: skip
    assert lm.parity(model, net, torch.randn(2, 8, 8, 8)).agrees


def test_what_is_no_port_is_refused(torch_net: Any):
    with pytest.raises(TypeError, match=r"got:    Net\n  needed: a torch\.nn\.Module"):
        lm.parity(Net(), Net(), image())
    with pytest.raises(lm.UninitializedError) as caught:
        lm.parity(Net(), torch_net, image())
    assert str(caught.value).endswith("""\
norm.scale
  got:    no value yet
  needed: a value: only an initialized model can be compared
  write:  lm.load(model, torch_module, layout='torch')  # before lm.parity""")


def test_an_error_of_the_model_is_its_own(torch_net: Any, file: Path):
    model, result = loaded(file)
    before = contents(model)
    with pytest.raises((TypeError, ValueError)):
        lm.parity(model, torch_net, image(), result, model_inputs=jnp.ones((2, 8, 8, 5)))
    assert_unchanged(model, before)
    with pytest.raises(RuntimeError, match="channels"):
        lm.parity(model, torch_net, torch.ones(2, 5, 8, 8), result)
    assert lm.parity(model, torch_net, image(), result).agrees
    assert not torch_net.conv._forward_hooks
    assert not torch_net.conv._forward_pre_hooks
