"""``parity``: the same input through a model and through PyTorch's, and the first layer that differs."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.core import Tracer

from lazymods import _compat, _graph
from lazymods._errors import LazyError, Problem, UninitializedError, located
from lazymods._frames import entry
from lazymods._graph import dotted
from lazymods._layer import lifecycle
from lazymods._model.hooks import unhooked_class
from lazymods._refusals import wrong_argument
from lazymods.porting import reasons
from lazymods.porting.between import Earlier, of_input, other_function
from lazymods.porting.comparing import Kept, Match, compared
from lazymods.porting.pairing import Pair, minimal, pairs
from lazymods.porting.reasons import Reason
from lazymods.porting.report import ParityReport, ParityRow
from lazymods.porting.watching import (
    MODULE,
    Call,
    Run,
    run_model,
    run_torch,
    with_channels_first,
    with_channels_last,
)
from lazymods.state import LoadResult
from lazymods.state.layouts.site import Site

_ROUNDING = 1e-6  # relative differences that layers of a network have anyway


@entry
def parity(
    model: nnx.Module,
    torch_module: Any,
    inputs: Any,
    result: LoadResult | None = None,
    *,
    model_inputs: Any = None,
    tolerance: float = 2e-5,
) -> ParityReport:
    """Run a model and the PyTorch module that it was ported from, and name the first layer that differs.

    Modules are paired by what a load put where, so names and nesting may be others. The outputs of each pair are
    compared, channels last beside channels first; of the first that differs the likely reason is told: the layer's own
    if its inputs agree (a mode, parameters, an epsilon, padding), else what is computed before it (an activation, a
    flatten, a factor, a sum). Both run as they are, in the modes that they are in, and are left unchanged; nothing is
    compiled. The outputs of all layers are held in host memory.

    Args:
        model: The model, initialized or loaded.
        torch_module: The ``torch.nn.Module``.
        inputs: One array or tensor, a tuple of several, or a dict of keyword arguments, as the PyTorch module takes
            them. Maps may have their channels last as well: each side gets them as it takes them.
        result: What ``lm.load`` returned. Without it modules are paired by their names.
        model_inputs: What the model gets instead, if it has other arguments.
        tolerance: Up to which difference two outputs agree, relative to PyTorch's largest value; where either computes
            in a narrower dtype, its rounding counts.

    Returns:
        A report that prints as a table: ``agrees``, ``first``, ``reason``, ``write``, ``rows``, ``notes``.

    Raises:
        UninitializedError: If a parameter of either has no value yet.
        LazyError: Inside a transform or a block of lazy tensors.
        ArgumentError: If ``model`` is no nnx module, or ``torch_module`` no module of PyTorch.
    """
    torch = sys.modules.get(MODULE)
    if not isinstance(model, nnx.Module):
        raise wrong_argument("lm.parity: model", type(model), "an nnx.Module", "lm.parity(model, torch_module, inputs)")
    if torch is None or not isinstance(torch_module, torch.nn.Module):
        line = "lm.parity(model, torch_module, inputs)"
        raise wrong_argument("lm.parity: torch_module", type(torch_module), "a torch.nn.Module", line)
    _check_outside_of_traces(model)
    _check_initialized(model, torch_module)
    with lifecycle.LOCK:
        found = pairs(model, torch_module, None if result is None else result.matched)
        watched = [pair.site.node for pair in found]
        theirs, ours = _run(model, torch_module, inputs, model_inputs, watched, [pair.module for pair in found])
    called = [p for p in found if ours.calls.get(id(p.site.node)) and theirs.calls.get(id(p.module))]
    kept = minimal(called)
    comparison = _Comparison(ours, theirs, tolerance, torch, _moves_from(model, ours, theirs, tolerance))
    for pair, n, mine, other in _in_order(kept, ours, theirs):
        comparison.add(pair, n, mine, other)
    if all(pair.site.path for pair in kept):
        root = Pair(Site(model), "", torch_module)
        whole = Call(ours.inputs, ours.outputs), Call(theirs.inputs, theirs.outputs)
        comparison.add(root, 0, *whole, is_whole=True)
    notes = [*_settings(kept), *map(_note, comparison.suspects), *comparison.misfits]
    notes += _uncompared(model, kept, ours, theirs)
    reason = comparison.reason(model, torch_module)
    return ParityReport(
        tuple(comparison.rows), comparison.first, reason.text, reason.write, tuple(notes), tolerance
    )


def _check_outside_of_traces(model: nnx.Module) -> None:
    traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(nnx.state(model)))
    if traced or _compat.current_trace() is not _compat.eval_trace():
        got = "a call inside a transform, or a block of lazy tensors"
        needed = "values: PyTorch has to run on the same ones"
        raise LazyError(Problem("lm.parity", got, needed, "lm.parity(model, torch_module, x)  # outside of it"))


def _check_initialized(model: nnx.Module, torch_module: Any) -> None:
    needed = "a value: only an initialized model can be compared"
    line = "lm.load(model, torch_module, layout='torch')  # before lm.parity"
    problems = [Problem(name, "no value yet", needed, line) for name in _graph.uninitialized_paths(model)]
    is_lazy, line = sys.modules[MODULE].nn.parameter.is_lazy, "torch_module(x)  # once, before lm.load and lm.parity"
    for name, parameter in torch_module.named_parameters():
        if is_lazy(parameter):
            problems.append(Problem(located(name, "PyTorch"), "no value yet", needed, line))
    if problems:
        raise UninitializedError(*problems)


def _run(
    model: Any, torch_module: Any, inputs: Any, model_inputs: Any, watched: Sequence[Any], others: Sequence[Any]
) -> tuple[Run, Run]:
    """Run both, each on the inputs in a layout that it takes."""
    try:
        theirs = run_torch(torch_module, others, inputs)
    except (RuntimeError, ValueError):  # maps with channels last, perhaps, as the model takes them
        if model_inputs is not None:
            raise
        try:
            theirs = run_torch(torch_module, others, with_channels_first(inputs))
        except (RuntimeError, ValueError):
            theirs = None
        if theirs is None:
            raise
        return theirs, run_model(model, watched, inputs)
    if model_inputs is not None:
        return theirs, run_model(model, watched, model_inputs)
    axis = 1 if theirs.channels is None else theirs.channels
    layouts = [inputs, with_channels_last(inputs, axis)]
    first, second = layouts if theirs.channels is None else reversed(layouts)
    try:
        return theirs, run_model(model, watched, first)
    except Exception as error:
        try:
            return theirs, run_model(model, watched, second)
        except Exception:
            raise error from None


def _moves_from(model: Any, ours: Run, theirs: Run, tolerance: float) -> float:
    """Return from which call on, by its number, the model may have axes in another order than PyTorch.

    That is so of a model that takes its inputs in another order, or has layers with channels where PyTorch has none.
    """
    given = compared(ours.inputs, theirs.inputs, moves=False)
    is_same = given is not None and all(match.agrees(tolerance) for match in given)
    layers = (nnx.Conv, nnx.ConvTranspose, nnx.GroupNorm)
    if not is_same or (theirs.moves_from is None and any(isinstance(n, layers) for _, n in _graph.nodes(model))):
        return 0
    return math.inf if theirs.moves_from is None else theirs.moves_from


def _in_order(found: Sequence[Pair], ours: Run, theirs: Run) -> Iterator[tuple[Pair, int, Call, Call]]:
    """Yield the calls of all pairs, in PyTorch's order."""
    calls = [
        (pair, n, mine, other)
        for pair in found
        for n, (mine, other) in enumerate(
            zip(ours.calls[id(pair.site.node)], theirs.calls[id(pair.module)], strict=False)
        )
    ]
    return iter(sorted(calls, key=lambda call: call[3].order))


