"""``dtype=`` of a load: what parameters get, and that layers compute in it as those that were made with it."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers import spec
from safetensors.numpy import save_file

import lazymods as lm

BF16 = np.dtype(ml_dtypes.bfloat16)


class Net(nnx.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        def rngs() -> nnx.Rngs:
            return nnx.Rngs(0)

        is_lazy = kind is lm
        prefix, known = ("Lazy" if is_lazy else ""), (() if is_lazy else (4,))

        def make(name: str, *args: Any, **more: Any) -> Any:
            return getattr(kind, prefix + name)(*args, **more, **options, rngs=rngs())

        self.embed = make("Embed", 5, 4)
        self.fc = make("Linear", *known, 4)
        self.attention = make("MultiHeadAttention", 2, *known, decode=False)
        self.norm = make("LayerNorm", *known)
        self.rnn = nnx.RNN(make("LSTMCell", *known, 4))
        self.bn = make("BatchNorm", *known)

    def __call__(self, ids: Any) -> Any:
        return self.rnn(self.attention(self.norm(self.fc(self.embed(ids)))))


def saved(folder: Path) -> Path:
    lm.save(Net(nnx), folder / "m.safetensors")
    return folder / "m.safetensors"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, "bfloat16", BF16, jnp.float16])
def test_layers_follow_as_those_made_with_param_dtype(tmp_path: Path, dtype: Any) -> None:
    explicit = Net(nnx, param_dtype=getattr(jnp, np.dtype(dtype).name))
    setattr(explicit.rnn.cell, "param_dtype", jnp.float32)  # noqa: B010  that of the carry, which float32 inputs need
    for kind in (lm, nnx):
        model = Net(kind)
        lm.load(model, saved(tmp_path), dtype=dtype)
        assert nnx.graphdef(model) == nnx.graphdef(explicit)
        ids = jnp.array([[0, 3, 2]])
        assert model.embed(ids).dtype == np.dtype(dtype)
        with jax.numpy_dtype_promotion("standard"):  # norms compute in float32
            assert model(ids).dtype == explicit(ids).dtype
            assert model.attention(model.norm(model.fc(model.embed(ids)))).dtype == np.dtype(dtype)


@pytest.mark.slow
def test_materialize_does_the_same() -> None:
    model = Net(lm)
    with jax.numpy_dtype_promotion("standard"):
        report = lm.materialize(model, spec(2, 3, dtype=jnp.int32), dtype=jnp.bfloat16)
        assert report.rows[0].output.dtype == jnp.bfloat16
        assert (lm.is_lazy(model.bn), model.bn.param_dtype) == (True, jnp.float32)  # not reached
        lm.materialize(model.bn, spec(2, 4), dtype=jnp.bfloat16)
    explicit = Net(nnx, param_dtype=jnp.bfloat16)
    setattr(explicit.rnn.cell, "param_dtype", jnp.float32)  # noqa: B010
    assert nnx.graphdef(model) == nnx.graphdef(explicit)


def test_a_dtype_that_was_asked_for_stays(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"e.embedding": np.ones((5, 4), np.float32), "f.embedding": np.ones((5, 4), np.float32)}, path)
    for make in (lm.LazyEmbed, nnx.Embed):
        model = nnx.Dict(
            e=make(5, 4, dtype=jnp.float32, rngs=nnx.Rngs(0)), f=make(5, 4, dtype=jnp.float16, rngs=nnx.Rngs(0))
        )
        lm.load(model, path, dtype=jnp.bfloat16)
        assert [layer(jnp.zeros(1, int)).dtype for layer in (model["e"], model["f"])] == [jnp.float32, jnp.float16]
        assert model["e"].embedding.dtype == jnp.bfloat16


def test_layers_that_are_left_out_keep_theirs(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a.kernel": np.ones((2, 3), np.float32)}, path)
    model = nnx.Dict({n: nnx.Linear(2, 3, use_bias=n == "c", rngs=nnx.Rngs(0)) for n in "abc"})
    lm.load(model, path, dtype=jnp.bfloat16, strict=False)
    assert [model[n].param_dtype for n in "abc"] == [jnp.bfloat16, jnp.float32, jnp.float32]


def test_a_load_that_fails_leaves_the_dtypes(tmp_path: Path) -> None:
    model = Net(nnx)
    before = nnx.graphdef(model)
    lm.register_load_state_dict_post_hook(model, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lm.load(model, saved(tmp_path), dtype=jnp.bfloat16)
    assert (model.embed.param_dtype, model.embed.dtype) == (jnp.float32, jnp.float32)
    assert before != nnx.graphdef(model)  # for the hook


# ---------------------------------------------------------------- the file's own


def mixed(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    tensors = {
        "fc.weight": rng.standard_normal((4, 3)).astype(BF16),
        "fc.bias": rng.standard_normal(4).astype(np.float16),
        "norm.weight": rng.standard_normal(4).astype(np.float32),
        "norm.bias": rng.standard_normal(4),
        "bn.weight": np.ones(4, BF16),
        "bn.bias": np.arange(4),
        "bn.running_mean": rng.standard_normal(4).astype(BF16),
        "bn.running_var": np.ones(4, np.float32),
    }
    save_file(tensors, folder / "m.safetensors")
    return folder / "m.safetensors"


@pytest.mark.parametrize("lazy", [True, False])
def test_each_parameter_gets_the_dtype_of_its_entry(tmp_path: Path, lazy: bool) -> None:
    rngs = nnx.Rngs(0)
    model = nnx.Dict(
        fc=lm.LazyLinear(4, rngs=rngs) if lazy else nnx.Linear(3, 4, rngs=rngs),
        norm=lm.LazyLayerNorm(rngs=rngs) if lazy else nnx.LayerNorm(4, rngs=rngs),
        bn=lm.LazyBatchNorm(rngs=rngs) if lazy else nnx.BatchNorm(4, rngs=rngs),
    )
    lm.load(model, mixed(tmp_path), layout="torch", dtype="file")
    assert {name: str(value.dtype) for name, value in lm.state_dict(model).items()} == {
        "fc.kernel": "bfloat16",
        "fc.bias": "float16",
        "norm.scale": "float32",
        "norm.bias": "float32",  # JAX has no 64 bits here
        "bn.scale": "bfloat16",
        "bn.bias": "float32",  # whole numbers are no dtype for a parameter of floats
        "bn.mean": "float32",  # statistics keep theirs
        "bn.var": "float32",
    }


def test_half_precision_is_mapped_and_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "half.safetensors"
    lm.save(nnx.Dict(e=nnx.Embed(64, 32, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))), path)
    model = nnx.Dict(e=lm.LazyEmbed(rngs=nnx.Rngs(0)))
    lm.load(model, path, dtype="file")
    assert model["e"].embedding.dtype == jnp.bfloat16 == model["e"](jnp.zeros(1, int)).dtype
    assert model["e"].param_dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["keep", "int8", jnp.int32])
def test_what_is_no_dtype_of_floats_is_refused(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        lm.load(nnx.Dict(), mixed(tmp_path), dtype=dtype)
