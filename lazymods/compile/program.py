"""From a body to a compiled program: the one place where ``jax.jit`` is applied.

:func:`compile_body` traces a :class:`~lazymods.compile.trace.Body` once and returns a :class:`Program`, which is called
with the leaves and returns what the body recorded, and the outputs. The program is for the signature that it
was traced at. At any other, be it a shape, a dtype or a setting of JAX that a trace depends on, ``jax.jit`` traces
again, which the program answers with :class:`OtherSignatureError`: whoever holds programs then finds or makes another.
So ``jax.jit``'s own check of signatures, in C++, is the only one that a call pays for.

Where arrays are is no part of a signature, unless a mesh has explicit axes. For each placement on a mesh
(:mod:`lazymods.compile.placement`), a program has an executable of its own.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Literal

from lazymods import _compat
from lazymods._compat import jit as _compat_jit
from lazymods._compat import tracing
from lazymods._counts import COUNTS
from lazymods._recording import inside
from lazymods.compile.placement import Placement, Stay, placement_of, sharding_in, spec_of, stays_of
from lazymods.compile.records import Effects
from lazymods.compile.trace import Body, Place, is_beside

_PLACEMENTS = 16  # executables that a program keeps


class OtherSignatureError(Exception):
    """The program was called with leaves, or under settings of JAX, that it was not traced with (private)."""


class MoreReadError(Exception):
    """A trace has read more of an object than was known to be read: the call is to start anew (private)."""


class Tape:
    """A jaxpr, some of whose inputs nothing is computed of, and some of whose outputs nobody wants.

    Args:
        closed: The closed jaxpr.
        outputs: The numbers of the outputs that are wanted.
        inputs: The numbers of the inputs that are given.
        adopted: The numbers of the constants that are given after those.

    Attributes:
        closed: The closed jaxpr.
        jaxpr: The jaxpr.
        constants: Its other constants.
        invars: What the inputs that are given are in the jaxpr.
    """

    def __init__(self, closed: Any, outputs: Sequence[int], inputs: Sequence[int], adopted: Sequence[int]) -> None:
        self.closed: Any = closed
        self._outputs = list(outputs)
        self._inputs, self._adopted = list(inputs), list(adopted)
        self._as_they_are = self._inputs == list(range(len(closed.in_avals))) and not self._adopted
        moved = set(adopted)
        self._consts = [None if n in moved else c for n, c in enumerate(closed.consts)]
        self.constants: list[Any] = [c for n, c in enumerate(closed.consts) if n not in moved]
        self.invars: list[Any] = [closed.jaxpr.invars[n] for n in inputs] + [closed.jaxpr.constvars[n] for n in adopted]
        if moved:
            self.closed = None  # it would keep the moved constants alive
        self.jaxpr: Any = closed.jaxpr

    def keep(self, outputs: Sequence[int]) -> None:
        """Let only these outputs, by number, be wanted."""
        self._outputs = list(outputs)

    def out_avals(self) -> list[Any]:
        """Return the types of the outputs that are wanted."""
        return [self.jaxpr.outvars[number].aval for number in self._outputs]

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Run it in the current trace."""
        consts = self._consts
        if not self._as_they_are:
            given = dict(zip(self._inputs, inputs, strict=False))
            consts = list(consts)
            for number, value in zip(self._adopted, inputs[len(self._inputs) :], strict=True):
                consts[number] = value
            inputs = [given[n] if n in given else _zeros(v.aval) for n, v in enumerate(self.jaxpr.invars)]
        with tracing.public_errors():  # jax runs it without compiling, to tell where a nan came from
            out = eval_jaxpr(self.jaxpr, consts, *inputs)
        return [out[i] for i in self._outputs]