class _Failure(NamedTuple):
    """The first call that differs."""

    pair: Pair
    mine: Call
    other: Call
    outputs: list[Match] | None
    is_whole: bool


class _Comparison:
    """The rows, and what is needed to say why the first one differs."""

    def __init__(self, ours: Run, theirs: Run, tolerance: float, torch: Any, moves_from: float) -> None:
        self.rows: list[ParityRow] = []
        self.first: ParityRow | None = None
        self._tolerance = tolerance
        self._torch = torch
        self._moves_from = moves_from
        self.suspects: list[Reason] = []
        self.misfits: list[str] = []
        self._failure: _Failure | None = None
        outputs = compared(ours.outputs, theirs.outputs, moves=moves_from < math.inf)
        self._is_right = outputs is not None and all(match.agrees(tolerance) for match in outputs)
        inputs = compared(ours.inputs, theirs.inputs) or ()
        self._earlier = [Earlier("the model's input", match) for match in inputs if match.agrees(tolerance)]

    def add(self, pair: Pair, n: int, mine: Call, other: Call, *, is_whole: bool = False) -> None:
        """Compare one call; that of the whole model, if it is no layer itself."""
        moves = self._may_move(other)
        matches = compared(mine.outputs, other.outputs, None if is_whole else pair.module, moves=moves)
        if matches is None and self._is_right:  # one side cuts off later what the other does not compute, as padding
            self.misfits.append(f"{pair.path} is not compared: its output is {_shown(mine)}, PyTorch's {_shown(other)}")
            return
        worst = max(matches or (), key=lambda match: match.relative, default=None)
        row = ParityRow(
            path=pair.path,
            layer=unhooked_class(type(pair.site.node)).__name__,
            torch_path=pair.name,
            torch_layer=type(pair.module).__name__,
            call=n,
            shape=_shown(mine),
            difference=math.inf if worst is None else worst.difference,
            relative=math.inf if worst is None else worst.relative,
            agrees=matches is not None and all(match.agrees(self._tolerance) for match in matches),
        )
        self.rows.append(row)
        if self.first is None and not is_whole:
            self._suspect(row, compared(_given(pair, mine), other.inputs, pair.module, moves=moves))
        if self.first is None and row.agrees:
            self._earlier += [Earlier(f"the output of {row.where}", match) for match in matches or ()]
        elif self.first is None:
            self.first, self._failure = row, _Failure(pair, mine, other, matches, is_whole)

    def _may_move(self, other: Call) -> bool:
        """Whether axes may be in another order in a call; the whole model's is the last, and has no number."""
        return self._moves_from < math.inf if other.order < 0 else other.order >= self._moves_from

    def _suspect(self, row: ParityRow, inputs: list[Match] | None) -> None:
        """Note another activation, even one so close that the numbers still agree."""
        for match in inputs or ():
            found = other_function(match, self._earlier) if match.relative > _ROUNDING else None
            if found is not None:
                self.suspects.append(found._replace(text=f"{row.path}: {found.text}"))

    def reason(self, model: Any, torch_module: Any) -> Reason:
        """Say why the first row that differs does."""
        if self.first is None or self._failure is None:
            return Reason("")
        pair, mine, other, outputs, is_whole = self._failure
        if is_whole:
            found = reasons.of_modes(model, torch_module) or self._between(pair, outputs)
            misfit = f"the model's output is {_shown(mine)}, PyTorch's {_shown(other)}"
            return found or (self._unknown("the output") if outputs is not None else Reason(misfit))
        inputs = compared(_given(pair, mine), other.inputs, pair.module, moves=self._may_move(other))
        if inputs is None or all(match.agrees(self._tolerance) for match in inputs):
            found = reasons.of_layer(pair, mine.inputs[0].values.shape if mine.inputs else (), self._torch)
            misfit = f"its output is {_shown(mine)}, PyTorch's {_shown(other)}"
            return found or Reason(reasons.unexplained(pair) if outputs is not None else misfit)
        found = reasons.of_modes(model, torch_module) or self._between(pair, inputs)
        return found or self._unknown(f"the input of {self.first.where}")

    def _between(self, pair: Pair, matches: list[Match] | None) -> Reason | None:
        wrong = next((match for match in matches or () if not match.agrees(self._tolerance)), None)
        return of_input(pair.site.node, pair.path, wrong, self._earlier)

    def _unknown(self, what: str) -> Reason:
        if self.suspects:
            return self.suspects[0]
        before = self._earlier[-1].where if self._earlier else "the model's input"
        return Reason(f"what is computed between {before} and {what}: all before it agrees")


