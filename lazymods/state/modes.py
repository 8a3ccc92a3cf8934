"""The mode of what was loaded: Flax makes models in training mode, and who loads one mostly wants the other."""

from __future__ import annotations

from typing import Any

from flax import nnx

from lazymods import _graph
from lazymods._model.hooks import unhooked_class

MODES = ("train", "eval")


def set_mode(model: Any, mode: str) -> None:
    """Call ``eval()`` or ``train()`` of a module, or of all modules of a training state."""
    above: list[tuple[Any, ...]] = []
    for path, node in _graph.nodes(model):
        if isinstance(node, nnx.Module) and not any(path[: len(root)] == root for root in above):
            above.append(path)
            getattr(node, mode)()


def note_of(model: Any) -> str | None:
    """Name the kinds of layers that are in training mode and compute something else there; None if there are none."""
    found = {unhooked_class(type(node)).__name__: None for _, node in _graph.nodes(model) if _is_training(node)}
    if not found:
        return None
    *most, last = found
    shown = f"{', '.join(most)} and {last} are" if most else f"{last} is"
    return f'{shown} in training mode: model.eval(), or mode="eval", before inference'


def _is_training(node: Any) -> bool:
    held = vars(node)
    if held.get("use_running_average") is False and isinstance(node, (nnx.BatchNorm, nnx.SpectralNorm)):
        return True
    rate = held.get("rate") if isinstance(node, nnx.Dropout) else held.get("dropout_rate")
    return held.get("deterministic") is False and isinstance(rate, (int, float)) and rate > 0
