"""Starts a compiled program without checking arguments that are known.

``jax.jit`` looks at shape, dtype, weak type, sharding, layout and device of each argument of each call, 0.2 us for one.
Most arguments of a model are the very arrays of the call before, or what that call returned. They are remembered here,
weakly, and handed to the executable as they are. An array that is not known is looked at as ``jax.jit`` would; where
too many are new, and for all that is not plain, the call is left to ``jax.jit``. Small arrays of the state that are on
one device while the program runs on a mesh, such as random keys, are copied to the mesh once, not at each call.
"""

from __future__ import annotations

import collections
import itertools
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from lazymods import _compat
from lazymods._compat import jit as _compat_jit
from lazymods._compat import tracing as _compat_tracing
from lazymods.compile.program import OtherSignatureError, Program, getter, has_repeats

_settings, _call, _is, _ref = _compat_tracing.settings, operator.call, operator.is_, weakref.ref
_ARRAY, _PRNG_IMPL = _compat_jit.ARRAY, _compat_jit.PRNG_IMPL
_exhaust = collections.deque(maxlen=0).extend
_FEW = 8  # one new array in so many is looked at here; more cost jax.jit less, unless they stay
_SMALL = 1 << 16  # bytes of an array of which a copy on a mesh may be kept
_CHANCES = 4  # how often arrays may be of another kind than before, such as committed to their device


def _nothing() -> None:
    """Stand for a reference to an array that is not there."""


def _kind(leaf: Any) -> tuple[Any, ...]:
    """Return all that ``jax.jit`` looks at in an array; nothing for what is none."""
    return _compat_jit.kind_of_array(leaf) if type(leaf) is _ARRAY else ()


