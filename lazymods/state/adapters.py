"""PEFT's adapters: the factor ``lora_alpha / r`` of the product, which stands in ``adapter_config.json`` beside them.

Flax's layers have no such factor, so that it goes into ``lora_B``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lazymods.state.array_rules import Found, compiled, each, wide_dtype
from lazymods.state.files.stored import Checkpoint, StoredTensor, printable, read_description, read_json, refuse
from lazymods.state.flow import ArrayRule, Entry, derived
from lazymods.state.layouts.computed import wide

CONFIG = "adapter_config.json"
_MAX_BYTES = 1_000_000
_NAME = r"(^|\.)lora_B\."


@dataclasses.dataclass(frozen=True)
class Scaled(ArrayRule):
    """The matrices ``lora_B`` times a factor."""

    factor: float

    def find(self, entries: Sequence[Entry]) -> Found:
        """Take each ``lora_B`` by itself."""
        return each(compiled(_NAME), [r"\g<0>"], entries)

    def forward(self, tensors: Sequence[StoredTensor], count: int) -> list[StoredTensor]:
        """Multiply."""
        (tensor,) = tensors
        kind = wide_dtype(tensor.dtype)
        return [derived(tensor, tensor.shape, lambda: wide(tensor.read()) * kind.type(self.factor), kind)]

    def backward(self, values: Sequence[Any], inputs: Sequence[StoredTensor]) -> list[Any]:
        """Divide."""
        return [wide(values[0]) / np.float32(self.factor).astype(wide(values[0]).dtype)]


def adapter_rules(file: Checkpoint, names: Iterable[str]) -> tuple[list[ArrayRule], list[str]]:
    """Return the rules for the adapters among some names, and what is to be said of them.

    Raises:
        CheckpointError: If the file's configuration cannot be followed.
    """
    if not any(compiled(_NAME).search(name) for name in names):
        return [], []
    config = _config(file)
    if config is None:
        return [], [f"no {CONFIG} tells lora_alpha, so that the product of lora_A and lora_B is not scaled"]
    path = file.path.with_name(CONFIG)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        got = "a rank or lora_alpha for single modules (rank_pattern, alpha_pattern)"
        line = "rename=lambda name: None if 'those modules' in name else name  # leaves them out"
        raise refuse(path, got, "one rank and one lora_alpha", write=line)
    if type(rank) is not int or rank < 1 or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise refuse(path, f"r={printable(repr(rank))}, lora_alpha={printable(repr(alpha))}", "a rank and a number")
    factor = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    if factor in (0.0, 1.0):
        return [], []
    return [Scaled(factor)], [f"lora_B is scaled by lora_alpha / r, {factor:g}"]


def _config(file: Checkpoint) -> dict[str, Any] | None:
    path = Path(file.path).with_name(CONFIG)
    if file.in_memory or not path.is_file():
        return None
    config = read_json(path, read_description(path, _MAX_BYTES), "a configuration")
    return config if isinstance(config, dict) else None
