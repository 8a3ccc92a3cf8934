"""Multi-head attention: PyTorch has one matrix for queries, keys and values, or three; Flax three, with a heads axis.

Projections that are ``nn.Linear`` of their own, as in most published transformers, are taken as well: ``q_proj.weight``
or ``query.weight`` and so on. PyTorch's ``add_zero_attn`` leaves no trace in a file and has no twin in Flax.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lazymods.state.layouts.axes import without_ones
from lazymods.state.layouts.file import Part, TorchFile
from lazymods.state.layouts.rule import Cannot, Rule
from lazymods.state.layouts.site import Array, Refusal, Site


class _Projection(NamedTuple):
    flax: str
    heads: str  # the attribute that counts its heads
    weights: tuple[str, ...]
    biases: tuple[str, ...]


_INPUTS = tuple(
    _Projection(
        flax,
        heads,
        (f"{short}_proj_weight", f"{short}_proj.weight", f"{flax}.weight"),
        (f"{short}_proj.bias", f"{flax}.bias"),
    )
    for flax, heads, short in (
        ("query", "num_heads", "q"),
        ("key", "num_kv_heads", "k"),
        ("value", "num_kv_heads", "v"),
    )
)
_OUTPUTS = ("out_proj", "o_proj", "out")
_OUTPUT = _Projection(
    "out", "num_heads", tuple(f"{name}.weight" for name in _OUTPUTS), tuple(f"{name}.bias" for name in _OUTPUTS)
)

_BIAS_KV = Cannot(
    "bias_k|bias_v",
    "a learned key and value (add_bias_kv=True)",
    "add_bias_kv=False: nnx.MultiHeadAttention attends to the given keys only",
    "torch.nn.MultiheadAttention(64, 8)  # without add_bias_kv",
)
_SOUND = "lm.load(model, path)  # of a sound copy of the file"
_ONE_WIDTH = (
    "one width for keys and values: nnx.MultiHeadAttention has in_kv_features for both",
    "torch.nn.MultiheadAttention(64, 8, kdim=32, vdim=32)  # one width for both",
)


class Attention(Rule):
    """``torch.nn.MultiheadAttention`` and ``nnx.MultiHeadAttention``."""

    cannot: Sequence[Cannot] = (_BIAS_KV,)
    owns: frozenset[str] = frozenset(("query", "key", "value", "out"))

    def read(self, site: Site, file: TorchFile) -> None:
        """Cut the fused projections in three, and give every projection its heads."""
        weights = self._thirds(site, file, "in_proj_weight", 2)
        biases = self._thirds(site, file, "in_proj_bias", 1)
        for i, projection in enumerate(_INPUTS):
            weight = weights[i] if weights else _first(site, file, projection.weights)
            bias = biases[i] if biases else _first(site, file, projection.biases)
            self._give(site, file, projection, weight, bias)
        weight = _first(site, file, _OUTPUT.weights)
        if weight is not None and weight.value.ndim == 3 and not _stacked(site, weight, 2):
            file.refuse(site, weight.sources[0], _other_rank(site, file, weight, "out.kernel", 2))
        elif weight is not None:
            heads, rank = site.get(_OUTPUT.heads), 2 + _stacked(site, weight, 2)
            file.put(
                site, "out.kernel", weight.map(lambda a: _split(a.swapaxes(-1, -2), -2, heads) if a.ndim == rank else a)
            )
        bias = _first(site, file, _OUTPUT.biases)
        if bias is not None:
            file.put(site, "out.bias", bias)
        self._check_widths(site, file)

    def _thirds(self, site: Site, file: TorchFile, entry: str, rank: int) -> list[Part]:
        part = file.take(site, entry)
        if part is None:
            return []
        axis = _stacked(site, part, rank)
        if part.value.ndim > rank + axis:
            file.refuse(site, part.sources[0], _other_rank(site, file, part, "", rank))
            return []
        rows = part.value.shape[axis] if part.value.ndim else 0
        if rows % 3 == 0 and rows:
            return [Part(third, part.sources) for third in np.split(part.value, 3, axis)]
        got = f"shape {part.value.shape}"
        refusal = Refusal(got, "queries, keys and values, one below the other, equally many rows each", _SOUND)
        file.refuse(site, part.sources[0], refusal)
        return []

    def _give(self, site: Site, file: TorchFile, to: _Projection, weight: Part | None, bias: Part | None) -> None:
        heads = site.get(to.heads)
        for entry, part, rank in (("kernel", weight, 2), ("bias", bias, 1)):
            if part is None:
                continue
            name, axis = f"{to.flax}.{entry}", _stacked(site, part, rank)
            if part.value.ndim != rank + axis:
                if len(site.shape(name) or ()) == part.value.ndim:  # it would fit, and be another's
                    file.refuse(site, part.sources[0], _other_rank(site, file, part, name, rank))
                    continue
                file.put(site, name, part)
            elif part.value.shape[axis] % heads:
                got = f"{part.value.shape[axis]} {to.flax} features for {to.heads}={heads}"
                refusal = Refusal(
                    got, "features that the heads divide", f"{to.heads}=8  # as many as the file was trained with"
                )
                file.refuse(site, part.sources[0], refusal)
            else:
                whole = part.map(lambda a: a.swapaxes(-1, -2)) if rank == 2 else part
                file.put(site, name, whole.map(lambda a: _split(a, -1, heads)))

    def _check_widths(self, site: Site, file: TorchFile) -> None:
        key, value = (file.entries.get(site.name(f"{n}.kernel")) for n in ("key", "value"))
        if key is None or value is None or key.shape[-3:-2] == value.shape[-3:-2]:
            return
        sources = file.sources[site.name("value.kernel")]
        got = f"keys of width {key.shape[-3]} and values of width {value.shape[-3]}"
        file.refuse(site, sources[0], Refusal(got, *_ONE_WIDTH))

    def write(self, site: Site) -> tuple[dict[str, Array], list[str]]:
        """Fuse the projections, unless keys have another width."""
        names = [f"{p}.{e}" for p in ("query", "key", "value", "out") for e in ("kernel", "bias")]
        values = {name: site.value(name) for name in names}
        found = {name: value for name, value in values.items() if value is not None}
        entries = self._apart(site, found) or self._fused(site, found)
        kernel = found["out.kernel"]
        entries[_named(site, _OUTPUT.weights)] = kernel.reshape(-1, kernel.shape[-1]).T
        if "out.bias" in found:
            entries[_named(site, _OUTPUT.biases)] = found["out.bias"]
        return {site.torch_name(k): v for k, v in entries.items()}, [site.name(name) for name in found]

    def held_in(self, site: Site, torch_name: str, taken: list[str]) -> list[str]:
        """Return the kernels or the biases of the projections that are in an entry of PyTorch's."""
        entry = torch_name.removeprefix(site.prefix)
        kind = "bias" if "bias" in entry else "kernel"
        named = [p for p in (*_INPUTS, _OUTPUT) if entry in (*p.weights, *p.biases)] or _INPUTS
        return [name for p in named if (name := site.name(f"{p.flax}.{kind}")) in taken]

    def _fused(self, site: Site, found: dict[str, Array]) -> dict[str, Array]:
        self._check(site, found)
        weights = [_flat(found[f"{p.flax}.kernel"]) for p in _INPUTS]
        out: dict[str, Array] = {}
        if weights[0].shape == weights[1].shape:
            out["in_proj_weight"] = np.concatenate(weights)
        else:
            out |= {p.weights[0]: weight for p, weight in zip(_INPUTS, weights, strict=True)}
        if "query.bias" in found:
            out["in_proj_bias"] = np.concatenate([found[f"{p.flax}.bias"].reshape(-1) for p in _INPUTS])
        return out

    def _apart(self, site: Site, found: dict[str, Array]) -> dict[str, Array]:
        """Write projections that are layers of their own, if that is what is asked for; else nothing."""
        names = site.names or ()
        if not any(site.torch_name(entry) in names for p in _INPUTS for entry in p.weights):
            return {}
        if any(site.torch_name(entry) in names for entry in ("in_proj_weight", "in_proj_bias")):
            return {}  # as PyTorch has them if keys have another width
        self._check_ranks(found)
        out = {_named(site, p.weights): _flat(found[f"{p.flax}.kernel"]) for p in _INPUTS}
        biased = [p for p in _INPUTS if f"{p.flax}.bias" in found]
        return out | {_named(site, p.biases): found[f"{p.flax}.bias"].reshape(-1) for p in biased}

    def _check(self, site: Site, found: dict[str, Array]) -> None:
        widths = {n: site.get(n) for n in ("in_features", "qkv_features", "out_features")}
        heads = {n: site.get(n) for n in ("num_heads", "num_kv_heads")}
        if len(set(widths.values())) > 1 or len(set(heads.values())) > 1 or site.get("normalize_qk"):
            told = ", ".join(
                f"{k}={v}" for k, v in (widths | heads | {"normalize_qk": site.get("normalize_qk")}).items()
            )
            raise Refusal(
                told,
                "one embed_dim, one number of heads and no norms: torch.nn.MultiheadAttention has no more",
                "nnx.MultiHeadAttention(8, 64, rngs=rngs)  # no qkv_features, out_features, num_kv_heads, normalize_qk",
            )
        self._check_ranks(found)

    def _check_ranks(self, found: dict[str, Array]) -> None:
        ranks = {"query.kernel": 3, "key.kernel": 3, "value.kernel": 3, "out.kernel": 3}
        for name, rank in ranks.items():
            if name not in found or found[name].ndim != rank:
                got = f"no {name}" if name not in found else f"{name} of shape {found[name].shape}"
                raise Refusal(
                    got,
                    "a kernel with one axis of heads",
                    "nnx.List([make_block(rngs) for _ in range(n)])  # layers that are not stacked",
                )