def _is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, of jax or of numpy, that ``jax.jit`` takes."""
    return type(leaf) is _ARRAY or (type(leaf) is np.ndarray and leaf.dtype.isnative)


class _Ready:
    """An executable, and which arrays it may have.

    Attributes:
        settings: The settings of JAX for which it is.
        known: By number of a leaf: a reference to an array that it may have there.
        gone: References to arrays of the state that have died since all were known. What is there now may be None,
            which is what such a reference returns.
        copies: ``(number, reference, copy)`` of leaves of which it gets a copy, as long as they live themselves.
        run: Takes the leaves that it uses, in its order, and returns the outputs.
        arrange: Returns those of all leaves; None if they are as they should be.
        written: The leaves in whose place an output is, of the same kind, at the next call.
        outputs: Returns those outputs.
    """

    __slots__ = (
        "_executable",
        "_inputs",
        "_kinds",
        "_places",
        "arrange",
        "copies",
        "gone",
        "known",
        "outputs",
        "run",
        "settings",
        "written",
    )

    def __init__(self, executable: _compat_jit.Executable, order: Sequence[int], inputs: int) -> None:
        self.settings = _settings()
        self.known: list[Any] = [_nothing] * len(order)
        self.gone: list[Any] = []
        self.copies: tuple[tuple[int, Any, Any], ...] = ()  # replaced as a whole
        self.run, self._executable = executable.run, executable
        used = [leaf for leaf, format_ in zip(order, executable.formats, strict=True) if format_.sharding is not None]
        self.arrange = None if used == list(range(len(order))) else getter(used)
        self.written: list[int] | None = None  # not known before the first run
        self.outputs: Any = None
        self._kinds: list[Any] = [None] * len(order)
        self._places = {leaf: place for place, leaf in enumerate(order)}
        self._inputs = inputs

    def takes(self, number: int, leaf: Any) -> bool:
        """Look at a leaf as ``jax.jit`` does; if it is an array that the executable may have, know it from now on."""
        kind = _kind(leaf)
        if kind and self._kinds[number] is None and self._executable.takes(self._places[number], leaf):
            self._kinds[number] = kind
        if self._kinds[number] != kind:
            return False
        if self.copies:
            self._drop(number)
        self.known[number] = _ref(leaf) if number < self._inputs else _ref(leaf, self.gone.append)
        return True

    def takes_copy(self, number: int, leaf: Any) -> bool:
        """Copy a leaf to the mesh on which the program runs, if it is small and committed to no device."""
        sharding = self._executable.formats[self._places[number]].sharding
        if type(leaf) is not _ARRAY or leaf.committed or leaf.nbytes > _SMALL or sharding.num_devices == 1:
            return False
        if not sharding.is_fully_addressable:  # then all processes would have to copy it at the same time
            return False
        self._drop(number)
        self.known[number] = reference = _ref(leaf, self._lost)
        self.copies = (*self.copies, (number, reference, jax.device_put(leaf, sharding)))
        return True

    def _drop(self, number: int) -> None:
        self.copies = tuple(copy for copy in self.copies if copy[0] != number)

    def _lost(self, reference: Any) -> None:
        self.copies = tuple(copy for copy in self.copies if copy[1] is not reference)
        self.gone.append(reference)

    def substitute(self, leaves: list[Any]) -> bool:
        """Put copies in the places of leaves; return False if one is of another array, or of one that is deleted."""
        copies = self.copies
        for number, reference, _ in copies:
            if leaves[number] is not reference() or leaves[number].is_deleted():
                return False
        for number, _, copy in copies:
            leaves[number] = copy
        return True

    def put(self, number: int, leaf: np.ndarray[Any, Any]) -> Any:
        """Return a numpy array as an array that the executable may have; None if ``jax.jit`` has to see to it."""
        known = self._kinds[number]
        sharding = known[1] if known else self._executable.formats[self._places[number]].sharding
        aval = known[0] if known else jax.typeof(leaf)
        if (known and known[2]) or type(sharding) is not jax.sharding.SingleDeviceSharding:  # committed, or sharded
            return None
        if aval.weak_type or leaf.dtype != aval.dtype or leaf.shape != aval.shape:
            return None
        array = _compat.put(aval, sharding, leaf)
        self._kinds[number] = known or _kind(array)
        self.known[number] = _ref(array)
        return array

    def settle(self, writes: dict[int, int], outputs: Sequence[Any]) -> None:
        """Find which outputs it may have again, when it has run once: their kinds are the same each time."""
        written = [leaf for leaf in sorted(writes) if self._kinds[leaf] == _kind(outputs[writes[leaf]])]
        self.outputs = getter([writes[leaf] for leaf in written])
        self.written = written


class Launcher:
    """Runs a program for the calls of one plan.

    Args:
        program: What runs.
        leaves: How many leaves it takes.
        inputs: How many of them, the first, are arguments of the call: new at each call, mostly.
        writes: By number of a leaf: the output that is in its place at the next call.
    """

    __slots__ = (
        *("_chances", "_donates", "_first", "_fixed", "_impl", "_inputs"),
        *("_program", "_ready", "_state", "_suspect", "_writes"),
    )

    def __init__(self, program: Program, leaves: int, inputs: int, writes: dict[int, int]) -> None:
        self._program, self._donates, self._writes = program, bool(program.donated), writes
        self._inputs, self._state = range(inputs), range(inputs, leaves)
        self._fixed = set(self._state) - set(writes)
        self._ready: _Ready | None = None  # replaced as a whole: other threads may be using it
        self._impl: str = _PRNG_IMPL.value  # jax.jit itself does not see another one
        self._chances = _CHANCES
        self._first: int | None = None  # after a call with too many new arrays: the number of one,
        self._suspect: Any = _nothing  # and the array itself: if the next call has it again, they are kept

    def __call__(self, leaves: list[Any]) -> Sequence[Any]:  # noqa: C901  one frame, as in JitFunction.__call__
        """Run the program.

        Args:
            leaves: Arrays, or whatever ``jax.jit`` takes for them; may be changed.

        Returns:
            The outputs.

        Raises:
            OtherSignatureError: If the program is for other leaves or another setting of JAX.
        """
        if _PRNG_IMPL.value != self._impl:
            raise OtherSignatureError
        ready = self._ready
        if ready is None:
            ready = self._learn(leaves, None)
        elif ready.settings is not _settings():
            ready = None
        else:
            known = ready.known
            for number in self._inputs:
                if leaves[number] is not known[number]() and not self._accepts(ready, leaves, number):
                    return self._leave(leaves)
            if ready.gone or not all(map(_is, leaves, map(_call, known))):
                ready = self._learn(leaves, ready)
        if ready is None:
            return self._leave(leaves)
        if self._donates and self._program.donates_input(leaves):
            return self._program.launch(leaves)
        if ready.copies and not ready.substitute(leaves):
            return self._leave(leaves)
        try:
            outputs = ready.run(leaves if ready.arrange is None else ready.arrange(leaves))
        except Exception:
            if any(leaf.is_deleted() for leaf in leaves):
                return self._program.launch(leaves)  # for its error message
            raise
        if ready.written is None:
            ready.settle(self._writes, outputs)
        if ready.written:
            refs = map(_ref, ready.outputs(outputs), itertools.repeat(ready.gone.append))
            _exhaust(map(ready.known.__setitem__, ready.written, refs))
        return outputs

    def _learn(self, leaves: list[Any], ready: _Ready | None) -> _Ready | None:
        """Look at the arrays that are new; return what may have all leaves, None if there is nothing."""
        if not self._chances or not all(_is_array(leaves[number]) for number in self._inputs):
            return None
        known = [_nothing] * len(leaves) if ready is None else ready.known
        unknown = (n for n in self._state if leaves[n] is None or leaves[n] is not known[n]())
        limit = len(leaves) // _FEW
        new = list(itertools.islice(unknown, limit + 1))
        if len(new) > limit and not (new[-1] == self._first and leaves[new[-1]] is self._suspect()):
            self._first = new[-1]
            return None
        new += unknown
        if ready is None:
            ready = self._make(leaves)
        if ready is None or (self._donates and has_repeats(leaves)):
            return None
        if not all(self._takes(ready, number, leaves[number]) for number in new):
            return None
        ready.gone.clear()
        return ready

    def _make(self, leaves: list[Any]) -> _Ready | None:
        """Get the executable; return what is ready if it may have the inputs of this call."""
        if not all(type(leaves[number]) is _ARRAY for number in self._state):
            self._chances -= 1
            return None
        executable = self._program.executable(leaves)
        if executable is None:
            self._chances = 0
            return None
        ready = self._ready = _Ready(executable, self._program.order, len(self._inputs))
        return ready if all(self._accepts(ready, leaves, number) for number in self._inputs) else None

    def _accepts(self, ready: _Ready, leaves: list[Any], number: int) -> bool:
        """Look at an input; put it on the device, in its place among the leaves, if it is an array of numpy."""
        leaf = leaves[number]
        if type(leaf) is np.ndarray and (put := ready.put(number, leaf)) is not None:
            leaves[number] = put
            return True
        return type(leaf) is _ARRAY and self._takes(ready, number, leaf)

    def _takes(self, ready: _Ready, number: int, leaf: Any) -> bool:
        """Let it look at a leaf; if it may not have it, start anew: ``jax.jit`` may have another executable."""
        if ready.takes(number, leaf) or (number in self._fixed and ready.takes_copy(number, leaf)):
            return True
        self._chances -= 1
        self._ready = None
        return False

    def _leave(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Leave a call to ``jax.jit``, and note by what to see that the arrays of the next one are the same."""
        if any(type(leaf) is np.ndarray and not leaf.dtype.isnative for leaf in leaves):
            raise OtherSignatureError  # jax.jit would read it in the other byte order
        outputs = self._program.launch(leaves)
        if self._first is not None:
            written = self._writes.get(self._first)
            there = leaves[self._first] if written is None else outputs[written]
            self._suspect = _ref(there) if type(there) is _ARRAY else _nothing
        return outputs
