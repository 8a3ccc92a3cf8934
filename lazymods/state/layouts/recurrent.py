"""Recurrent layers: PyTorch's ``LSTM``, ``GRU`` and ``RNN`` in ``nnx.RNN`` and ``nnx.Bidirectional``, and the cells.

PyTorch has a bias for the input and one for the hidden state, Flax one for both: the sum is loaded, and written back as
the input's, with zeros for the other. The GRU's two biases of the candidate do not add up, since the reset gate lies
between them; Flax has the input's only, ``lm.ResetAfterGRUCell`` both. Files without biases give zeros. The activations
are the constructor's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx

from lazymods._gru_cell import ResetAfterGRUCell
from lazymods.state.layouts.axes import channels_first, channels_last, check_rank, stacked_axes
from lazymods.state.layouts.computed import wide
from lazymods.state.layouts.file import Part, TorchFile
from lazymods.state.layouts.rule import Cannot, Rule
from lazymods.state.layouts.site import Array, Refusal, Site

_PROJECTED = Cannot(
    r"weight_hr(_l\d+)?(_reverse)?",
    "a projection of the hidden state (proj_size)",
    "proj_size=0: Flax's cells have no projection",
    "torch.nn.LSTM(3, 4)  # without proj_size",
)
_OTHER_DIRECTION = Cannot(
    r"(weight|bias)_(ih|hh)_l0_reverse",
    "the direction from the end to the beginning, which nnx.RNN does not have",
    "nnx.Bidirectional for two directions",
    "nnx.Bidirectional(nnx.RNN(cell), nnx.RNN(other_cell), rngs=rngs)  # in place of nnx.RNN",
)
_MORE_LAYERS = Cannot(
    r"(weight|bias)_(ih|hh)_l[1-9]\d*(_reverse)?",
    "a layer that the module does not have: it is one, and reads layer 0",
    "one nnx.RNN or nnx.Bidirectional for each layer, in an nnx.Sequential or nnx.List of that name",
    "nnx.Sequential(nnx.RNN(cell), nnx.RNN(other_cell))  # as many as PyTorch has layers",
)


class Cell(Rule):
    """A cell, whose gates PyTorch has one below the other.

    Args:
        inputs: The kernels of the input: one for all gates, or one a gate.
        hidden: Those of the hidden state.
        biases: The biases, or those of the input.
        hidden_biases: Those of the hidden state, if the cell has them apart.
        gates: How many gates there are.
        candidate: Whether the last gate's bias of the hidden state is inside a product, where Flax has none.
    """

    cannot: Sequence[Cannot] = (_PROJECTED,)
    flattens: bool = True

    def __init__(
        self,
        inputs: tuple[str, ...],
        hidden: tuple[str, ...],
        biases: tuple[str, ...],
        hidden_biases: tuple[str, ...] = (),
        *,
        gates: int,
        candidate: bool = False,
    ) -> None:
        self.inputs: tuple[str, ...] = inputs
        self.hidden: tuple[str, ...] = hidden
        self.biases: tuple[str, ...] = biases
        self.hidden_biases: tuple[str, ...] = hidden_biases
        self.gates: int = gates
        self.candidate: bool = candidate
        self.owns: frozenset[str] = frozenset(entry.partition(".")[0] for entry in (*inputs, *hidden, *biases))

    def read(self, site: Site, file: TorchFile) -> None:
        """Cut the gates apart, transpose the kernels, add the biases."""
        weight = self._input(site, file)
        biases = file.take(site, "bias_ih"), file.take(site, "bias_hh")
        kernels = ((self.inputs, weight), (self.hidden, file.take(site, "weight_hh")))
        for entries, part in kernels:
            if part is not None:
                self._cut(site, file, entries, part, 2)
        if not any(biases):
            biases = _zeros(weight), _zeros(weight) if self.hidden_biases else None
        if not self.hidden_biases:
            biases = self._bias(site, file, *biases), None
        for entries, part in zip((self.biases, self.hidden_biases), biases, strict=True):
            if part is not None:
                self._cut(site, file, entries, part, 1)
        if weight is not None and site.get("residual"):
            name = site.torch_name("weight_ih")
            file.refuse(site, name, Refusal("weights of a PyTorch cell, for residual=True", *_NO_RESIDUAL))

    def _input(self, site: Site, file: TorchFile) -> Part | None:
        """Claim the kernel of the input, channels last if ``flatten`` says so."""
        part, sizes = file.take(site, "weight_ih"), site.sizes
        if part is None or sizes is None or part.value.ndim == 0:
            return part
        try:
            return part.map(lambda a: channels_last(a, sizes))
        except Refusal as refusal:
            file.refuse(site, part.sources[0], refusal)
            return None

    def _cut(self, site: Site, file: TorchFile, entries: tuple[str, ...], part: Part, rank: int) -> None:
        extra = stacked_axes(part.value, rank, site, entries[0])
        if extra is None and part.value.ndim > rank:  # the model has no such stack
            for entry in entries:
                file.put(site, entry, part)
            return
        rows = part.value.shape[extra or 0] if part.value.ndim else 0
        if rows % len(entries) or (len(entries) > 1 and not part.value.ndim):
            needed = f"{self.gates} gates, one below the other, equally many rows each"
            refusal = Refusal(
                f"shape {part.value.shape}",
                needed,
                "nnx.LSTMCell(3, 4, rngs=rngs)  # the class that the file was made with",
            )
            for source in part.sources:
                file.refuse(site, source, refusal)
            return
        step = rows // len(entries)
        for i, entry in enumerate(entries):
            cut = (slice(None),) * (extra or 0) + (slice(i * step, (i + 1) * step),)
            gate = part.map(lambda a, cut=cut: a[cut] if a.ndim else a)
            is_matrix = rank == 2 <= part.value.ndim
            file.put(site, entry, gate.map(lambda a: a.swapaxes(-1, -2)) if is_matrix else gate)

    def _bias(self, site: Site, file: TorchFile, given: Part | None, hidden: Part | None) -> Part | None:
        if self.candidate and hidden is not None and hidden.value.ndim:
            rest = hidden.value[..., hidden.value.shape[-1] * (self.gates - 1) // self.gates :]
            if wide(rest).any():
                got = f"numbers other than 0 in its last third, the bias b_hn of shape {rest.shape}"
                file.refuse(site, hidden.sources[0], Refusal(got, *_NO_B_HN))
                return None
        if given is None or hidden is None:
            return given or hidden
        if given.value.shape != hidden.value.shape:
            got = f"shape {hidden.value.shape}, where {given.sources[0]} has {given.value.shape}"
            file.refuse(site, hidden.sources[0], Refusal(got, "two biases of one shape, to be added", _SOUND))
            return None
        return Part(_sum(given.value, hidden.value), given.sources + hidden.sources)

    def write(self, site: Site) -> tuple[dict[str, Array], list[str]]:
        """Put the gates one below the other."""
        if site.get("residual"):
            raise Refusal("residual=True", *_NO_RESIDUAL)
        out: dict[str, Array] = {}
        both = (("bias_ih", self.biases), ("bias_hh", self.hidden_biases))
        for torch, entries in (("weight_ih", self.inputs), ("weight_hh", self.hidden), *both):
            values = [site.value(entry) for entry in entries]
            found = [value for value in values if value is not None]
            for value in found:
                check_rank(value, 1 if torch.startswith("bias") else 2, site)
            if found:
                whole = np.concatenate([value.T for value in found])
                is_flat = torch == "weight_ih" and site.sizes is not None
                out[site.torch_name(torch)] = channels_first(whole, site.sizes or ()) if is_flat else whole
        if not self.hidden_biases:
            out[site.torch_name("bias_hh")] = np.zeros_like(out[site.torch_name("bias_ih")])
        written = (*self.inputs, *self.hidden, *self.biases, *self.hidden_biases)
        return out, [site.name(entry) for entry in written]

    def held_in(self, site: Site, torch_name: str, taken: list[str]) -> list[str]:
        """Return the gates' kernels or biases that are in an entry of PyTorch's."""
        hidden = self.hidden_biases or self.biases
        held = {"weight_ih": self.inputs, "weight_hh": self.hidden, "bias_ih": self.biases, "bias_hh": hidden}
        found = next((entries for torch, entries in held.items() if site.torch_name(torch) == torch_name), ())
        return [site.name(entry) for entry in found]


_SOUND = "lm.load(model, path)  # of a sound copy of the file"
_NO_RESIDUAL = ("residual=False: no cell of PyTorch adds the hidden state", "residual=False  # of nnx.SimpleCell")
_NO_B_HN = (
    "zeros: it stands inside the product with the reset gate, where nnx.GRUCell has no bias",
    "lm.LazyResetAfterGRUCell(hidden_features, rngs=rngs)  # or lm.ResetAfterGRUCell: they have the bias",
)


def _sum(a: Array, b: Array) -> Array:
    """Add; an array to which zeros are added stays the very array, bits and dtype."""
    if not wide(b).any():
        return a
    return wide(a) + wide(b) if wide(a).any() else b


def _zeros(weight: Part | None) -> Part | None:
    """The bias of a file without biases."""
    if weight is None or weight.value.ndim < 2:
        return None
    return Part(np.zeros(weight.value.shape[:-1], weight.value.dtype), ())


class Unrolled(Rule):
    """``nnx.RNN``: its cell reads layer 0 of PyTorch's."""

    cannot: Sequence[Cannot] = (_OTHER_DIRECTION, _MORE_LAYERS, _PROJECTED)

    def inside(self, site: Site, key: Any, child: Any) -> Site:
        """Name a cell of PyTorch's by the layer; others are modules of their own."""
        if key == "cell" and isinstance(child, tuple(CELLS)):
            return site.below(child, key, prefix=site.prefix, suffix=f"_l0{site.suffix}")
        return site.below(child, key)


