"""Runs a call in plain Python where no program can do it. If it raises, all that it changed is put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lazymods import _compat
from lazymods._compat import jit as _compat_jit
from lazymods._objects.traced_state import TracedState, contents_of, held_by
from lazymods._snapshot import is_same, refill
from lazymods.compile.given import Given


def all_or_nothing(run: Callable[[], Any], reach: Sequence[Any], given: Given) -> Any:
    """Run a function in plain Python.

    Args:
        run: The function.
        reach: What it can reach: nnx objects, Variables, containers that hold some.
        given: The containers among its arguments.

    Returns:
        What it returned. If it raises, ``reach`` and ``given`` are as they were before.
    """
    traced_state = TracedState(reach)
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
        given.restore()
        _compat_jit.Watch.restructured()
        raise