class Program:
    """A compiled function of flat arrays, at one signature.

    Args:
        tape: How it computes them.
        record: What the function does besides.
        takes: See below.
        inputs: How many leaves it takes.
        donate: Those that are donated, by number.
        stays: Outputs that take the place of a leaf.
        anyones: Leaves, by number, that are not known from the call before: arguments, and arrays in attributes.

    Attributes:
        record: What the function does besides computing arrays.
        launch: Does the same as calling the program, and returns the outputs alone.
        tape: How it computes them.
        takes: Which targets of the body the leaves after the arguments are the values of, by number; those that it
            adopted count after its own.
        donated: The leaves that are donated, by number.
        order: The order in which the leaves are passed to what is compiled.
        at: By number of a body's target that it takes or writes: the number of that target in every call for which
            the program is kept.
        ran: Whether it ran, and so is compiled.
        calls_python: Whether it calls Python functions while it runs. They may raise when it has been started: it is
            waited for, and nothing is donated to it, so that the state is as before.
        can_be_kept: Whether it depends on nothing but its leaves and constants: no tracer of a trace around it, and
            no setting of JAX that the function has changed while it was traced.
    """

    def __init__(
        self,
        tape: Tape,
        record: Effects,
        takes: Sequence[int],
        inputs: int,
        donate: Sequence[int],
        stays: Sequence[Stay] = (),
        anyones: Sequence[int] = (),
    ) -> None:
        self.tape: Tape = tape
        self.record: Effects = record
        self.takes: Sequence[int] = takes
        self.donated: tuple[int, ...] = tuple(donate)
        self.at: dict[int, int] = {target: n for n, target in enumerate(takes)}
        self.ran = False
        self.can_be_kept: bool = not any(map(_compat.is_tracer, tape.constants))
        self.calls_python: bool = inside.jaxpr_calls_python(tape.jaxpr)
        self._traced: Any = None
        self._mark: Any = None
        self._twins: Sequence[tuple[int, int]] = ()
        self.order: Sequence[int] = range(inputs)
        self._placed: dict[tuple[Any, Placement], Any] = {}
        self.launch: Any
        if donate:
            kept = [i for i in range(inputs) if i not in set(donate)]
            self.order = [*donate, *kept]
            self._moving, self._still = getter(donate), getter(kept)
            self._run: Any = jax.jit(self._divided, donate_argnums=(0,))
            self.launch = self._launch_donating
            kinds = [(v.aval.shape, v.aval.dtype) for v in tape.invars]
            self._twins = [(a, d) for a in anyones for d in donate if a != d and kinds[a] == kinds[d]]
        else:
            self._run = jax.jit(self._flat)
            self.launch = self._launch_and_wait if self.calls_python else self._launch if stays else self._run
        places = {leaf: place for place, leaf in enumerate(self.order)}
        self._stays: Sequence[Stay] = [Stay(places[leaf], out, ndim) for leaf, out, ndim in stays]
        self._mesh = inside.mesh_in(tape.jaxpr) if stays else None

    def __call__(self, leaves: Sequence[Any]) -> tuple[Effects, Sequence[Any]]:
        """Run the program.

        Args:
            leaves: Arrays, or whatever ``jax.jit`` takes for them.

        Returns:
            What to do besides, and the outputs.

        Raises:
            OtherSignatureError: If the program is for other leaves or another setting.
        """
        return self.record, self.launch(leaves)

    def _launch(self, leaves: Sequence[Any]) -> Sequence[Any]:
        return self._jitted(leaves)(leaves)

    def _launch_and_wait(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run it; raise what a Python function raises that it calls, before its outputs are written anywhere."""
        return tracing.waited(self._launch(leaves))

    def _launch_donating(self, leaves: Sequence[Any]) -> Sequence[Any]:
        if self._mark is not _compat_jit.Watch.mark:  # else the leaves to donate are what a program returned
            self._mark = _compat_jit.Watch.mark
            if has_repeats(leaves):
                leaves = _unshared(leaves, self.donated)
        elif self.donates_input(leaves):
            leaves = _unshared(leaves, self.donated)
        moving, still = self._moving(leaves), self._still(leaves)
        return self._jitted(moving, still)(moving, still)

    def _jitted(self, *arguments: Any) -> Any:
        """Return what ``jax.jit`` made of the program for arguments that are where these are."""
        if not self._stays:
            return self._run
        flat, treedef = jax.tree.flatten(arguments)
        placement = placement_of(flat, self._stays, self._mesh)
        if placement is None:
            return self._run
        found = self._placed.get((treedef, placement))
        return found or self._placed.setdefault((treedef, placement), self._jitted_for(treedef, placement))

    def _jitted_for(self, treedef: Any, placement: Placement) -> Any:
        before: list[Any] = [None] * treedef.num_leaves
        after: list[Any] = [None] * len(self.tape.out_avals())
        for stay, start, end in zip(self._stays, *placement, strict=True):
            before[stay.leaf], after[stay.output] = start, end
        function, donated = (self._divided, 0) if self.donated else (self._flat, ())
        if self.ran:
            COUNTS.add(compiles=1)
        while len(self._placed) >= _PLACEMENTS:
            self._placed.pop(next(iter(self._placed)), None)
        return jax.jit(
            function, in_shardings=treedef.unflatten(before), out_shardings=after, donate_argnums=donated
        )

    def donates_input(self, leaves: Sequence[Any]) -> bool:
        """Whether an array that is donated is also where anyone may put one: in an argument, or an attribute."""
        return any(leaves[place] is leaves[donated] for place, donated in self._twins)

    def executable(self, leaves: Sequence[Any]) -> _compat_jit.Executable | None:
        """Return what is compiled for these leaves, with its arguments in this order; see ``executable_of``."""
        arguments = self.arranged(leaves)
        return _compat_jit.executable_of(self._jitted(*arguments), *arguments)

    def trace(self, leaves: Sequence[Any]) -> Any:
        """Return what ``jax.jit`` traces of the program for these leaves."""
        arguments = self.arranged(leaves)
        return self._jitted(*arguments).trace(*arguments)

    def arranged(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments with which what ``jax.jit`` made of the program is called for these leaves."""
        return (self._moving(leaves), self._still(leaves)) if self.donated else (leaves,)

    def leaf_numbers(self, inputs: int) -> list[int]:
        """Return which leaves of a call the program takes, in its order; ``inputs`` of them are arguments."""
        return [*range(inputs), *(inputs + self.at[target] for target in self.takes)]

    def _flat(self, leaves: Sequence[Any]) -> list[Any]:
        flat = jax.tree.leaves(leaves)
        if any(map(_compat.is_tracer, flat)) or not flat:
            signature = signature_of(flat)
            self._traced = self._traced or signature
            if self._traced != signature:
                raise OtherSignatureError
        elif jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            raise OtherSignatureError
        return self.tape(flat)

    def _divided(self, moving: Sequence[Any], still: Sequence[Any]) -> list[Any]:
        leaves: list[Any] = [None] * (len(moving) + len(still))
        for number, leaf in zip(self.order, [*moving, *still], strict=True):
            leaves[number] = leaf
        return self._flat(leaves)


def _zeros(aval: Any) -> Any:
    """Return what stands for an input of which nothing is computed that is wanted: XLA leaves it out."""
    return jax.lax.full(aval.shape, 0, aval.dtype, sharding=sharding_in(aval))


def signature_of(leaves: Sequence[Any]) -> Hashable:
    """Return what else a program depends on: shapes, dtypes, shardings in types, and the settings of JAX."""
    flat, treedef = jax.tree.flatten(leaves)
    return treedef, tuple(map(jax.typeof, flat)), _compat_jit.trace_context()


def getter(numbers: Sequence[int]) -> Any:
    """Return a function of a sequence that returns the items of these numbers as a sequence, in C."""
    start = numbers[0] if numbers else 0
    if list(numbers) == list(range(start, start + len(numbers))):  # an itemgetter of many takes ten times as long
        return operator.itemgetter(slice(start, start + len(numbers)))
    return operator.itemgetter(*numbers)


def has_repeats(leaves: Sequence[Any]) -> bool:
    """Whether an array is among the leaves twice."""
    return len(set(map(id, leaves))) != len(leaves)


def _unshared(leaves: Sequence[Any], donated: Sequence[int]) -> list[Any]:
    """Copy arrays that are donated and passed a second time."""
    out, seen = list(leaves), {id(v) for i, v in enumerate(leaves) if i not in set(donated)}
    for number in donated:
        if id(leaves[number]) in seen:
            out[number] = jax.numpy.copy(leaves[number])
        seen.add(id(leaves[number]))
    return out


def compile_body(body: Body, leaves: Sequence[Any], *, donate: bool = False) -> Program:
    """Trace a body and make its program.

    Args:
        body: The function and the objects of one call.
        leaves: Its leaves, as they will be passed to the program.
        donate: Donate the leaves that are written.

    Returns:
        The program. If the body initialized a lazy layer, the program takes the new values after the leaves.

    Raises:
        MoreReadError: If the body has read what nobody saw; from now on all counts as read.
    """
    start, settings = time.perf_counter(), _compat_jit.trace_context()
    closed = jax.make_jaxpr(body)(list(leaves))
    record = body.record
    assert record is not None  # make_jaxpr has run the body
    COUNTS.add(traces=1, trace_time=time.perf_counter() - start)
    flat = [len(jax.tree.leaves(leaf)) for leaf in leaves]
    starts = list(itertools.accumulate(flat, initial=0))
    takes = body.kept
    if len(takes) < len(body.targets) and _uses_others(closed.jaxpr, body, starts):
        body.count_all_as_read()
        raise MoreReadError
    taken = [*range(body.inputs), *(body.inputs + target for target in takes)]
    places = [place for leaf in taken for place in range(starts[leaf], starts[leaf + 1])]
    begins = [*itertools.accumulate((flat[leaf] for leaf in taken), initial=0)]
    inputs = [begin if flat[leaf] == 1 else None for leaf, begin in zip(taken, begins, strict=False)]  # if there is one
    held = dict(zip(takes, itertools.starmap(range, itertools.pairwise(begins[body.inputs :])), strict=True))
    numbers = {id(c): n for n, c in enumerate(closed.consts)}
    initialized = enumerate((id(raw) for _, raw in body.adopted), len(body.targets))
    adopted = [(target, numbers[mark]) for target, mark in initialized if mark in numbers]
    takes = [*takes, *(target for target, _ in adopted)]
    inputs += range(len(places), len(places) + len(adopted))
    held |= {target: range(n, n + 1) for n, (target, _) in enumerate(adopted, len(places))}
    input_of_target = {target: inputs[body.inputs + i] for i, target in enumerate(takes)}
    if adopted:
        places += range(len(closed.in_avals), len(closed.in_avals) + len(adopted))
        closed = _with_inputs_for(closed, [constant for _, constant in adopted])
    tape = Tape(closed, (), places, ())
    ins, outs = tape.invars, closed.jaxpr.outvars
    unchanged = record.find_unchanged(outs, ins, input_of_target)
    avals = [v.aval for v in outs]
    pairs = [(input_of_target.get(target), out.number) for target, out in record.writes]
    targets = dict(enumerate([*body.targets, *(target for target, _ in body.adopted)]))
    own = [not is_beside(targets.get(target)) for target, _ in record.writes]  # theirs may be held elsewhere
    kept = [pair for n, pair in enumerate(pairs) if n not in unchanged and own[n]]
    tape.keep(record.drop_writes(unchanged))
    donated: list[int] = []
    if donate and None not in inputs and not inside.jaxpr_calls_python(closed):  # else it may fail half way
        donated = sorted({i for i, o in kept if i is not None and ins[i].aval == avals[o]})
    stays = stays_of(record, held, [v.aval for v in ins], tape.out_avals())
    first = len(ins) - len(takes)  # where nothing tells of writes, beside arguments:
    anyones = [*range(first), *(n for n, target in enumerate(takes, first) if isinstance(targets[target], Place))]
    program = Program(tape, record, takes, len(ins), donated, stays, anyones)
    program.can_be_kept = program.can_be_kept and _compat_jit.trace_context() == settings
    return program


def _uses_others(jaxpr: Any, body: Body, starts: Sequence[int]) -> bool:
    """Whether outputs depend on a target that nobody was seen to read, as by ``object.__getattribute__``."""
    kept = {*range(body.inputs), *(body.inputs + target for target in body.kept)}
    used = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not used.isdisjoint(eqn.outvars):
            used.update(v for v in eqn.invars if not isinstance(v, Literal))
    others = (n for n in range(len(starts) - 1) if n not in kept)
    return any(jaxpr.invars[place] in used for n in others for place in range(starts[n], starts[n + 1]))


def _with_inputs_for(closed: Any, constants: Sequence[int]) -> Any:
    """Return a jaxpr in which some constants, by number, are further inputs: it does not keep them alive."""
    count, moved = len(closed.in_avals), set(constants)
    values = [None if i in moved else c for i, c in enumerate(closed.consts)]

    def run(inputs: Sequence[Any]) -> list[Any]:
        consts = list(values)
        for number, value in zip(constants, inputs[count:], strict=True):
            consts[number] = value
        return eval_jaxpr(closed.jaxpr, consts, *inputs[:count])

    specs = map(spec_of, closed.in_avals)
    return jax.make_jaxpr(run)([*specs, *(closed.consts[i] for i in constants)])
