"""The gallery, ``examples/ports``: each loads a checkpoint and gives PyTorch's logits; two of them generate text."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import import_file

import lazymods as lm

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "ports"
DATA = ROOT / "tests" / "data" / "hf"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
PORTS = ("bert", "gpt2", "llama", "whisper")
CHECKPOINTS = {name: name for name in PORTS} | {"qwen2": "llama", "vit_hf": "vit"}


@pytest.fixture(autouse=True)
def as_users_have_it() -> Iterator[None]:
    """Ranks and dtypes are promoted as JAX does by default."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def example(name: str) -> ModuleType:
    """Import a port, which is no part of a package."""
    return import_file(FOLDER / f"{name}.py")


def io(name: str) -> dict[str, np.ndarray]:
    """The inputs, and PyTorch's output as ``out``."""
    with np.load(DATA / f"{name}.io.npz") as file:
        return dict(file)


def test_every_port_is_tested_and_short() -> None:
    assert set(NAMES) == {*CHECKPOINTS.values(), "resnet"}
    assert {name: n for name in NAMES if (n := len((FOLDER / f"{name}.py").read_text().splitlines())) > 110} == {}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_pytorch_s(name: str) -> None:
    given = io(name)
    model = example(CHECKPOINTS[name]).load(str(DATA / name))
    assert not lm.has_uninitialized_params(model)
    inputs = [jnp.asarray(np.moveaxis(x, 1, -1) if x.dtype == np.float32 else x.astype("i4"))
              for key, x in given.items() if key != "out"]  # fmt: skip
    got: Any = lm.jit(model)(*inputs)
    got = got[0] if isinstance(got, tuple) else got  # the cache comes second
    assert abs(np.asarray(got) - given["out"]).max() < 1e-5 * max(1, abs(given["out"]).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2"])
def test_text_goes_on_as_without_a_cache(name: str) -> None:
    port = example(CHECKPOINTS[name])
    model = port.load(str(DATA / name))
    ids = jnp.asarray(io(name)["ids"].astype("i4"))
    text = port.generate(model, ids, 6)
    assert text.shape == (2, 17)
    np.testing.assert_array_equal(text[:, :11], ids)
    logits, _ = lm.jit(model)(text)
    np.testing.assert_array_equal(logits[:, 10:-1].argmax(-1), text[:, 11:])
    assert len(np.unique(np.asarray(text[:, 11:]))) > 2  # it does not stand still
    assert port.step.cache_info().currsize == 2  # a program for the prompt, and one for all other positions


@pytest.fixture(scope="module")
def resnets(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """PyTorch's, its port, and an input."""
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")
    from torch_resnet import make

    net: Any = make()
    path = tmp_path_factory.mktemp("resnet") / "resnet18.pth"
    torch.save(net.state_dict(), path)
    model = example("resnet").load(str(path), width=8, classes=7)
    return net, model, torch.randn(2, 3, 64, 64)


@pytest.mark.slow
def test_resnet(resnets: Any) -> None:
    net, model, x = resnets
    want = net(x).detach().numpy()
    got: Any = lm.jit(model)(jnp.asarray(x.permute(0, 2, 3, 1).numpy()))
    np.testing.assert_allclose(got, want, atol=1e-5 * abs(want).max())


@pytest.mark.slow
def test_resnet_layer_by_layer(resnets: Any) -> None:
    net, model, x = resnets
    report = lm.parity(model, net, x)
    assert report.agrees
    assert len(report.rows) == 20 + 20 + 1 + 1  # convolutions, their norms, the head; the output
    assert report.notes == ()