class BothWays(Rule):
    """``nnx.Bidirectional``: the two ``nnx.RNN`` in it are one module in PyTorch."""

    cannot: Sequence[Cannot] = (_MORE_LAYERS, _PROJECTED)

    def inside(self, site: Site, key: Any, child: Any) -> Site:
        """Give both PyTorch's prefix, and the one that goes backward its suffix; own cells keep their names."""
        suffix = {"forward_rnn": "", "backward_rnn": "_reverse"}.get(key)
        if suffix is None or not isinstance(child, nnx.RNN) or not isinstance(child.cell, tuple(CELLS)):
            return site.below(child, key)
        return site.below(child, key, prefix=site.prefix, suffix=suffix)


def _per_gate(prefix: str, kind: str, gates: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{prefix}{gate}.{kind}" for gate in gates)


CELLS: dict[type, Cell] = {
    nnx.LSTMCell: Cell(
        _per_gate("i", "kernel", ("i", "f_", "g", "o")),
        _per_gate("h", "kernel", ("i", "f", "g", "o")),
        _per_gate("h", "bias", ("i", "f", "g", "o")),
        gates=4,
    ),
    nnx.OptimizedLSTMCell: Cell(("dense_i.kernel",), ("dense_h.kernel",), ("dense_h.bias",), gates=4),
    nnx.GRUCell: Cell(("dense_i.kernel",), ("dense_h.kernel",), ("dense_i.bias",), gates=3, candidate=True),
    ResetAfterGRUCell: Cell(
        ("dense_i.kernel",), ("dense_h.kernel",), ("dense_i.bias",), ("dense_h.bias",), gates=3
    ),
    nnx.SimpleCell: Cell(("dense_i.kernel",), ("dense_h.kernel",), ("dense_i.bias",), gates=1),
}
RNN, BIDIRECTIONAL = Unrolled(), BothWays()
