"""``load``: what it takes, what it says, and what it leaves alone. Formats and layouts have tests of their own."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits, assert_same_model, lazy_mlp, plain_mlp
from safetensors.numpy import save_file

import lazymods as lm
from lazymods._memory import Incoming, empty, transfer


def saved(folder: Path, model: Any = None) -> Path:
    lm.save(plain_mlp() if model is None else model, folder / "m.safetensors")
    return folder / "m.safetensors"


def write(folder: Path, **tensors: Any) -> Path:
    save_file(tensors, folder / "w.safetensors")
    return folder / "w.safetensors"


# ---------------------------------------------------------------- the same as explicit


def test_a_loaded_model_is_the_explicit_one(tmp_path: Path) -> None:
    model = lazy_mlp()
    assert lm.load(model, saved(tmp_path)) == ([], [], [])
    assert_same_model(model, plain_mlp())


def test_nothing_is_traced_initialized_or_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("called")

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.fc = lm.LazyLinear(4, kernel_init=never, bias_init=never, rngs=nnx.Rngs(0))

        __call__ = never

    model = Net()
    path = write(tmp_path, **{"fc.kernel": np.ones((3, 4), np.float32), "fc.bias": np.ones(4, np.float32)})
    monkeypatch.setattr(jax, "jit", never)
    lm.load(model, path)
    assert type(model.fc) is nnx.Linear


def test_a_model_that_eval_shape_made(tmp_path: Path) -> None:
    for make in (plain_mlp, lazy_mlp):
        model = nnx.eval_shape(make)
        lm.load(model, saved(tmp_path))
        assert_same_model(model, plain_mlp())


def test_an_optimizer_goes_on_with_the_loaded_values(tmp_path: Path) -> None:
    model = plain_mlp()
    kernel = model.fc1.kernel
    path = saved(tmp_path, jax.tree.map(lambda v: v + 1, plain_mlp()))
    lm.load(model, path)
    assert model.fc1.kernel is kernel
    assert_same_bits(kernel[...], plain_mlp().fc1.kernel[...] + 1)


# ---------------------------------------------------------------- memory


def test_aligned_tensors_are_the_mapped_file(tmp_path: Path) -> None:
    layer = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    path = saved(tmp_path, layer)
    lazy = lm.LazyLinear(64, rngs=nnx.Rngs(1))
    lm.load(lazy, path)
    if jax.default_backend() == "cpu":
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
        spans = [tuple(int(x, 16) for x in m[0].split("-")) for m in maps]
        pointer = lazy.kernel[...].unsafe_buffer_pointer()
        assert any(begin <= pointer < end for begin, end in spans)
    assert_same_bits(lazy.kernel[...], layer.kernel[...])


def test_a_users_array_is_never_taken_over() -> None:
    given = empty((16, 16), np.dtype(np.float32))  # aligned, so that JAX could
    given[...] = 1
    layer = lm.LazyLinear(16, use_bias=False, rngs=nnx.Rngs(0))
    lm.load_state_dict(layer, {"kernel": given})
    given[...] = 2
    np.testing.assert_array_equal(np.asarray(layer.kernel[...]), 1)


@pytest.mark.parametrize("offset", [0, 1, 4, 63])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (1500, 1000), (3, 700_000)])
def test_transfer(offset: int, shape: tuple[int, ...]) -> None:
    """Any alignment, order and size arrives, cast, wherever the copy is cut."""
    count = int(np.prod(shape))
    raw = np.zeros(count * 4 + 64, np.uint8)
    value = np.ndarray(shape, np.float32, raw[offset:].data)
    value[...] = np.random.default_rng(0).standard_normal(shape)
    copied: list[int] = []
    out = transfer(
        [Incoming(value, np.dtype(d), None, True) for d in (np.float32, ml_dtypes.bfloat16)]
        + [Incoming(value.T, np.dtype(np.float32), jax.sharding.SingleDeviceSharding(jax.devices()[0]), False)],
        copied.append,
    )
    assert_same_bits(out[0], value)
    assert_same_bits(out[1], value.astype(ml_dtypes.bfloat16))
    assert_same_bits(out[2], np.ascontiguousarray(value.T).reshape(value.T.shape))
    assert sum(copied) >= value.nbytes


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "options, text",
    [
        ({"layout": "keras"}, "'keras'"),
        ({"mismatched": "drop"}, "'drop'"),
        ({"flatten": {"fc": (1, 2, 3)}}, 'layout="torch"'),
        ({"dtype": jnp.int8}, "int8"),
    ],
)
def test_arguments_that_are_none(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        lm.load(lazy_mlp(), saved(tmp_path), **options)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors"):
        lm.load(lazy_mlp(), tmp_path / "none.safetensors")


def test_dtype_is_for_floats_that_are_loaded(tmp_path: Path) -> None:
    model = nnx.Dict(a=nnx.Param(jnp.ones(2)), n=nnx.Variable(jnp.arange(2)), fc=lm.LazyLinear(2, rngs=nnx.Rngs(0)))
    path = write(
        tmp_path, a=np.ones(2, np.float32), n=np.arange(2), **{"fc.kernel": np.ones((3, 2)), "fc.bias": np.ones(2)}
    )
    lm.load(model, path, dtype="bfloat16")
    assert [v.dtype for v in lm.state_dict(model).values()] == [jnp.bfloat16, jnp.int32, jnp.bfloat16, jnp.bfloat16]


def test_problems_name_the_file_and_both_shapes(tmp_path: Path) -> None:
    path = write(tmp_path, kernel=np.ones((3, 5), np.float32), extra=np.ones(1, np.float32))
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(lm.LazyLinear(4, rngs=nnx.Rngs(0)), path)
    assert str(caught.value) == (
        f"the checkpoint {path} does not fit LazyLinear; nothing was loaded\n"
        "bias\n"
        f"  got:    no entry in the checkpoint {path}\n"
        "  needed: an entry for each parameter of the model\n"
        "  write:  lm.load_state_dict(model, lm.state_dict(other))  # or a checkpoint, of a model like this one\n"
        "extra\n"
        "  got:    f32[1], an entry that the model has no parameter for\n"
        "  needed: only entries of the model\n"
        '  write:  ignore=r"^extra$"  # leaves it out\n'
        "kernel (UninitializedParameter)\n"
        "  got:    f32[3,5]\n"
        "  needed: shape (?, 4), without broadcasting\n"
        '  write:  mismatched="skip"  # leaves it out'
    )


def test_booleans_are_zeros_and_ones(tmp_path: Path) -> None:
    path = write(tmp_path, mask=np.array([True, False]))
    raw = path.read_bytes()
    path.write_bytes(raw[:-2] + b"\x02\x00")
    model = nnx.Dict(mask=nnx.Variable(jnp.zeros(2, bool)))
    with pytest.raises(lm.CheckpointError, match=r"w\.safetensors: mask\n  got:    bytes other than 0 and 1"):
        lm.load(model, path)
    np.testing.assert_array_equal(np.asarray(model.mask[...]), False)


def test_hooks_see_arrays_and_may_rename(tmp_path: Path) -> None:
    layer = lm.LazyLinear(4, rngs=nnx.Rngs(0))

    def rename(module: Any, sd: dict[str, Any], prefix: str, *rest: Any) -> None:
        sd[f"{prefix}kernel"] = sd.pop(f"{prefix}w") * 2

    lm.register_load_state_dict_pre_hook(layer, rename)
    lm.load(layer, write(tmp_path, w=np.ones((3, 4), np.float32), bias=np.ones(4, np.float32)))
    np.testing.assert_array_equal(np.asarray(layer.kernel[...]), 2)


# ---------------------------------------------------------------- quantized weights, progress


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, ml_dtypes.float8_e4m3fn])
def test_quantized_weights_without_scales_are_warned_of(tmp_path: Path, dtype: Any) -> None:
    path = write(tmp_path, kernel=np.ones((3, 4), dtype), bias=np.ones(4, np.float32))
    with pytest.warns(UserWarning, match=r"w\.safetensors: kernel hold numbers of 8 bits"):
        lm.load(lm.LazyLinear(4, rngs=nnx.Rngs(0)), path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.load(nnx.Dict(kernel=nnx.Param(jnp.zeros((3, 4), dtype))), path, strict=False)


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn, ml_dtypes.int4])
def test_scales_that_are_left_over_are_warned_of(tmp_path: Path, dtype: Any) -> None:
    """Also where the model holds the narrow numbers themselves, and with strict=False."""
    path = tmp_path / "w.npz"  # which holds 4 bits as well
    held = nnx.Dict(fc=nnx.Dict(kernel=nnx.Param(jnp.ones((3, 4), dtype)), scale=nnx.Param(jnp.ones(4))))
    lm.save(held, path)
    narrow = nnx.Dict(fc=nnx.Dict(kernel=nnx.Param(jnp.zeros((3, 4), dtype))))
    with pytest.warns(UserWarning, match=r"fc\.kernel hold numbers .* without scales; the file has fc\.scale"):
        assert lm.load(narrow, path, strict=False).unexpected == ["fc.scale"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.load(held, path)


@pytest.mark.parametrize("progress, shown", [(True, True), (False, False), (None, False)])
def test_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str], progress: bool | None, shown: bool) -> None:
    lm.load(lazy_mlp(), saved(tmp_path), progress=progress)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("loading m.safetensors" in err) == shown


# ---------------------------------------------------------------- Orbax in the background


def test_a_save_in_the_background_has_the_values_of_its_beginning(tmp_path: Path) -> None:
    model = plain_mlp()
    want = {name: np.array(value) for name, value in lm.state_dict(model).items()}
    pending = lm.save(model, tmp_path / "folder", wait=False)
    assert pending is not None
    model.fc1.kernel[...] = model.fc1.kernel[...] * 0
    pending.wait()
    assert pending.done
    fresh = lazy_mlp()
    lm.load(fresh, tmp_path / "folder")
    for name, value in lm.state_dict(fresh).items():
        assert_same_bits(value, want[name])
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


SAVES_AND_ENDS = """
import sys, jax.numpy as jnp, lazymods as lm
from flax import nnx
lm.save(nnx.Dict(a=nnx.Param(jnp.ones((64, 64)))), sys.argv[1], wait=False)
"""


@pytest.mark.slow
def test_the_interpreter_does_not_end_before_the_folder_is_complete(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SAVES_AND_ENDS, str(tmp_path / "folder")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    model = nnx.Dict(a=nnx.Param(jnp.zeros((64, 64))))
    lm.load(model, tmp_path / "folder")
    np.testing.assert_array_equal(np.asarray(model.a[...]), 1.0)


def test_an_orbax_folder_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    for i in range(2):
        lm.save(nnx.Dict(a=nnx.Param(jnp.full(3, float(i)))), tmp_path / "folder")
    model = nnx.Dict(a=nnx.Param(jnp.zeros(3)))
    lm.load(model, tmp_path / "folder")
    np.testing.assert_array_equal(np.asarray(model.a[...]), 1.0)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_waiting_is_for_orbax(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wait=False"):
        lm.save(plain_mlp(), tmp_path / "m.npz", wait=False)


def test_orbax_holds_no_empty_arrays(tmp_path: Path) -> None:
    with pytest.raises(lm.CheckpointError, match=r"folder: a\n  got:    an array of shape \(0, 3\)"):
        lm.save(nnx.Dict(a=nnx.Param(jnp.zeros((0, 3)))), tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []
