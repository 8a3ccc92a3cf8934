"""From the names of a file to the names of a model: the frequent differences need no ``rename``.

A name whose module is spelled otherwise than the model's (``layers_0`` for ``layers.0``, slashes for dots, PyTorch's
``0`` for ``layers.0`` in an ``nnx.Sequential``) or has a wrapper's or collection's prefix (``module.``, ``params.``) is
matched to the one module that it can mean; so are Flax's names for what is the same array in other libraries
(``running_mean`` for ``mean``), the layers of PyTorch's stacked recurrent modules, and PEFT's names. One prefix that
many names have and the model has not (``bert.``), or the model and not the file, is seen as well.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from flax import nnx

from lazymods._graph import Path, dotted
from lazymods.state.entries import Survey, base_name
from lazymods.state.flow import Rename as Rename

PREFIXES = ("module", "_orig_mod", "model", "params", "batch_stats")
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # what PyTorch wraps in place, anywhere
_LEAVES = {"running_mean": "mean", "running_var": "var"}  # as PyTorch says; a norm's "weight" is told by its rank
_NORM_LEAVES = {"gamma": "weight", "beta": "bias"}  # as TensorFlow and older files of transformers say
_NORMS = (nnx.LayerNorm, nnx.RMSNorm, nnx.BatchNorm, nnx.GroupNorm, nnx.InstanceNorm)
_WRAPPING = (nnx.WeightNorm, nnx.SpectralNorm)  # PyTorch gives what they wrap no name
_PART = r"(|_[gvu]|_orig|_mask|\.original[01]?|\.0\._[uv])"  # of what PyTorch computes a parameter from
_LAYER = re.compile(rf"((?:parametrizations\.)?(?:weight|bias)_(?:ih|hh|hr))_l(\d+)(|_reverse){_PART}")
_CELL = re.compile(rf"(parametrizations\.)?(weight|bias)_(ih|hh){_PART}")
_LORA = re.compile(r"(^|\.)(lora_[AB])\.[^.]+\.weight$")  # with the name of one of several adapters
_BASE = "base_layer."  # what PEFT wraps
_OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj", "o_proj")  # modules in PyTorch
_MAX_PREFIX = 4  # parts
_MAX_SAMPLE = 200  # names that are looked at for a prefix
_BELOW = ("parametrizations", "lora_A", "lora_B", "base_layer")  # what stands below a module and is none in Flax
_PROJECTIONS = re.compile(rf"(parametrizations\.)?([qkv]_proj_weight|in_proj_(weight|bias)|bias_[kv]){_PART}")


def matched(
    survey: Survey, tensors: Mapping[str, Any], *, leaves: bool, aside: Collection[str] = ()
) -> dict[str, str]:
    """Find the model's spelling of the file's names, where there is no doubt.

    Args:
        survey: The model.
        tensors: What the file holds, by name.
        leaves: Whether the last part of a name may be Flax's word for it as well; else it is PyTorch's.
        aside: Names of entries that need no parameter: what prefix there is, the others say if they can.

    Returns:
        The file's name for each new name; a name that cannot be matched is as it was.
    """
    if tensors.keys() <= survey.places.keys():
        return {name: name for name in tensors}
    return _Matcher(survey, leaves).matched(tensors, aside)


class _Matcher:
    """The modules of a model, by all of their spellings."""

    def __init__(self, survey: Survey, leaves: bool) -> None:
        self.known = survey.places
        self.leaves = leaves
        self.nodes = {dotted(path): node for path, node in survey.named_nodes}
        self.first_names = {id(node): dotted(path) for path, node in survey.nodes}
        self.holders = {name.rpartition(".")[0] for name in self.known}  # modules with parameters of their own
        self.spellings: dict[str, set[str]] = {}
        self.found: dict[str, str | None] = {}
        sequential = {path for path, node in survey.named_nodes if isinstance(node, nnx.Sequential)}
        for path, _ in survey.named_nodes:
            short = tuple(k for i, k in enumerate(path) if not (k == "layers" and path[:i] in sequential))
            for spelling in (path, short):
                self.spellings.setdefault(_canonical(dotted(spelling)), set()).add(dotted(path))
        self.wrappers = set(_WRAPPED).difference(*(path for path, _ in survey.named_nodes))
        self.stacks = {} if leaves else _recurrent_stacks(survey.named_nodes)

    def matched(self, tensors: Mapping[str, Any], aside: Collection[str]) -> dict[str, str]:
        """Return the file's name for each new name."""
        needed = [name for name in tensors if name not in aside]
        wrapper = self._wrapper(needed) or self._wrapper(tensors)
        bare = {name: self._bare(name.removeprefix(wrapper)) for name in tensors}
        off, on = self._prefix([bare[name] for name in needed])
        if aside and not off and not on:
            off, on = self._prefix(list(bare.values()))
        out: dict[str, str] = {}
        for name, tensor in tensors.items():
            new = bare[name]
            if new.startswith(off) and (off or on) and not self._fits(new):
                moved = self._bare(on + new.removeprefix(off))
                new = moved if self._fits(moved) else new
            new = new if self._is_known(new) else self._match(new, tensor)
            if new in out or (new != name and new in tensors):
                new = name
            out[new] = name
        return out

    def _bare(self, name: str) -> str:
        """Return a name with dots, without wrappers and collections that the model has no child of."""
        if self._is_known(name):
            return name
        parts = [part for part in re.split(r"[./]", name) if part not in self.wrappers]
        while len(parts) > 1 and parts[0] in PREFIXES and parts[0] not in self.nodes:
            parts = parts[1:]
        return ".".join(parts)

    def _is_known(self, name: str) -> bool:
        return name in self.known or base_name(name) in self.known

    # ------------------------------------------------------------ modules

    def module(self, path: str) -> str | None:
        """Return the one module that a path can mean, or None."""
        if path not in self.found:
            spelled = self.spellings.get(_canonical(path), ())
            literal = path if path in self.nodes else None
            self.found[path] = literal if literal is not None or len(spelled) != 1 else min(spelled)
        return self.found[path]

    def _depth(self, name: str) -> int:
        """Return how many parts of a name lead to a module."""
        at = name.rfind(".")
        while at >= 0:
            if self.module(name[:at]) is not None:
                return name.count(".", 0, at) + 1
            at = name.rfind(".", 0, at)
        return 0

    def _fits(self, name: str) -> bool:
        """Whether a name leads to a module that it may be a parameter of."""
        if self._is_known(name):
            return True
        parts = name.split(".")
        depth = self._depth(name)
        module = self.module(".".join(parts[:depth]))
        if module is None:
            return False
        rest = parts[depth:]
        if self.leaves:
            prefix = f"{module}." if module else ""
            return len(rest) == 1 and any(prefix + leaf in self.known for leaf in _flax_words(rest[0]))
        node = self.nodes[module]
        leaf = ".".join(rest)
        if isinstance(node, nnx.MultiHeadAttention):
            return rest[0] in _OF_ATTENTION or _PROJECTIONS.fullmatch(leaf) is not None
        if isinstance(node, nnx.RNNCellBase) and (_CELL.fullmatch(leaf) or _of_cell(leaf)):
            return True
        if _LAYER.fullmatch(leaf):
            return isinstance(node, (nnx.RNN, nnx.Bidirectional)) or module in self.stacks
        holds = module in self.holders or isinstance(node, _WRAPPING)
        return holds and (len(rest) == 1 or rest[0] in _BELOW)

    # ------------------------------------------------------------ prefixes

    def _wrapper(self, names: Collection[str]) -> str:
        """Return the prefixes of wrappers that all names have, where the model has a child of such a name or not.

        Without them no name may lead less far into the model than with them, and one must lead further.
        """
        parts = [name.split(".") for name in names]
        shared = zip(min(parts, default=()), max(parts, default=()), strict=False)  # what these share, all do
        left = [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], shared)]
        best = tried = ""
        while left and left[0] in PREFIXES:
            tried += f"{left.pop(0)}."
            more = tried.count(".") - best.count(".")
            gains = [
                self._depth(name.removeprefix(tried)) - max(0, self._depth(name.removeprefix(best)) - more)
                for name in names
            ]
            if min(gains) >= 0 and max(gains) > 0:
                best = tried
        return best

    def _prefix(self, names: Sequence[str]) -> tuple[str, str]:
        """Return the prefix to take off the names that have it, or the one to put on: by which the most names fit.

        Both are empty if all names fit as they are, or if two prefixes would do. One is never put in another's place:
        an encoder's weights are no decoder's. Nor does a prefix bring entries to a module that has some without it:
        these are two modules in the file, a student's and its teacher's. Where some names fit as they are, a prefix
        that leads to a single module, and no name of it besides, is taken for chance.
        """
        lost = [name for name in names if not self._fits(name)]
        if not lost:
            return "", ""
        reached = {self._owner(name) for name in names if self._fits(name)}
        sample = lost[:: -(-len(lost) // _MAX_SAMPLE)]
        taken = set(names)
        offs = {".".join(parts[:i]) + "." for name in sample for parts in [name.split(".")] for i in _range(parts)}
        ons = [p for p in self.first_names.values() if p and p.count(".") < 2 and not re.search(r"\d", p)]
        readings: dict[frozenset[tuple[str, str]], tuple[str, str]] = {}
        for off, on in (*((off, "") for off in sorted(offs)), *(("", f"{path}.") for path in ons)):
            found = {name: self._bare(on + name.removeprefix(off)) for name in sample if name.startswith(off)}
            fitting = {(name, new) for name, new in found.items() if new not in taken and self._fits(new)}
            owners = {self._owner(new) for new in found.values() if self._fits(new)}
            is_chance = bool(reached) and len(owners) == 1 and not any("." in n.removeprefix(off) for n, _ in fitting)
            if owners and not is_chance and not owners & reached:
                readings.setdefault(frozenset(fitting), (off, on))
        most = max(map(len, readings), default=0)
        best = [prefixes for reading, prefixes in readings.items() if len(reading) == most]
        return best[0] if most and len(best) == 1 else ("", "")

    def _owner(self, name: str) -> str | None:
        """Return the module that a name leads to, by its first name."""
        module = self.module(".".join(name.split(".")[: self._depth(name)]))
        return None if module is None else self.first_names[id(self.nodes[module])]

    # ------------------------------------------------------------ names

    def _match(self, name: str, tensor: Any) -> str:
        parts = name.split(".")
        for i in range(len(parts) - 1, -1, -1):  # the longest module first
            module = self.module(".".join(parts[:i]))
            if module is not None:
                prefix = f"{module}." if module else ""
                return self._in_module(module, prefix, ".".join(parts[i:]), tensor)
        return name

    def _in_module(self, module: str, prefix: str, leaf: str, tensor: Any) -> str:
        if self.leaves:
            return prefix + self._flax_leaf(prefix, leaf, tensor)
        layer = _LAYER.fullmatch(leaf)
        if layer is not None and module in self.stacks and int(layer[2]) < len(self.stacks[module]):
            module = self.stacks[module][int(layer[2])]
            prefix, leaf = f"{module}.", f"{layer[1]}_l0{layer[3]}{layer[4]}"
        if isinstance(self.nodes[module], nnx.RNNCellBase):
            return prefix + (_of_cell(leaf) or leaf)
        if leaf in _NORM_LEAVES and isinstance(self.nodes[module], _NORMS):
            return prefix + _NORM_LEAVES[leaf]
        node = self.nodes[module]
        if leaf.startswith(_BASE) and isinstance(node, (nnx.LoRA, nnx.LoRALinear)):
            leaf = ("base_module." if isinstance(node, nnx.LoRA) else "") + leaf.removeprefix(_BASE)
        return prefix + _LORA.sub(r"\1\2.weight", leaf)

    def _flax_leaf(self, prefix: str, leaf: str, tensor: Any) -> str:
        if prefix + leaf in self.known:
            return leaf
        if leaf == "weight" and len(getattr(tensor, "shape", ())) == 1:
            other = "scale"
        else:
            other = _LEAVES.get(leaf, leaf)
        return other if prefix + other in self.known else leaf


def _of_cell(leaf: str) -> str | None:
    """Return what a cell calls an entry of PyTorch's layer 0; None if it is none."""
    layer = _LAYER.fullmatch(leaf)
    return None if layer is None or layer[2] != "0" or layer[3] else f"{layer[1]}{layer[4]}"


def _flax_words(leaf: str) -> tuple[str, ...]:
    """Return what Flax may call what another library calls so."""
    return (leaf, "scale") if leaf == "weight" else (leaf, _LEAVES.get(leaf, leaf))


def _range(parts: Sequence[str]) -> range:
    return range(1, min(len(parts), _MAX_PREFIX + 1))


def _recurrent_stacks(nodes: Iterable[tuple[Path, Any]]) -> dict[str, list[str]]:
    """Return the recurrent modules of each list or ``nnx.Sequential`` that has several, by its path."""
    below: dict[Path, list[str]] = {}
    sequential = {path for path, node in nodes if isinstance(node, nnx.Sequential)}
    for path, node in nodes:
        if path and str(path[-1]).isdecimal() and isinstance(node, (nnx.RNN, nnx.Bidirectional, nnx.RNNCellBase)):
            owner = path[:-1]
            if owner and owner[-1] == "layers" and owner[:-1] in sequential:
                owner = owner[:-1]
            below.setdefault(owner, []).append(dotted(path))
    return {dotted(owner): found for owner, found in below.items()}


def _canonical(path: str) -> str:
    """``layers_0`` and ``layers.0`` are one."""
    return re.sub(r"_(?=\d+([._]|$))", ".", path)
