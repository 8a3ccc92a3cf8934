"""The types of what works on whole models."""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Any, assert_type

import jax
from flax import nnx

import lazymods as lm


def whole(model: nnx.Module, x: jax.Array) -> None:
    assert_type(lm.is_lazy(model), bool)
    assert_type(lm.uninitialized_paths(model), list[str])
    assert_type(lm.infer_shapes(model, x), lm.ShapeReport)
    assert_type(lm.load_state_dict(model, {}), lm.LoadResult)
    assert_type(lm.state_dict(model), dict[str, Any])
    assert_type(lm.load(model, "model.safetensors"), lm.LoadResult)
    handle = lm.register_forward_hook(model, lambda module, args, output: None)
    assert_type(handle, lm.RemovableHandle)
    placeholder: nnx.Param[Any] = lm.UninitializedParameter()
    del placeholder


def errors(error: lm.ShapeInferenceError) -> None:
    base: lm.LazyError = error
    assert_type(error.problems[0].where, str)
    del base


def wrong(model: nnx.Module) -> None:
    lm.load_state_dict(model)  # type: ignore[call-arg]
    lm.load(model)  # type: ignore[call-arg]
    lm.is_lasy(model)  # type: ignore[attr-defined]