def _stacked(site: Site, part: Part, rank: int) -> int:
    """Return how many first axes of an array are stacked layers, which the model has too."""
    extra = part.value.ndim - rank
    return extra if extra > 0 and len(site.shape("query.kernel") or ()) == 3 + extra else 0


def _other_rank(site: Site, file: TorchFile, part: Part, entry: str, rank: int) -> Refusal:
    """Say what to write for an entry of one axis more or less than PyTorch has."""
    shape, name = part.value.shape, part.sources[0]
    got, needed = f"shape {shape}", f"{rank} {'axis' if rank == 1 else 'axes'}, as PyTorch has"
    if set(shape[rank:]) == {1}:  # a 1x1 convolution
        return Refusal(got, needed, without_ones((file.tensors[name].name, name), shape[:rank]))
    flax = _as_in_flax(site, entry, shape)
    if flax is not None:
        rules = [f'(r"^{re.escape(name)}$", "{site.name(entry)}")']
        if flax != (0, 1, 2):
            rules.append(f'lm.rules.Transpose(r"{re.escape(site.name(entry))}$", axes={flax})')
        return Refusal(got, needed, f"rename=[{', '.join(rules)}]  # with an axis of heads")
    levels = [name[: i + 1] for i, sign in enumerate(name) if sign == "."]
    stack = next((level for level in levels if _are_stacked(file, level, shape[0])), None)
    if stack is not None:
        module = re.escape(stack.removesuffix("."))
        line = rf'rename=[lm.rules.Unstack(r"\b{module}[.]", into="{stack}{{i}}.")]'
        line += f"  # for a list of {shape[0]} in the model"
    else:
        line = _SOUND
    return Refusal(got, needed, line)