def _given(pair: Pair, call: Call) -> Sequence[Kept]:
    """Return what a layer of the model was given, without masks: what PyTorch adds to scores, Flax selects by."""
    if not isinstance(pair.site.node, nnx.MultiHeadAttention):
        return call.inputs
    return [kept for kept in call.inputs if kept.values.ndim <= call.inputs[0].values.ndim]


def _shown(call: Call) -> str:
    return ", ".join(kept.shown for kept in call.outputs[:2]) or "nothing"


# ---------------------------------------------------------------- notes


def _settings(found: Sequence[Pair]) -> Iterator[str]:
    for pair in found:
        for setting in reasons.settings(pair):
            yield _note(setting._replace(text=f"{pair.path or 'the model'}: {setting.text}"))


def _note(reason: Reason) -> str:
    return f"{reason.text}; write {reason.write}" if reason.write else reason.text


def _uncompared(model: Any, found: Sequence[Pair], ours: Run, theirs: Run) -> Iterator[str]:
    """Say which layers with parameters have no row, and which are not called as often as in PyTorch."""
    for pair in found:
        a, b = len(ours.calls[id(pair.site.node)]), len(theirs.calls[id(pair.module)])
        if a != b:
            yield f"{pair.path or 'the model'} is called {_times(a)}, {pair.name} in PyTorch {_times(b)}"
    compared_paths = [pair.site.path for pair in found]
    left = []
    for path, node in _graph.nodes(model):
        own = any(isinstance(value, nnx.Param) for value in _graph.attributes(node).values())
        if own and isinstance(node, nnx.Module) and not any(path[: len(p)] == p for p in compared_paths):
            left.append(dotted(path) or "what the model itself holds")
    if left:
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        yield f"not compared by themselves: {', '.join(left[:5])}{more}"


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"
