"""Errors as objects: their classes, all problems at once sorted by path, pickling, and the words for values."""

import copy
import importlib
import pickle
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import lazy_mlp, spec

import lazymods as lm
from lazymods._errors import PendingAttributeError, Problem, describe, describe_call, relocate, short_dtype

A = Problem("a.kernel (Param)", "f32[2]", "shape (3,)", "lm.load(model, path)")
B = Problem("b.bias (Param)", "f32[4]", "shape (5,)", "lm.load(model, other)")

CLASSES: dict[type[lm.LazyError], type[Exception]] = {
    lm.UninitializedError: RuntimeError,
    lm.ShapeInferenceError: ValueError,
    lm.StateDictError: RuntimeError,
    lm.CheckpointError: ValueError,
    lm.MissingFileError: FileNotFoundError,
    lm.ConfigurationError: TypeError,
    lm.SerializationError: pickle.PicklingError,
    PendingAttributeError: AttributeError,
}


@pytest.mark.parametrize("error, builtin", CLASSES.items(), ids=lambda c: c.__name__)
def test_caught_by_the_base_and_by_the_builtin(error: type[lm.LazyError], builtin: type[Exception]) -> None:
    for base in (lm.LazyError, builtin):
        with pytest.raises(base):
            raise error(A)


@pytest.mark.parametrize("error", CLASSES, ids=lambda c: c.__name__)
def test_traceback_shows_a_public_name(error: type[lm.LazyError]) -> None:
    (line,) = traceback.format_exception_only(error(A))[:1]
    assert line.startswith("lazymods.") and "._" not in line.split(":")[0]


def test_a_pending_attribute_is_an_uninitialized_error() -> None:
    layer = lm.LazyLinear(4, rngs=nnx.Rngs(0))
    with pytest.raises(lm.UninitializedError):
        _ = layer.in_features
    assert not hasattr(layer, "in_features")
    assert getattr(layer, "in_features", None) is None


# ---------------------------------------------------------------- all at once


def test_problems_are_sorted_by_path() -> None:
    error = lm.StateDictError(B, A, heading="nothing was loaded")
    assert error.problems == (A, B)
    assert str(error) == (
        "nothing was loaded\n"
        "a.kernel (Param)\n  got:    f32[2]\n  needed: shape (3,)\n  write:  lm.load(model, path)\n"
        "b.bias (Param)\n  got:    f32[4]\n  needed: shape (5,)\n  write:  lm.load(model, other)"
    )


def test_without_a_heading() -> None:
    parts = ["a.kernel (Param)", "  got:    f32[2]", "  needed: shape (3,)", "  write:  lm.load(model, path)"]
    assert str(lm.LazyError(A)).splitlines() == parts


def test_a_load_tells_every_problem_at_once() -> None:
    model = nnx.List([nnx.Linear(3, 4, rngs=nnx.Rngs(0)) for _ in range(3)])
    entries = lm.state_dict(model)
    entries["2.kernel"], entries["0.kernel"] = jnp.ones((9, 9)), jnp.ones((3, 4), jnp.complex64)
    del entries["1.bias"]
    with pytest.raises(lm.StateDictError) as caught:
        lm.load_state_dict(model, entries | {"zzz": jnp.ones(1)})
    assert [p.where for p in caught.value.problems] == ["0.kernel (Param)", "1.bias", "2.kernel (Param)", "zzz"]


def test_relocate_moves_every_problem_and_keeps_the_rest() -> None:
    moved = relocate(lm.ShapeInferenceError(A, B, heading="h"), lambda p: f"model.{p.where}")
    assert type(moved) is lm.ShapeInferenceError and moved.heading == "h"
    assert [p.where for p in moved.problems] == ["model.a.kernel (Param)", "model.b.bias (Param)"]
    assert [p.got for p in moved.problems] == ["f32[2]", "f32[4]"]


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("copier", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy],
                         ids=["pickle", "copy", "deepcopy"])
@pytest.mark.parametrize("error", [lm.LazyError, *CLASSES], ids=lambda c: c.__name__)
def test_copies_keep_everything(error: type[lm.LazyError], copier: Any) -> None:
    one = error(B, A, heading="nothing was loaded")
    twin = copier(one)
    assert type(twin) is type(one)
    assert str(twin) == str(one) and twin.problems == (A, B) and twin.heading == "nothing was loaded"


def test_a_raised_error_pickles() -> None:
    model = lazy_mlp()
    with pytest.raises(lm.ShapeInferenceError) as caught:
        lm.materialize(model, spec())
    twin = pickle.loads(pickle.dumps(caught.value))
    assert str(twin) == str(caught.value) and str(twin).startswith("fc1 (LazyLinear)\n  got:    f32[]")


# ---------------------------------------------------------------- words for values

NAMES = {
    "float16": "f16",
    "float32": "f32",
    "bfloat16": "bf16",
    "int8": "i8",
    "int4": "i4",
    "uint32": "u32",
    "complex64": "c64",
    "bool": "bool",
    "float8_e4m3fn": "f8_e4m3fn",
}


@pytest.mark.parametrize("dtype, name", NAMES.items(), ids=NAMES)
def test_short_dtype(dtype: str, name: str) -> None:
    assert short_dtype(jnp.dtype(dtype)) == name
    assert describe(spec(8, 3, dtype=jnp.dtype(dtype))) == f"{name}[8,3]"


def test_short_dtype_of_a_random_key() -> None:
    assert describe(jax.random.key(0)) == "key<fry>[]"


VALUES = {
    "array": (jnp.ones((8, 3)), "f32[8,3]"),
    "numpy": (np.ones(4, np.int32), "i32[4]"),
    "scalar": (jnp.float32(1.0), "f32[]"),
    "placeholder": (lm.LazyLinear(4, rngs=nnx.Rngs(0)).kernel, "f32[?,4]"),
    "int": (3, "3"),
    "text": ("train", "'train'"),
    "none": (None, "None"),
    "flag": (True, "True"),
    "module": (nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "Linear"),
    "rngs": (nnx.Rngs(0), "Rngs"),
    "rng-stream": (nnx.Rngs(0).params, "RngStream"),
    "function": (len, "builtin_function_or_method"),
    "placeholder-of-unknown-rank": (lm.UninitializedParameter(), "UninitializedParameter"),
}


@pytest.mark.parametrize("value, words", VALUES.values(), ids=VALUES)
def test_describe(value: Any, words: str) -> None:
    assert describe(value) == words


def test_describe_call() -> None:
    args = (spec(8, 3), [spec(2), (spec(1), 4)], {"mask": spec(5, dtype=jnp.bool_)})
    assert describe_call(args, {"train": True}) == "f32[8,3], [f32[2], (f32[1], 4)], {mask: bool[5]}, train=True"
    assert describe_call((), {}) == "no arguments"


def test_every_error_is_public_where_its_traceback_says() -> None:
    """Else nobody can catch it by its name, and it does not pickle."""
    for path in Path(lm.__file__).parent.rglob("*.py"):
        if path.parent.name != "_compat" and path.name != "__main__.py":
            importlib.import_module(".".join(path.relative_to(Path(lm.__file__).parents[1]).with_suffix("").parts))
    found, new = set(), {lm.LazyError}
    while new:
        found |= new
        new = {sub for cls in new for sub in cls.__subclasses__()} - found
    for cls in found:
        if cls.__module__.partition(".")[0] == "lazymods":
            assert getattr(importlib.import_module(cls.__module__), cls.__name__) is cls
            assert not any(part.startswith("_") for part in cls.__module__.split("."))