def _as_in_flax(site: Site, entry: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the order that the axes of an entry have to get for Flax, if one of them is that of the heads."""
    heads = site.get("num_heads")
    if len(shape) != 3 or not entry.endswith(".kernel"):
        return None
    if shape[1] == heads:  # features, heads, features of a head, as XLNet has all four
        return (1, 2, 0) if entry == "out.kernel" else (0, 1, 2)
    return (0, 1, 2) if entry == "out.kernel" and shape[0] == heads and shape[1] != shape[2] else None


def _are_stacked(file: TorchFile, prefix: str, length: int) -> bool:
    """Whether all that the file has below a name may be stacks of one length."""
    shapes = [tensor.shape for name in file.tensors if name.startswith(prefix) and (tensor := file.tensors[name])]
    return len(shapes) > 1 and all(shape[:1] == (length,) for shape in shapes)


def _first(site: Site, file: TorchFile, entries: tuple[str, ...]) -> Part | None:
    for entry in entries:
        part = file.take(_of(site, entry), entry.rpartition(".")[2])
        if part is not None:
            return part
    return None


def _named(site: Site, entries: tuple[str, ...]) -> str:
    """Return that of several names which is to be written; the last is Flax's word, and the first but it PyTorch's."""
    wanted = [entry for entry in entries if site.torch_name(entry) in (site.names or ())]
    return wanted[0] if wanted else entries[0]


def _flat(kernel: Array) -> Array:
    """Return a projection's kernel as ``nn.Linear`` has it, the heads in one axis."""
    return kernel.reshape(kernel.shape[0], -1).T


def _of(site: Site, entry: str) -> Site:
    """The site of a projection that is a module of its own in PyTorch."""
    module, dot, _ = entry.rpartition(".")
    return dataclasses.replace(site, prefix=f"{site.prefix}{module}{dot}")


def _split(array: Array, axis: int, heads: int) -> Array:
    """Split an axis into heads and features of a head; a view."""
    axis %= array.ndim
    if array.shape[axis] % heads:
        return array
    shape = array.shape
    return array.reshape(*shape[:axis], heads, shape[axis] // heads, *shape[axis + 1 :])


ATTENTION = Attention()
