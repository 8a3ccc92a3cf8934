"""What people write first, and wrongly: each error names the cause and a line that can be pasted."""

# pyright: reportCallIssue=false, reportArgumentType=false

import ast
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_errors_text import MESSAGES

import lazymods as lm

X = jnp.ones((2, 3))
SPEC = jax.ShapeDtypeStruct((2, 3), jnp.float32)


def model() -> nnx.Module:
    return nnx.Sequential(lm.LazyLinear(4, rngs=nnx.Rngs(0)))


class Scale(nnx.Module):
    def __init__(self, width: int, factor: float, *, rngs: nnx.Rngs) -> None:
        self.gain = nnx.Param(jnp.full(width, factor))

    def __call__(self, x: jax.Array, y: jax.Array | None = None, *, mask: jax.Array) -> jax.Array:
        return x * self.gain[...][None] * mask


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.fc = lm.LazyLinear(4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x)


class NoCall(nnx.Module):
    def __init__(self, width: int) -> None:
        self.width = width


CASES: dict[str, tuple[Callable[[], Any], type[Exception], str, str]] = {
    "in_features": (
        lambda: lm.LazyLinear(784, 10, rngs=nnx.Rngs(0)), lm.ConfigurationError,
        "no in_features: it is inferred from the first input", "lm.LazyLinear(10, rngs=nnx.Rngs(0))",
    ),
    "in_features by name": (
        lambda: lm.LazyLinear(in_features=784, out_features=10, rngs=nnx.Rngs(0)), lm.ConfigurationError,
        "no in_features: it is inferred", "lm.LazyLinear(10, rngs=nnx.Rngs(0))",
    ),
    "channels of a convolution": (
        lambda: lm.LazyConv(3, 16, (3, 3), padding="VALID", rngs=nnx.Rngs(0)), lm.ConfigurationError,
        "no in_features", "lm.LazyConv(16, (3, 3), padding='VALID', rngs=nnx.Rngs(0))",
    ),
    "bias=": (
        lambda: lm.LazyLinear(10, bias=False, rngs=nnx.Rngs(0)), lm.ConfigurationError,
        "use_bias= in place of bias=", "lm.LazyLinear(10, use_bias=False, rngs=nnx.Rngs(0))",
    ),
    "a typing error": (
        lambda: lm.LazyLinear(10, use_bais=False, rngs=nnx.Rngs(0)), lm.ConfigurationError,
        "use_bias= in place of use_bais=", "lm.LazyLinear(10, use_bias=False, rngs=nnx.Rngs(0))",
    ),
    "no rngs": (
        lambda: lm.LazyLinear(10), lm.ConfigurationError, "rngs is required", "lm.LazyLinear(10, rngs=nnx.Rngs(0))",
    ),
    "a name like no other": (
        lambda: lm.LazyLinear(10, zzz=1, rngs=nnx.Rngs(0)), lm.ConfigurationError,
        "unexpected keyword argument 'zzz'", "lm.LazyLinear(10, rngs=nnx.Rngs(0))",
    ),
    "infer of nothing": (
        lambda: lm.lazy(nnx.Linear, infer=lambda: {}), lm.ConfigurationError,
        "Linear.__call__ requires inputs", "def infer(config, inputs, *args, **kwargs): return {...}",
    ),
    "infer without config": (
        lambda: lm.lazy(nnx.Linear, infer=lambda x: {"in_features": x.shape[-1]}), lm.ConfigurationError,
        "infer(x)", "def infer(config, inputs, *args, **kwargs): return {...}",
    ),
    "materialize without an input": (
        lambda: lm.materialize(model()), lm.ShapeInferenceError, "the arguments of a call",
        "lm.materialize(model, jax.ShapeDtypeStruct(x.shape, x.dtype))  # x: what the model is called with",
    ),
    **{
        f"{f.__name__}, swapped": (
            lambda f=f: f(SPEC, model()), lm.ArgumentError,
            "f32[2,3], then Sequential\n  needed: the model first", "lm.materialize(model, x)",
        )
        for f in (lm.materialize, lm.infer_shapes, lm.summary)
    },
    "materialize with a shape": (
        lambda: lm.materialize(model(), (2, 3)), lm.ShapeInferenceError, "an array as the first argument",
        "jax.ShapeDtypeStruct((2, 3), jnp.float32)  # in its place",
    ),
    "materialize without an input of a model of one's own": (
        lambda: lm.materialize(Block(rngs=nnx.Rngs(0))), lm.ShapeInferenceError, "the arguments of a call",
        "lm.materialize(model, jax.ShapeDtypeStruct(x.shape, x.dtype))  # or model(x), first",
    ),
    "a class": (
        lambda: lm.materialize(Block, X), lm.ArgumentError, "the class Block",
        "model = Block(..., rngs=nnx.Rngs(0))",
    ),
    **{
        f"PyTorch's names, {f.__name__}": (
            lambda f=f: f(Block(rngs=nnx.Rngs(0)), {"fc.weight": np.ones((4, 3), np.float32)}), lm.StateDictError,
            "cause:  PyTorch's names, such as fc.weight",
            'lm.load(model, source, layout="torch")  # if PyTorch wrote it',
        )
        for f in (lm.load, lm.load_state_dict)
    },
    "a suffix that nothing writes": (
        lambda: lm.save(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "m.h5"), lm.ArgumentError, "ends with .safetensors or .npz",
        f"lm.save(model, {os.path.realpath('m.safetensors')!r})",
    ),
    **{
        f"a path for the model, {f.__name__}": (
            lambda f=f: f("m.safetensors", model()), lm.ArgumentError,
            "'m.safetensors'\n  needed: the model first, then the path", "lm.load(model, path)  # or lm.save",
        )
        for f in (lm.load, lm.save)
    },
    **{
        f"a class, {f.__name__}": (
            lambda f=f: f(Block), lm.ArgumentError, "the class Block", "model = Block(..., rngs=nnx.Rngs(0))",
        )
        for f in (lm.has_uninitialized_params, lm.uninitialized_paths, lm.state_dict)
    },
    **{
        f"a class, {f.__name__}": (
            lambda f=f: f(Block, "m.safetensors"), lm.ArgumentError, "the class Block",
            "model = Block(..., rngs=nnx.Rngs(0))",
        )
        for f in (lm.load, lm.save)
    },
    "no path": (
        lambda: lm.save(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), None), lm.ArgumentError, "the path\n  got:    None",
        "path = 'model.safetensors'",
    ),
    "no file": (
        lambda: lm.load(model(), "there_is_none.safetensors"), lm.MissingFileError, "no checkpoint at this path",
        "lm.load(model, 'model.safetensors')",
    ),
    "a path for a state dict": (
        lambda: lm.load_state_dict(model(), "m.safetensors"), lm.ArgumentError, "a mapping from names to arrays",
        "lm.load(model, 'm.safetensors')",
    ),
    "a state dict, then the model": (
        lambda: lm.load_state_dict({"fc.kernel": X}, Block(rngs=nnx.Rngs(0))), lm.ArgumentError,
        "Block\n  needed: the model first, then the state dict", "lm.load_state_dict(model, state_dict)",
    ),
    **{
        f"an optimizer of {name}": (
            lambda tx=tx: lm.LazyOptimizer(model(), tx, wrt=nnx.Param), lm.ArgumentError,
            "the model, then an optax transformation", "lm.LazyOptimizer(model, optax.adam(1e-3), wrt=nnx.Param)",
        )
        for name, tx in {"a rate": 1e-3, "a function": optax.adam}.items()
    },
    "an optimizer, then the model": (
        lambda: lm.LazyOptimizer(optax.adam(1e-3), model(), wrt=nnx.Param), lm.ArgumentError,
        "Sequential\n  needed: the model, then an optax transformation",
        "lm.LazyOptimizer(model, optax.adam(1e-3), wrt=nnx.Param)",
    ),
    **{
        f"parameters in {dtype}": (
            lambda dtype=dtype: lm.materialize(model(), X, dtype=dtype), lm.ArgumentError, "a floating-point dtype",
            "dtype=jnp.bfloat16",
        )
        for dtype in ("fp16", "int32")
    },
    "an axis that the input lacks": (
        lambda: lm.LazyLinearGeneral(4, axis=(1,), rngs=nnx.Rngs(0))(jnp.ones(3)), lm.ShapeInferenceError,
        "an array of at least 2 axes, whose axis 1 holds the features", "layer(x)",
    ),
    "PyTorch's dilation": (
        lambda: lm.LazyConv2d(16, (3, 3), dilation=2, rngs=nnx.Rngs(0)), lm.ConfigurationError,
        "kernel_dilation= in place of dilation=", "lm.LazyConv2d(16, (3, 3), kernel_dilation=2, rngs=nnx.Rngs(0))",
    ),
    "PyTorch's groups": (
        lambda: lm.LazyConv(16, (3, 3), groups=2, rngs=nnx.Rngs(0)), lm.ConfigurationError,
        "feature_group_count= in place of groups=",
        "lm.LazyConv(16, (3, 3), feature_group_count=2, rngs=nnx.Rngs(0))",
    ),
    "PyTorch's channels": (
        lambda: lm.LazyConv2d(in_channels=3, out_channels=16, kernel_size=(3, 3), rngs=nnx.Rngs(0)),
        lm.ConfigurationError, "no in_channels: it is inferred from the first input; out_features= in place of",
        "lm.LazyConv2d(16, (3, 3), rngs=nnx.Rngs(0))",
    ),
    "rngs by position": (
        lambda: lm.LazyLinear(10, nnx.Rngs(0)), lm.ConfigurationError,
        "needed: rngs= by its name; arguments as in", "lm.LazyLinear(10, rngs=nnx.Rngs(0))",
    ),
    "a key for rngs": (
        lambda: lm.LazyLinear(10, rngs=jax.random.key(0)), lm.ConfigurationError, "rngs=key<fry>[]",
        "LazyLinear(..., rngs=nnx.Rngs(key))",
    ),
    "an initializer that is not called": (
        lambda: lm.LazyLinear(10, kernel_init=nnx.initializers.he_normal, rngs=nnx.Rngs(0)), lm.ConfigurationError,
        "kernel_init=he_normal", "kernel_init=nnx.initializers.he_normal()",
    ),
    "a number as a text": (
        lambda: lm.LazyLinear("10", rngs=nnx.Rngs(0)), lm.ConfigurationError, "got (7, '10')",
        "lm.LazyLinear(...)  # with arguments that nnx.Linear takes",
    ),
    "a class to wrap": (
        lambda: lm.LazyWeightNorm(lm.LazyLinear, rngs=nnx.Rngs(0)), lm.ArgumentError, "the class LazyLinear",
        "model = LazyLinear(..., rngs=nnx.Rngs(0))",
    ),
    "an infer that reads values": (
        lambda: lm.lazy(nnx.Linear, infer=lambda config, x: {"in_features": int(x.sum())})(
            out_features=4, rngs=nnx.Rngs(0))(X),
        lm.ShapeInferenceError, "it gets shapes and dtypes, and no values", "infer=lambda config, x: {",
    ),
    **{
        f"{name} for a model": (
            lambda value=value: lm.materialize(value, X), lm.ArgumentError, f"{got}\n  needed: an nnx module",
            "lm.materialize(model, x)",
        )
        for name, value, got in (("None", None, "None"), ("a text", "mlp", "'mlp'"), ("a dict", {"a": X}, "dict"))
    },
    **{
        f"{name} for a model of summary": (
            lambda value=value: lm.summary(value), lm.ArgumentError, cause, line,
        )
        for name, value, cause, line in (
            ("a class", Block, "the class Block", "model = Block("),
            ("an array", X, "f32[2,3]", "lm.materialize(model, x)"),
        )
    },
    "nested names": (
        lambda: lm.load_state_dict(Block(rngs=nnx.Rngs(0)), {"fc": {"kernel": X}}), lm.ArgumentError,
        "a mapping at 'fc'", "lm.load(model, state_dict)",
    ),
    "a folder that is not there": (
        lambda: lm.save(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "/no/such/m.safetensors"), lm.SaveError,
        "a path in a folder that is not there", "os.makedirs('/no/such')",
    ),
    "a model to open": (
        lambda: lm.open(Block(rngs=nnx.Rngs(0))), lm.ArgumentError, "the path\n  got:    Block", "path = 'model",
    ),
    "a block for its function": (
        lambda: lm.Stack(Block(rngs=nnx.Rngs(0)), 3, rngs=nnx.Rngs(0)), lm.ArgumentError,
        "a Block\n  needed: a function", "make_block=lambda rngs: Block(rngs=rngs)",
    ),
    "gradients, then the model": (
        lambda: lm.LazyOptimizer(model(), optax.adam(1e-3), wrt=nnx.Param).update(nnx.State({}), model()),
        lm.ArgumentError, "the model first, then its gradients", "optimizer.update(model, grads)",
    ),
    "the gradient of a value": (
        lambda: lm.autograd.grad(X.sum()), lm.ArgumentError, "lm.autograd.grad\n  got:    an array",
        "lm.autograd.grad(f)  # the function itself",
    ),
    **{
        f"{name} for a shape": (
            lambda shape=shape: lm.LazyLinear(4, rngs=nnx.Rngs(0)).kernel.materialize(shape), lm.ShapeInferenceError,
            f"{got}\n  needed: shape (?, 4)", "parameter.materialize(shape)",
        )
        for name, shape, got in (("a number", 3, "shape 3"), ("a value", X, "f32[2,3]"))
    },
    "a text for a number": (
        lambda: lm.set_cache_size("64"), lm.ArgumentError, "'64'", "lm.set_cache_size(64)",
    ),
    "an optimizer of Flax": (
        lambda: nnx.Optimizer(model(), optax.adam(1e-3), wrt=nnx.Param), lm.UninitializedError,
        "an uninitialized parameter",
        "optimizer = lm.LazyOptimizer(model, tx, wrt=nnx.Param)  # waits for the parameters",
    ),
    "nnx.tabulate": (
        lambda: nnx.tabulate(model(), X), lm.UninitializedError, "an uninitialized parameter",
        "print(lm.summary(model, jax.ShapeDtypeStruct(x.shape, x.dtype)))",
    ),
    **{
        name: (
            lambda run=run: run(model()), lm.UninitializedError, f"a copy of it that was made inside {name}",
            "lm.materialize(model, x)  # before the transform; for output shapes alone, lm.infer_shapes(model, x)",
        )
        for name, run in {
            "jax.jit": lambda m: jax.jit(lambda m, x: m(x))(m, X),
            "jax.checkpoint": lambda m: jax.checkpoint(lambda m, x: m(x))(m, X),
            "jax.vmap": lambda m: jax.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, X),
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_cause_and_the_line_to_write(name: str) -> None:
    make, kind, cause, line = CASES[name]
    with pytest.raises(kind) as caught:
        make()
    assert cause in str(caught.value)
    assert f"\n  write:  {line}" in str(caught.value)


def test_a_sizes_function_that_fits_is_taken() -> None:
    for infer in (
        lambda config, x, mask: {"width": x.shape[-1]},
        lambda config, x, *, mask: {"width": x.shape[-1]},
        lambda config, *args, **kwargs: {"width": args[0].shape[-1]},
        lambda config, x, y=None, mask=None: {"width": x.shape[-1]},
    ):
        layer = lm.lazy(Scale, infer=infer)(factor=2.0, rngs=nnx.Rngs(0))
        assert layer(X, mask=X).tolist() == [[2.0] * 3] * 2
    assert issubclass(lm.lazy(NoCall, infer=lambda config: {}), NoCall)  # how it is called is not known


@pytest.mark.parametrize("name", MESSAGES)
def test_every_line_to_write_is_python(name: str) -> None:
    text = MESSAGES[name][2]
    lines = text.split("write:  ")[1:]
    assert lines
    for line in lines:
        code = line.split("\n  ")[0] if "\n          " not in line else line
        ast.parse("\n".join(part.strip() for part in code.splitlines() if part.strip()))


def test_a_missing_file_names_the_one_that_may_be_meant(tmp_path: Path) -> None:
    lm.save(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), tmp_path / "layer.safetensors")
    for name in ("layer", "layr.safetensors"):
        with pytest.raises(FileNotFoundError) as caught:
            lm.load(lm.LazyLinear(4, rngs=nnx.Rngs(1)), tmp_path / name)
        assert str(caught.value) == (
            f"{tmp_path / name}\n"
            "  got:    no checkpoint at this path\n"
            "  needed: a file or folder that is there\n"
            f"  write:  lm.load(model, {str(tmp_path / 'layer.safetensors')!r})"
        )


def test_a_name_that_is_like_no_other_is_told_and_not_left_out_in_silence() -> None:
    with pytest.raises(lm.ConfigurationError, match="needed: nothing called zzz=; arguments as in"):
        lm.LazyLinear(10, zzz=1, rngs=nnx.Rngs(0))


def test_a_torch_module_for_a_model() -> None:
    torch = pytest.importorskip("torch", reason="it makes the module")
    for function in (lm.materialize, lm.save, lm.load, lm.export_torch, lm.state_dict):
        arguments = () if function in (lm.export_torch, lm.state_dict) else ("m.safetensors",)
        with pytest.raises(lm.ArgumentError) as caught:
            function(torch.nn.Linear(2, 3), *arguments)
        assert "the torch module Linear" in str(caught.value)
        assert "write:  lm.load(model, torch_module, layout='torch')" in str(caught.value)
