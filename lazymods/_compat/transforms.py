"""The nnx transforms that are running, and what they do to their arguments.

Seen with flax 0.12.8, 0.12.10 and 0.12.12. Without these names :mod:`lazymods._compat.any_transform` takes their place.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
from flax import nnx
from flax.nnx import graphlib
from flax.nnx.transforms import iteration

from lazymods._compat.finding import require

require(graphlib.GRAPH_CONTEXT, "update_context_stacks")
require(graphlib.UpdateContext, "inner_ref_outer_index", "outer_ref_outer_index", "static_cache")
require(iteration.VmapFn, "in_axes")
require(iteration.PmapFn, "in_axes")


def carrying_transforms(node: Any) -> list[Any]:
    """Return the tags of the nnx transforms that will carry changes of ``node`` to the object outside.

    Of transforms inside each other, the tags of all of them that have it as an argument.
    """
    return [tag for tag, _ in _outward(node)[1]]


def outermost(node: Any) -> Any:
    """Return what ``node`` is outside of all nnx transforms that will carry changes of it: itself, if none will."""
    return _outward(node)[0][-1]


def _outward(node: Any) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Return ``node``, then what it is further and further out; and tag and context of the transforms between.

    Reads ``graphlib.GRAPH_CONTEXT.update_context_stacks``, and of each context ``inner_ref_outer_index`` and
    ``outer_ref_outer_index``.
    """
    nodes, found = [node], []
    for one in nodes:  # also those that are found on the way
        for tag, stack in graphlib.GRAPH_CONTEXT.update_context_stacks.items():
            for context in stack:
                inner, outer = context.inner_ref_outer_index, context.outer_ref_outer_index
                number = None if inner is None else inner.get(one)
                if number is not None:
                    found.append((tag, context))
                    nodes += [o for o, n in (outer or {}).items() if n == number and not any(o is x for x in nodes)]
    return nodes, found


def incarnations(node: Any) -> list[Any]:
    """Return the objects that are ``node`` outside of and inside the nnx transforms that are running, itself first.

    A transform carries changes from one to the other if both are of one class. Each context of
    ``graphlib.GRAPH_CONTEXT.update_context_stacks`` numbers its objects outside (``outer_ref_outer_index``), and gives
    the same numbers to those inside (``inner_ref_outer_index``).
    """
    sides = []
    for stack in graphlib.GRAPH_CONTEXT.update_context_stacks.values():
        for context in stack:
            outer, inner = context.outer_ref_outer_index, context.inner_ref_outer_index
            if outer is not None and inner is not None:
                sides += [(outer, inner), (inner, outer)]
    found = [node]
    for one in found:  # also what is found on the way: transforms may be nested
        for side, other in sides:
            number = side.get(one)
            same = [] if number is None else [o for o, n in other.items() if n == number]
            found += [o for o in same if not any(o is f for f in found)]
    return found


def fixed_structure(node: Any) -> str | None:
    """Name a running nnx transform that has ``node`` as an argument and whose arguments must keep their structure.

    Those are nnx.custom_vjp (context tags ``custom_vjp_...``) and nnx.cached_partial (contexts with a static cache).
    """
    for tag, context in _outward(node)[1]:
        if isinstance(tag, str) and tag.startswith("custom_vjp_"):
            return "nnx.custom_vjp"
        if context.static_cache:
            return "nnx.cached_partial"
    return None


def transforms_running() -> bool:
    """Whether any nnx transform is running that carries changes (``GRAPH_CONTEXT.update_context_stacks``)."""
    return bool(graphlib.GRAPH_CONTEXT.update_context_stacks)


def will_update(node: Any) -> bool:
    """Whether a running nnx transform has ``node`` as an argument, to which it returns at its end what it had then."""
    contexts = [context for stack in graphlib.GRAPH_CONTEXT.update_context_stacks.values() for context in stack]
    return any([c.outer_ref_outer_index is not None and node in c.outer_ref_outer_index for c in contexts])


def mapping_axes(node: Any) -> list[Any]:
    """Return the axes over which the running nnx.vmap and nnx.pmap calls map the arguments that hold ``node``.

    Looks for the frames of ``iteration.VmapFn.__call__`` and ``PmapFn.__call__``; reads ``self.in_axes``, ``args``.
    """
    codes = {iteration.VmapFn.__call__.__code__, iteration.PmapFn.__call__.__code__}
    same = incarnations(node)
    found = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes and "args" in frame.f_locals:
            axes, args = frame.f_locals["self"].in_axes, frame.f_locals["args"]
            each = axes if isinstance(axes, (tuple, list)) else (axes,) * len(args)
            for axis, arg in zip(each, args, strict=True):
                if any(n is one for _, n in nnx.iter_graph(arg) for one in same):
                    found += list(axis.axes) if isinstance(axis, nnx.StateAxes) else jax.tree.leaves(axis)
        frame = frame.f_back
    return [axis for axis in found if axis is not None]
