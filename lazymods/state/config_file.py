"""``config.json`` beside a file, as Hugging Face's ``transformers`` writes it: what of a model no array can tell.

Others write the same names: the fields that are known are compared whether it says the type of its model or not.
A number of heads that divides the features loads like any other and computes something else. Where the model says what
the file's own configuration says otherwise, that is told. What a model has nowhere is not compared.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lazymods._errors import Problem, located
from lazymods._graph import dotted
from lazymods._model.hooks import unhooked_class
from lazymods.state.entries import Survey, prefix_of

NAME = "config.json"
_MAX_BYTES = 10_000_000

_HEADS = re.compile(r"(?!.*(kv|key|value)).*(^|_)heads?")
_KV_HEADS = re.compile(r"num_key_value_heads|num_kv_heads")
_WIDTHS = re.compile(r"(.*_)?head_dim|d_kv|d_head|attention_head_size|kv_channels")
_FEATURES = ("hidden_size", "n_embd", "d_model", "embed_dim", "dim", "d_latents")
_OURS = {
    "heads": ("num_heads", "num_attention_heads", "n_heads", "n_head"),
    "kv": ("num_kv_heads", "num_key_value_heads", "n_kv_heads"),
    "width": ("head_dim",),
}
_EPSILONS = ("epsilon", "eps", "variance_epsilon")
_RMS = ("rms_norm_eps", "rms_norm_epsilon")
_ANY_NORM = ("layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_epsilon", "norm_eps")
_OTHER_EPSILONS = ("convnext", "convnextv2", "segformer")  # whose layers do not take the one of their configuration

_LESS_ONE: dict[Any, type] = {  # models whose norms multiply by 1 plus what the file has
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "vaultgemma"), nnx.RMSNorm),
    "nemotron": nnx.LayerNorm,
}

_ACTS = ("hidden_act", "hidden_activation", "activation_function", "dense_act_fn")
_OUR_ACTS = (*_ACTS, "act", "act_fn", "activation")
_XS = np.array([-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0], np.float32)


class Config:
    """What a configuration says.

    Args:
        values: The JSON object.

    Attributes:
        parts: It, and the configurations in it, as CLIP has one for texts and one for images. Without a type of
            ``transformers`` nobody knows how these are called: all objects in it.
        kind: The type of model that it is of; "" if it says none.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        kind = values.get("model_type")
        self.kind: str = kind if isinstance(kind, str) else ""
        self.parts: list[Mapping[str, Any]] = [values]
        for part in self.parts:  # which grows meanwhile
            if part is values or not self.kind:
                inner = {key: value for key, value in part.items() if isinstance(value, dict)}
                self.parts += [value for key, value in inner.items() if key.endswith("_config") or not self.kind]

    @property
    def ties(self) -> bool:
        """Whether it says that the output layer is the embedding."""
        return self.values.get("tie_word_embeddings") is True

    def find(self, keys: Collection[str]) -> list[tuple[str, Any]]:
        """Return what its parts say by any of some keys, each with its key; nothing, if one may have it by default."""
        found = [[(key, part[key]) for key in keys if part.get(key) is not None] for part in self.parts]
        if any(_has_defaults(part) for said, part in zip(found[1:], self.parts[1:], strict=True) if not said):
            return []
        return [told for said in found for told in said]

    def numbers(self, kind: str) -> dict[int, str]:
        """Return the numbers that it has of heads, of heads of keys and values, or of features of one, with their keys.

        Args:
            kind: ``"heads"``, ``"kv"`` or ``"width"``.

        Returns:
            None of them, if a part may have others by default.
        """
        out: dict[int, str] = {}
        if "multi_query" in self.values:  # by which Falcon's numbers are others
            return {}
        if "_class_name" in self.values and (kind == "width" or not self.values.get("num_attention_heads")):
            return {}  # diffusers calls numbers of heads so, and may have others beside
        for i, part in enumerate(self.parts):
            said = _numbers(part, kind)
            if not said and ((i and _has_defaults(part)) or (kind == "kv" and _numbers(part, "heads"))):
                return {}
            out |= said
        return out


def _has_defaults(part: Mapping[str, Any]) -> bool:
    """Whether a configuration in another one is that of a model, whose defaults ``transformers`` does not write."""
    return isinstance(part.get("model_type"), str)


