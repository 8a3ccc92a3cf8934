"""Functions whose Python decides on the values of arrays: a program for each path, found again by the decisions.

A :class:`BranchingProgram` is called like a :class:`~lazymods.compile.program.Program`, and also gets the body of this
call. If a decision goes a way that has no program yet, it runs that body, on copies of the call's objects. So it keeps
no model.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from lazymods._compat import jit as _compat_jit
from lazymods._compat.tracing import aval_of
from lazymods._counts import COUNTS
from lazymods.compile.paths import Paths
from lazymods.compile.placement import settled, stays_of
from lazymods.compile.program import MoreReadError, OtherSignatureError, signature_of
from lazymods.compile.records import Effects
from lazymods.compile.trace import Body


class _Present(threading.local):
    make_body: Callable[[], Body] | None = None
    treedef: Any = None


class BranchingProgram:
    """The paths of a function at one signature.

    Args:
        leaves: The leaves of a call.
        targets: The number of the body's targets.
        max_paths: How many paths there may be.
        name: What errors call the function.
        traced: Called after each new path was traced.
        check: Called with the constants of each new path; may refuse them.
    """

    donated: tuple[int, ...] = ()
    can_be_kept = True

    def __init__(
        self,
        leaves: Sequence[Any],
        targets: int,
        max_paths: int,
        name: str,
        traced: Callable[[], None],
        check: Callable[[Sequence[Any]], None],
    ) -> None:
        self.takes: list[int] = list(range(targets))
        self.at: dict[int, int] = {target: target for target in self.takes}
        self.ran = False
        # It reaches a model that can't be an input, or a mutable array, which no path can hand to the next path: its
        # calls are done in plain Python.
        self.is_hopeless = False
        self._traced = traced
        self._signature: Any = signature_of(leaves)
        self._kinds: list[Any] | None = None  # the avals of leaves that fit: mostly the very same objects each time
        self._present = _Present()
        self._paths = Paths(self._trace, max_paths, name, check)

    def __call__(self, leaves: Sequence[Any], make_body: Callable[[], Body]) -> tuple[Effects, Sequence[Any]]:
        """Run the path that the values take.

        Args:
            leaves: Arrays, or whatever ``jax.jit`` takes for them; a tuple of arrays may be one.
            make_body: Returns the body of this call, for a path that is not known yet.

        Returns:
            What to do besides, and the outputs.

        Raises:
            OtherSignatureError: If the program is for other leaves or another setting.
            MoreReadError: If a new path has read more of an object than was read before.
            LazyError: If there would be more paths than ``max_paths``.
        """
        if not self._fits(leaves):
            raise OtherSignatureError
        flat = leaves
        if self._kinds is None:  # some leaves are no arrays: numbers, arrays of numpy, tuples of arrays
            flat, self._present.treedef = jax.tree.flatten(list(leaves))
        self._present.make_body = make_body
        try:
            outputs, record = self._paths(flat)
        finally:
            self._present.make_body = self._present.treedef = None
        return record, settled(flat, outputs, record.stays) if record.stays else outputs

    def _fits(self, leaves: Sequence[Any]) -> bool:
        kinds = [v.aval if type(v) is _compat_jit.ARRAY else None for v in leaves]
        if None not in kinds and kinds == self._kinds and _compat_jit.trace_context() == self._signature[-1]:
            return True
        if signature_of(leaves) != self._signature:
            return False
        self._kinds = kinds if all(kind is not None for kind in kinds) else None
        return True

    def _trace(self, flat: list[Any]) -> tuple[Sequence[Any], Effects]:
        make_body, treedef = self._present.make_body, self._present.treedef
        assert make_body is not None  # only a call of the program traces
        leaves = flat if treedef is None else treedef.unflatten(flat)
        body = make_body()
        outputs = body(leaves)
        record = body.record
        assert record is not None  # the body has run
        if len(body.kept) != len(self.takes) or body.has_read_more:
            raise MoreReadError
        COUNTS.add(traces=1)
        places = {target: body.inputs + target for target in self.takes}
        kept = record.drop_writes(record.find_unchanged(outputs, leaves, places))
        begins = [*itertools.accumulate((len(jax.tree.leaves(leaf)) for leaf in leaves), initial=0)]
        held = {target: range(begins[place], begins[place + 1]) for target, place in places.items()}
        record.stays = stays_of(record, held, [*map(aval_of, flat)], [aval_of(outputs[i]) for i in kept])
        self._traced()
        return [outputs[i] for i in kept], record
