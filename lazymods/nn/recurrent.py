"""Recurrent cells without input sizes; they also work inside ``nnx.RNN`` and ``nnx.Bidirectional``."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from lazymods._gru_cell import ResetAfterGRUCell
from lazymods._layer.factory import make
from lazymods._layer.sizing import LazyClassSpec
from lazymods.nn._shapes import Config, last_axis


def _infer(config: Config, carry: Any, inputs: Any, *_: Any, **__: Any) -> dict[str, Any]:
    return {"in_features": last_axis(inputs)}


def _initialize_carry(config: Config, input_shape: Any, *_: Any, **__: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (None, jax.ShapeDtypeStruct(tuple(input_shape), config["param_dtype"])), {}


def _make(cls: type) -> Any:
    name = f"Lazy{cls.__name__}"
    becomes = f"nnx.{cls.__name__}" if hasattr(nnx, cls.__name__) else f"lm.{cls.__name__}"
    doc = f"""A recurrent cell without ``in_features``; becomes ``{becomes}``.

    Inferred: ``in_features``, the last axis of the input ``(batch, in_features)`` of the first call, or of the
    shape that ``initialize_carry`` gets, which ``nnx.RNN`` calls first.

    Args:
        hidden_features: The number of hidden features.
        **options: Those of ``{becomes}``, by keyword.
        rngs: The random streams.

    Raises:
        ShapeInferenceError: At the first call, if the input has no axes or no features.
    """
    plan = LazyClassSpec(cls, _infer, ("in_features",), entries={"initialize_carry": _initialize_carry})
    return make(plan, name=name, module=__name__, doc=doc)


LazySimpleCell = _make(nnx.SimpleCell)
LazyLSTMCell = _make(nnx.LSTMCell)
LazyOptimizedLSTMCell = _make(nnx.OptimizedLSTMCell)
LazyGRUCell = _make(nnx.GRUCell)
LazyResetAfterGRUCell = _make(ResetAfterGRUCell)
