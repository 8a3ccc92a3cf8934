"""Normalization layers without feature counts, and weight normalization of lazy layers."""

from __future__ import annotations

from typing import Any

from flax import nnx

from lazymods._layer.factory import make
from lazymods._layer.sizing import Infer, LazyClassSpec
from lazymods.nn._shapes import Config, axes_over, check_divides, check_rank, last_axis, product_at


def _batch_norm(config: Config, x: Any, *_: Any, **__: Any) -> dict[str, Any]:
    return {"num_features": product_at(x, config["axis"])}


def _feature_axes(config: Config, x: Any, *_: Any, **__: Any) -> dict[str, Any]:
    return {"num_features": product_at(x, config["feature_axes"])}


def _group_norm(config: Config, x: Any, *_: Any, **__: Any) -> dict[str, Any]:
    features = last_axis(x)
    groups, size = config["num_groups"], config["group_size"]
    if size is not None:
        check_divides(size, features, "group_size")
    else:
        check_divides(groups, features, "num_groups")
    return {"num_features": features}


def _ranked(infer: Infer, ranks: tuple[int, ...], axes: str) -> Infer:
    def ranked(config: Config, x: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        check_rank(x, ranks, axes)
        return infer(config, x, *args, **kwargs)

    return ranked


def _make(cls: type, infer: Infer, at: str, rank: int | None = None) -> Any:
    name, checked = f"Lazy{cls.__name__}", ""
    if rank is not None:
        name, axes = f"{name}{rank}d", axes_over(rank)
        checked = f", whose input is {axes}"
        without_length = rank == 1 and cls is nnx.BatchNorm
        ranks = (2, 3) if without_length else (rank + 2,)
        infer = _ranked(infer, ranks, axes + (" or (batch, features)" if without_length else ""))
    doc = f"""``nnx.{cls.__name__}`` without ``num_features``{checked}.

    Inferred: ``num_features``, {at}.

    Args:
        **options: Those of ``nnx.{cls.__name__}``, by keyword, with its defaults.
        rngs: The random streams.

    Raises:
        ShapeInferenceError: At the first call, if the input lacks a feature axis or has no features.
    """
    scales = None if cls is nnx.GroupNorm else ()  # its groups have to divide
    return make(LazyClassSpec(cls, infer, ("num_features",), scales=scales), name=name, module=__name__, doc=doc)


_AT_AXIS, _AT_AXES = "the input's size at ``axis``", "the input's size at ``feature_axes``"
LazyBatchNorm = _make(nnx.BatchNorm, _batch_norm, _AT_AXIS)
LazyBatchNorm1d, LazyBatchNorm2d, LazyBatchNorm3d = (
    _make(nnx.BatchNorm, _batch_norm, _AT_AXIS, rank) for rank in (1, 2, 3)
)
LazyLayerNorm = _make(nnx.LayerNorm, _feature_axes, _AT_AXES)
LazyRMSNorm = _make(nnx.RMSNorm, _feature_axes, _AT_AXES)
LazyGroupNorm = _make(nnx.GroupNorm, _group_norm, "the input's last axis")
LazyInstanceNorm = _make(nnx.InstanceNorm, _feature_axes, _AT_AXES)
LazyInstanceNorm1d, LazyInstanceNorm2d, LazyInstanceNorm3d = (
    _make(nnx.InstanceNorm, _feature_axes, _AT_AXES, rank) for rank in (1, 2, 3)
)


# ---------------------------------------------------------------- wrappers


def _nothing(config: Config, *_: Any, **__: Any) -> dict[str, Any]:
    return {}


def _make_wrapper(cls: type, what: str, wrapped_call: Any) -> Any:
    doc = f"""``nnx.{cls.__name__}`` around a layer that may be lazy.

    Inferred: nothing itself. The first call initializes the wrapped layer, then {what}.

    Args:
        layer_instance: The layer, lazy or not.
        **options: Those of ``nnx.{cls.__name__}``, by keyword.
        rngs: The random streams.

    Raises:
        ShapeInferenceError: At the first call, if the wrapped layer's sizes do not follow from the input.
    """
    plan = LazyClassSpec(
        cls, _nothing, (), wraps="layer_instance", wrapped_call=wrapped_call, materialize=_materialize_wrapped
    )
    return make(plan, name=f"Lazy{cls.__name__}", module=__name__, doc=doc)


def _all_passed_on(x: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (x, *args), kwargs


def _input_passed_on(x: Any, *_: Any, **__: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (x,), {}


def _materialize_wrapped(model: Any, *args: Any, **kwargs: Any) -> None:
    from lazymods._model.inference import materialize  # on first use: most programs wrap nothing

    materialize(model, *args, **kwargs)


LazyWeightNorm = _make_wrapper(nnx.WeightNorm, "the scales", _all_passed_on)
LazySpectralNorm = _make_wrapper(nnx.SpectralNorm, "the singular vectors", _input_passed_on)