def _numbers(part: Mapping[str, Any], kind: str) -> dict[int, str]:
    pattern = {"heads": _HEADS, "kv": _KV_HEADS, "width": _WIDTHS}[kind]
    said = {key: value if isinstance(value, list) else [value] for key, value in part.items() if pattern.fullmatch(key)}
    out = {n: key for key, values in said.items() for n in values if type(n) is int}
    if kind == "width" and not out:
        sizes = {key: part[key] for key in _FEATURES if type(part.get(key)) is int}
        heads = _numbers(part, "heads")
        out = {size // n: f"{key} by {name}" for key, size in sizes.items() for n, name in heads.items() if n > 0}
    return out


def beside(path: Path) -> Config | None:
    """Read the configuration beside a file, or in a folder; None if there is none."""
    file = (path if path.is_dir() else path.parent) / NAME
    try:
        if not file.is_file() or file.stat().st_size > _MAX_BYTES:
            return None
        values = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None  # no part of the checkpoint: what it is for works without it
    return Config(values) if isinstance(values, dict) else None


# ---------------------------------------------------------------- heads


def wrong_heads(survey: Survey, config: Config, loaded: Iterable[str]) -> list[Problem]:
    """Find the modules, of those that something is loaded for, that have another number of heads."""
    problems = []
    filled = _prefixes(loaded)
    for kind, attributes in _OURS.items():
        numbers = config.numbers(kind)
        for path, node in survey.nodes if numbers else ():
            for name, value in told_by(node, attributes) if prefix_of(path) in filled else ():
                if type(value) is not int or value in numbers:
                    continue
                wanted = " or ".join(map(str, numbers))
                key = next(iter(numbers.values()))
                where = located(dotted(path), unhooked_class(type(node)).__name__)
                needed = f"{wanted}, as {NAME} beside the file says ({key}): others see other parts of the features"
                line = f"{name}={next(iter(numbers))}  # or the file in a folder without it, if it is not the file's"
                problems.append(Problem(where, f"{name}={value}", needed, line))
    return problems


def _prefixes(names: Iterable[str]) -> set[str]:
    """Return what the names of all modules begin with that something of some names is below."""
    out = {""}
    for name in names:
        at = name.find(".")
        while at >= 0:
            out.add(name[: at + 1])
            at = name.find(".", at + 1)
    return out


def told_by(node: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Return what a module says by some names, itself or in its ``config``."""
    held = vars(node)
    config = held.get("config", held.get("cfg"))
    inner = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    for name in names:
        if name in held:
            yield name, held[name]
        elif name in inner and not isinstance(node, nnx.Variable):
            yield f"config.{name}", inner[name]


# ---------------------------------------------------------------- what is told only


def differences(survey: Survey, config: Config, loaded: Iterable[str]) -> list[str]:
    """Say what else is otherwise in the model: the epsilons of its norms, and its activation functions."""
    filled = _prefixes(loaded)
    nodes = [(path, node) for path, node in survey.nodes if prefix_of(path) in filled]
    return [*_epsilons(nodes, config), *_activations(nodes, config)]


def _epsilons(nodes: Iterable[tuple[Any, Any]], config: Config) -> Iterator[str]:
    if config.kind in _OTHER_EPSILONS:
        return
    told: dict[tuple[str, str, str], list[str]] = {}
    for path, node in nodes:
        cls = unhooked_class(type(node))
        if "Norm" not in cls.__name__ or isinstance(node, (nnx.BatchNorm, nnx.GroupNorm, nnx.InstanceNorm)):
            continue
        is_rms = isinstance(node, nnx.RMSNorm) or "rms" in cls.__name__.lower()
        keys = (_RMS, _ANY_NORM) if is_rms else (_ANY_NORM, _RMS)
        said = [(k, v) for k, v in config.find(keys[0]) or config.find(keys[1]) if isinstance(v, (int, float))]
        for name, value in told_by(node, _EPSILONS):
            if not said or not isinstance(value, float) or any(math.isclose(value, v, rel_tol=1e-3) for _, v in said):
                continue
            key, wanted = said[0]
            told.setdefault((f"{name}={value:g}", f"{key}={wanted:g}", f"{name}={wanted:g}"), []).append(dotted(path))
    for (ours, theirs, line), paths in told.items():
        yield f"{_shown(paths)}: {ours}, where {NAME} says {theirs}; write {line}"


def scales_less_one(survey: Survey, config: Config, given: Mapping[str, str]) -> list[str]:
    """Say which norms of Flax were given the scales of a file that has them less 1.

    Args:
        survey: The model.
        config: The configuration.
        given: The names, after a rename, of the entries that no rule has changed, by the model's names.
    """
    kinds = [kind for part in config.parts if (kind := str(part.get("model_type"))) in _LESS_ONE]
    cls = _LESS_ONE[kinds[0]] if kinds else None
    norms = [dotted(path) for path, node in survey.nodes if kinds and unhooked_class(type(node)) is cls]
    names = {path: given[f"{path}.scale"].split(".") for path in norms if f"{path}.scale" in given}
    modules = "|".join(dict.fromkeys(re.escape(name[-2]) for name in names.values() if len(name) > 1))
    if not modules:
        return []
    line = f'rename=[lm.rules.Add(r"(^|[.])({modules})[.]weight$", 1.0)]'
    return [f"{_shown([*names])}: model_type={kinds[0]!r} of {NAME} adds 1 to the file's scale; write {line}"]


def _shown(paths: list[str]) -> str:
    return f"{paths[0]} and {len(paths) - 1} more" if len(paths) > 1 else paths[0]


def _activations(nodes: Iterable[tuple[Any, Any]], config: Config) -> Iterator[str]:
    said = config.find(_ACTS)
    if not said or any(not isinstance(name, str) or name not in _FUNCTIONS for _, name in said):
        return
    wanted = [_FUNCTIONS[name]() for _, name in said]
    told: dict[str, list[str]] = {}
    for path, node in nodes:
        for name, value in told_by(node, _OUR_ACTS):
            ours = _values_of(value)
            if ours is not None and not any(np.allclose(ours, one, atol=1e-4) for one in wanted):
                shown = repr(value) if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)
                told.setdefault(shown, []).append(".".join(filter(None, (dotted(path), name))))
    for ours, paths in told.items():
        key, theirs = said[0]
        line = _LINES.get(theirs, f"nnx.{theirs}")
        yield f"{_shown(paths)}: {ours}, another function than {key}={theirs!r} of {NAME}; write {line}"


def _values_of(function: Any) -> np.ndarray[Any, Any] | None:
    """Return the values of an activation function at some places; None if it is none."""
    if isinstance(function, str):
        return _FUNCTIONS[function]() if function in _FUNCTIONS else None
    if isinstance(function, nnx.Pytree) or not callable(function):
        return None
    try:
        with jax.ensure_compile_time_eval():
            out = np.asarray(function(jnp.asarray(_XS)))
    except Exception:  # it is somebody's own function, of anything
        return None
    return out if out.shape == _XS.shape else None


def _gelu() -> np.ndarray[Any, Any]:
    return np.array([x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in _XS.tolist()])


def _gelu_by_tanh() -> np.ndarray[Any, Any]:
    return _XS * (1 + np.tanh(math.sqrt(2 / math.pi) * (_XS + 0.044715 * _XS**3))) / 2


def _swish(factor: float) -> np.ndarray[Any, Any]:
    return _XS / (1 + np.exp(-factor * _XS))


_FUNCTIONS = {
    **dict.fromkeys(("gelu", "gelu_python"), _gelu),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate"), _gelu_by_tanh),
    "quick_gelu": functools.partial(_swish, 1.702),
    **dict.fromkeys(("silu", "swish"), functools.partial(_swish, 1.0)),
    "relu": lambda: np.maximum(_XS, 0),
    "relu2": lambda: np.maximum(_XS, 0) ** 2,
    "relu6": lambda: np.clip(_XS, 0, 6),
    "tanh": lambda: np.tanh(_XS),
    "sigmoid": lambda: 1 / (1 + np.exp(-_XS)),
}
_LINES = {
    **dict.fromkeys(("gelu", "gelu_python"), "functools.partial(nnx.gelu, approximate=False)"),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate"), "nnx.gelu"),
    "quick_gelu": "lambda x: x * nnx.sigmoid(1.702 * x)",
    "relu2": "lambda x: nnx.relu(x) ** 2",
    "swish": "nnx.silu",
}
