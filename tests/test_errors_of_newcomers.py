"""What people write first, and wrongly: each error names the cause and a line that can be pasted."""

# pyright: reportCallIssue=false, reportArgumentType=false

import ast
import os
from collections.abc import Callable
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
