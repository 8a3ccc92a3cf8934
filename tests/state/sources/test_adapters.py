"""PEFT's adapters and what ``adapter_config.json`` beside them says: the rank, ``lora_alpha``, a model of one's own."""

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

R = nnx.Rngs
RANDOM = np.random.default_rng(0)
ARRAYS = {
    "q.lora_A.weight": RANDOM.normal(size=(2, 3)).astype(np.float32),
    "q.lora_B.weight": RANDOM.normal(size=(4, 2)).astype(np.float32),
    "q.base_layer.weight": RANDOM.normal(size=(4, 3)).astype(np.float32),
}


class Own(nnx.Module):
    """A layer as PEFT has it, with a factor of its own."""

    scaling: float

    def __init__(self, **said: float):
        self.base_layer, self.lora_A, self.lora_B = (lm.LazyLinear(n, use_bias=False, rngs=R(0)) for n in (4, 2, 4))
        for name, value in said.items():
            setattr(self, name, value)

    def __call__(self, x: Any) -> Any:
        return self.base_layer(x) + self.scaling * self.lora_B(self.lora_A(x))


def model() -> Any:
    return nnx.Dict(q=lm.LazyLoRALinear(4, lora_rank=2, use_bias=False, rngs=R(0)))


def folder(path: Path, config: dict[str, Any] | None) -> Path:
    lm.save(ARRAYS, path / "adapter_model.safetensors")
    if config is not None:
        (path / "adapter_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "factor", "text"),
    [
        ({"r": 2, "lora_alpha": 0}, 0, "lora_B is scaled by lora_alpha / r, 0"),
        ({"r": 2, "lora_alpha": 3}, 1.5, "lora_B is scaled by lora_alpha / r, 1.5"),
        ({"r": 2, "lora_alpha": -1}, -0.5, "lora_alpha / r, -0.5"),
        ({"r": 2, "lora_alpha": 7, "use_rslora": True}, 7 / np.sqrt(2), r"lora_alpha / sqrt\(r\), 4.94975"),
        ({"r": 2, "lora_alpha": 2}, 1, "matched successfully>$"),
    ],
)
def test_the_factor_and_the_way_back(tmp_path: Path, config: dict[str, Any], factor: float, text: str) -> None:
    ours = model()
    path = folder(tmp_path, config)
    result = lm.load(ours, path, layout="torch")
    assert re.search(text, repr(result))
    np.testing.assert_allclose(ours.q.lora.lora_b[...], ARRAYS["q.lora_B.weight"].T * np.float32(factor), rtol=1e-6)
    out = lm.export_torch(ours, like=result)
    for name, value in ARRAYS.items():
        np.testing.assert_array_equal(out[name], value)  # bit for bit, also where a quotient would be rounded
    ours.q.lora.lora_b[0, 0] += 1
    if not factor:
        with pytest.raises(lm.StateDictError, match="zeros: lora_alpha is 0 in the file"):
            lm.export_torch(ours, like=result)
        return
    moved = lm.export_torch(ours, like=result)["q.lora_B.weight"] - ARRAYS["q.lora_B.weight"]
    assert abs(moved[0, 0] - 1 / factor) < 1e-6 and np.count_nonzero(moved) == 1


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"r": 8, "lora_alpha": 8}, r"r=8, and q\.lora_A\.weight of shape \(2, 3\) in the file, of rank 2"),
        ({"r": 2}, "r=2, lora_alpha=None"),
        ({"r": 2, "lora_alpha": True}, "lora_alpha=True"),
        ({"lora_alpha": 4}, "r=None"),
    ],
)
def test_a_configuration_of_another_adapter(tmp_path: Path, config: dict[str, Any], text: str) -> None:
    with pytest.raises(lm.CheckpointError, match=text):
        lm.load(model(), folder(tmp_path, config), layout="torch")


X = RANDOM.normal(size=(5, 3)).astype(np.float32)


@pytest.mark.parametrize("config", [{"r": 2, "lora_alpha": 6}, None])
def test_a_layer_of_one_s_own_that_scales(tmp_path: Path, config: dict[str, Any] | None) -> None:
    """It is not scaled once more."""
    ours = nnx.Dict(q=Own(lora_alpha=6, scaling=3.0))
    result = lm.load(ours, folder(tmp_path, config), layout="torch")
    assert "scaled" not in repr(result)
    a, b, base = ARRAYS.values()
    np.testing.assert_allclose(ours.q(jnp.asarray(X)), X @ base.T + 3 * (X @ a.T) @ b.T, rtol=1e-4, atol=1e-5)
    out = lm.export_torch(ours, like=result)
    assert all(np.array_equal(out[name], value) for name, value in ARRAYS.items())


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"lora_alpha": 8, "scaling": 3.0}, "lora_alpha=6, where q of the model has lora_alpha=8[^$]*lora_alpha=6"),
        ({"scaling": 2.0}, "q of the model has scaling=2[^$]*write:  scaling=3  # for q"),
        ({"rank": 4, "scaling": 3.0}, "q of the model has rank=4"),
    ],
)
def test_a_layer_that_says_something_else(tmp_path: Path, said: dict[str, float], text: str) -> None:
    with pytest.raises(lm.CheckpointError, match=text):
        lm.load(nnx.Dict(q=Own(**said)), folder(tmp_path, {"r": 2, "lora_alpha": 6}), layout="torch")


def test_a_layer_that_the_file_does_not_name_may_have_another_rank(tmp_path: Path) -> None:
    other = lm.LazyLoRALinear(4, lora_rank=3, use_bias=False, rngs=R(0))
    ours = nnx.Dict(q=model().q, k=other)
    lm.load(ours, folder(tmp_path, {"r": 2, "lora_alpha": 4}), layout="torch", missing="^k[.]")
    np.testing.assert_array_equal(ours.q.lora.lora_b[...], 2 * ARRAYS["q.lora_B.weight"].T)
    with pytest.raises(lm.StateDictError, match=r"got:    f32\[2,4\]\n  needed: shape \(3, 4\)"):
        lm.load(nnx.Dict(q=other), folder(tmp_path, {"r": 2, "lora_alpha": 4}), layout="torch")


def test_one_layer_scales_and_another_does_not(tmp_path: Path) -> None:
    ours = nnx.Dict(q=Own(scaling=3.0), inner=nnx.Dict(q=Own()))
    with pytest.raises(lm.CheckpointError, match=r"q of the model has one of its own, and inner\.q has none"):
        lm.load(ours, folder(tmp_path, {"r": 2, "lora_alpha": 6}), layout="torch")
