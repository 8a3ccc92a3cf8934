"""How a call runs a program: all that is known before the call.

A :class:`CallPlan` says in what order a program takes the values of a call, and where its outputs are written. A
:class:`FastPath` says how to see that another call is like the last one, so that it may follow the same plan at once.
"""

from __future__ import annotations

import collections
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from lazymods._compat import jit as _compat_jit
from lazymods._objects.tokens import TokenKind, kind_of_type
from lazymods.compile.arguments import Arguments, is_input
from lazymods.compile.binding import Binding
from lazymods.compile.branching import BranchingProgram
from lazymods.compile.captures import CaptureCheck, Captures
from lazymods.compile.given import layout
from lazymods.compile.launch import Launcher
from lazymods.compile.program import OtherSignatureError, Program, getter
from lazymods.compile.records import Effects, Out
from lazymods.compile.replay import result_of
from lazymods.compile.trace import Body, Place, write


class CallPlan:
    """How a program is called: which of a call's values it takes in what order, and where it writes."""

    __slots__ = ("_at", "_launch", "_moves", "_record", "_writers", "branches", "impls", "order", "program")

    def __init__(self, program: Program | BranchingProgram, call: Binding) -> None:
        self.program: Any = program
        self.branches: bool = isinstance(program, BranchingProgram)
        self._at = program.at
        self._record: Any = None
        self._launch: Any = None
        if not self.branches:
            self._record = self.program.record
            leaf_of = {target: leaf for leaf, target in enumerate(program.takes, call.inputs)}
            writes = {leaf_of[target]: out.number for target, out in self._record.writes if target in leaf_of}
            self._launch = Launcher(self.program, call.inputs + len(leaf_of), call.inputs, writes)
        order = [*range(call.inputs), *(call.places[call.inputs + program.at[t]] for t in program.takes)]
        self.order: Callable[[Sequence[Any]], tuple[Any, ...]] | None = None
        if order != list(range(call.count)):
            self.order = operator.itemgetter(*order, 0, 0)
        where = {place: number for number, place in enumerate(order)}
        impls = [(where[call.places[n]], impl) for n, impl in call.impls.items() if call.places[n] in where]
        self.impls: list[tuple[int, Any]] = impls
        self._moves = self.order is not None or bool(self.impls)
        self._writers: dict[Effects, Any] = {}

    def leaves(self, values: list[Any]) -> Any:
        """Return the program's leaves; ``values`` may be changed.

        Raises:
            OtherSignatureError: If a typed key is none any more.
        """
        if self.order is not None:
            values = list(self.order(values))
            del values[-2:]  # an itemgetter of one number would return no tuple, and there may be no other
        if self.impls and not _compat_jit.unwrap_keys(values, self.impls):
            raise OtherSignatureError
        return values

    def run(self, values: list[Any], variables: Sequence[Any], make_body: Callable[[], Body] | None) -> Any:
        """Run the program for a call that is simple; return the record if more is to be done.

        Args:
            values: All values; may be changed.
            variables: All Variables, and then the places of captured objects that hold arrays.
            make_body: Returns the body of the call, for a program that has branches.
        """
        if self._moves:
            values = self.leaves(values)
        if self.branches:
            record, outputs = self.program(values, make_body)
        else:
            record, outputs = self._record, self._launch(values)
        if not record.is_plain:
            return record, outputs
        if record.writes:
            get_targets, get_outputs = self._writers.get(record) or self._writer(record)
            put = _compat_jit.SET_RAW if type(variables[-1]) is not Place else write
            _exhaust(map(put, get_targets(variables), get_outputs(outputs)))
            if record.passes_on:
                _compat_jit.Watch.mark = object()
        out = record.out
        return None, (outputs[out.number] if type(out) is Out else result_of(record, outputs))

    def _writer(self, record: Effects) -> Any:
        made = getter([self._at[t] for t, _ in record.writes]), getter([out.number for _, out in record.writes])
        self._writers[record] = made  # by the record itself: one whose path another thread has added first goes away
        return made


_exhaust = collections.deque(maxlen=0).extend


class FastPath:
    """The call that was last: how to see that another is like it, and its plan.

    Attributes:
        types: The classes of the arguments, positional ones first.
        keywords: The names of the keyword arguments.
        arrays: The arguments that are inputs: all of a slice, or one by one as ``(number, treedef, layout)``; the
            treedef is None for one that is no pytree.
        roots: ``(number, graph)`` of each nnx object, the graph weakly; those that the function closes over are
            counted after the arguments.
        capture_check: Tells what the function closes over; None if that is nothing.
        signature: The shapes and dtypes of the inputs, for a function that is called with several; else None.
        plan: What to do.
    """

    __slots__ = ("arrays", "capture_check", "keywords", "plan", "roots", "signature", "types")

    def __init__(
        self, args: tuple[Any, ...], keywords: tuple[str, ...], moved: tuple[str, ...], call: Binding, plan: CallPlan
    ) -> None:
        self.types: list[type] = [*map(type, args)]
        self.keywords: tuple[str, ...] = keywords
        self.plan: CallPlan = plan
        self.capture_check: CaptureCheck | None = None
        self.signature: list[Any] | None = None
        graphs = iter(map(weakref.ref, call.graphs))
        count = len(args) - len(keywords)
        names = (*moved, *sorted(set(keywords) - set(moved)))  # as in the pytree of the arguments
        by_name = [count + keywords.index(name) for name in names]
        inputs: list[tuple[int, Any, Any]] = []
        self.roots: list[tuple[int, Any]] = []
        for number in (*range(count), *by_name):
            if kind_of_type(self.types[number]) is TokenKind.NODE:
                self.roots.append((number, next(graphs)))
            else:
                whole = is_input(self.types[number])
                structure, keys = (None, None) if whole else (jax.tree.structure(args[number]), layout(args[number]))
                inputs.append((number, structure, keys))
        self.roots += enumerate(graphs, len(args))
        start = len(args) - len(inputs)
        plain = all(treedef is None for _, treedef, _ in inputs)  # == would ask a treedef, which is for treedefs only
        ends = plain and [number for number, _, _ in inputs] == list(range(start, len(args)))
        self.arrays: Any = slice(start, None) if ends else inputs

    def gather(self, args: tuple[Any, ...]) -> list[Any] | None:
        """Return the inputs among the arguments; None if a pytree is another."""
        values: list[Any] = []
        for number, treedef, keys in self.arrays:  # type: ignore[union-attr]
            if treedef is None:
                values.append(args[number])
            else:
                leaves, found = jax.tree.flatten(args[number])
                if found != treedef or layout(args[number]) != keys:
                    return None
                values += leaves
        return values


def fast_path_of(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    arguments: Arguments,
    call: Binding,
    plan: CallPlan,
    captures: Captures,
) -> FastPath | None:
    """Return the fast path for calls like this one; None if there is none."""
    if arguments.variables or arguments.statics or not call.is_simple or not plan.program.can_be_kept:
        return None
    if plan.program.is_hopeless if plan.branches else plan.program.record.given:
        return None
    if any(_compat_jit.is_reference(array) for array in arguments.arrays):  # which of them are the same is in the key
        return None
    given = (*args, *kwargs.values())
    whole = sum(kind_of_type(type(value)) is TokenKind.NODE for value in given)
    if whole != len(arguments.roots):  # some are inside pytrees
        return None
    fast = FastPath(given, tuple(kwargs), arguments.moved, call, plan)
    fast.capture_check = captures.capture_check(call.captured)
    return fast
