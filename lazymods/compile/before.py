"""Runs a call in plain Python where no program can do it. If it raises, all that it changed is put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lazymods import _compat
from lazymods._compat import jit as _compat_jit
from lazymods._objects.traced_state import TracedState, contents_of, held_by
from lazymods._snapshot import Snapshot, is_same, refill
from lazymods.compile.binding import Binding


def all_or_nothing(run: Callable[[], Any], call: Binding) -> Any:
    """Run a function in plain Python.

    Args:
        run: The function.
        call: What it is given, and can reach.

    Returns:
        What it returned. If it raises, all of that is as it was before.
    """
    traced_state, given, arrays = TracedState(call.reach), call.given(), Snapshot()
    if call.executing:  # else a mutable array is written to in the trace around, which ends here
        arrays.keep(call.references())
    variables = [(v, type(v), v.get_raw_value(), dict(_compat.raw_metadata(v))) for v in traced_state.variables]
    try:
        return run()
    except BaseException:
        for node, cls, contents in zip(traced_state.nodes, traced_state.classes, traced_state.contents, strict=True):
            if type(node) is not cls:
                _compat.set_class(node, cls)
            if not is_same(contents, contents_of(node)):
                refill(held_by(node), contents)
        for variable, cls, raw, metadata in variables:
            _compat.write_variable(variable, cls, raw, metadata)
        arrays.restore()
        given.restore()
        _compat_jit.Watch.restructured()
        raise
