"""PEFT's adapters: the factor ``lora_alpha / r`` of the product, which stands in ``adapter_config.json`` beside them.

Flax's layers have no such factor, so that it goes into ``lora_B``; layers of one's own may have it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lazymods._graph import Path as ModelPath
from lazymods._graph import dotted
from lazymods.state import config_file
from lazymods.state.array_rules import Found, as_before, compiled, each, wide_dtype
from lazymods.state.files.json_text import read_json
from lazymods.state.files.stored import Checkpoint, StoredTensor, printable, read_description, refuse
from lazymods.state.flow import ArrayRule, Entry, Unfit, derived
from lazymods.state.layouts.computed import wide

CONFIG = "adapter_config.json"
_MAX_BYTES = 1_000_000
_NAME = r"(^|\.)lora_B\."
_A = re.compile(r"(^|\.)lora_A\.")
_ALPHAS, _FACTORS, _RANKS = ("lora_alpha", "alpha"), ("scaling", "scale"), ("r", "rank", "lora_rank")


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
        """Give the file's numbers where the product is theirs, else divide: the quotient is rounded again.

        Raises:
            Unfit: If the factor is 0, and the model has other numbers.
        """
        value, made = wide(values[0]), self.forward(inputs, 1)[0]
        if not self.factor and value.any():
            raise Unfit("numbers other than 0", "zeros: lora_alpha is 0 in the file")
        quotient = value / value.dtype.type(self.factor) if self.factor else value
        return [as_before(values[0], made, inputs[0], quotient)]

    def keeps(self, index: int) -> bool:
        """Keep the file's numbers: a quotient does not give all of their bits."""
        return True


def adapter_rules(
    file: Checkpoint, tensors: Mapping[str, Any], nodes: Sequence[tuple[ModelPath, Any]]
) -> tuple[list[ArrayRule], list[str]]:
    """Return the rules for the adapters in a file, and what is to be said of them.

    Args:
        file: The file.
        tensors: What it holds, by name.
        nodes: The model's modules, with their paths.

    Raises:
        CheckpointError: If the file's configuration cannot be followed, or says otherwise than the file or the model.
    """
    if not any(compiled(_NAME).search(name) for name in tensors):
        return [], []
    adapted = _adapted(tensors, nodes)
    own = {name: said for name, node in adapted if (said := list(config_file.told_by(node, (*_ALPHAS, *_FACTORS))))}
    config = _config(file)
    if config is None:
        untold = f"no {CONFIG} tells lora_alpha, so that the product of lora_A and lora_B is not scaled"
        return [], [] if own else [untold]
    path = file.path.with_name(CONFIG)
    rank, alpha, factor = _factor(path, config)
    for name, tensor in tensors.items():
        axis = 0 if _A.search(name) else 1 if compiled(_NAME).search(name) else None
        shape = tuple(getattr(tensor, "shape", ()))
        if axis is not None and len(shape) > 1 and shape[axis] != rank:
            got = f"r={rank}, and {printable(name)} of shape {shape} in the file, of rank {shape[axis]}"
            raise refuse(path, got, "the configuration of the adapter that the file holds")
    wanted = {**dict.fromkeys(_ALPHAS, alpha), **dict.fromkeys(_FACTORS, factor), **dict.fromkeys(_RANKS, rank)}
    for name, node in adapted:
        for key, value in config_file.told_by(node, wanted):
            right = wanted[key.removeprefix("config.")]
            if type(value) in (int, float) and not math.isclose(value, right, rel_tol=1e-6):
                got = f"r={rank}, lora_alpha={alpha:g}, where {name} of the model has {key}={value:g}"
                raise refuse(path, got, "one rank and one lora_alpha in both", write=f"{key}={right:g}  # for {name}")
    if own and len(own) < len(adapted):
        other = next(name for name, _ in adapted if name not in own)
        got = f"one factor for all, where {next(iter(own))} of the model has one of its own, and {other} has none"
        line = f"lora_alpha={alpha:g}  # for all of them"
        raise refuse(path, got, "a model whose adapters all have a factor, or none", write=line)
    if own or factor == 1.0:
        return [], []
    return [Scaled(factor)], [f"lora_B is scaled by {_formula(config)}, {factor:g}"]


def _adapted(names: Iterable[str], nodes: Sequence[tuple[ModelPath, Any]]) -> list[tuple[str, Any]]:
    """Return the modules that hold an adapter's matrices, as layers or as parameters: those of the names, or all."""
    words = {word for name in names if compiled(_NAME).search(name) for word in name.split(".")}
    named, others = [], []
    for path, node in nodes:
        if "lora_B" in vars(node) or "lora_b" in vars(node):
            own = [str(key) for key in path if key != "lora" and not str(key).isdecimal()]
            (named if own and own[-1] in words else others).append((dotted(path), node))
    return named or others


def _factor(path: Path, config: Mapping[str, Any]) -> tuple[int, float, float]:
    """Return the rank, lora_alpha and the factor that a configuration tells."""
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        got = "a rank or lora_alpha for single modules (rank_pattern, alpha_pattern)"
        line = "rename=lambda name: None if 'those modules' in name else name  # leaves them out"
        raise refuse(path, got, "one rank and one lora_alpha", write=line)
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise refuse(path, f"r={printable(repr(rank))}, lora_alpha={printable(repr(alpha))}", "a rank and a number")
    return rank, alpha, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _formula(config: Mapping[str, Any]) -> str:
    return "lora_alpha / sqrt(r)" if config.get("use_rslora") else "lora_alpha / r"


def _config(file: Checkpoint) -> dict[str, Any] | None:
    path = Path(file.path).with_name(CONFIG)
    if file.in_memory or not path.is_file():
        return None
    config = read_json(path, read_description(path, _MAX_BYTES), "a configuration")
    return config if isinstance(config, dict) else None
