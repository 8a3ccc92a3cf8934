"""A jaxpr as a graph in the language of Graphviz."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from lazymods._errors import short_dtype
from lazymods._recording.dot import arrow, box, digraph, ellipse


def dot(closed: Any) -> str:
    """Draw a jaxpr: a box for each operation with its name and result, an ellipse for each input and constant.

    Args:
        closed: A closed jaxpr. Functions inside it are drawn in boxes of their own.

    Returns:
        The text of a ``digraph``.
    """
    return digraph(_Drawing().lines(closed))


class _Drawing:
    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._names: dict[Any, str] = {}

    def lines(self, closed: Any) -> Iterator[str]:
        """Draw inputs, constants, operations and outputs."""
        jaxpr = closed.jaxpr
        for label, variables in (("input", jaxpr.invars), ("constant", jaxpr.constvars)):
            for number, variable in enumerate(variables):
                yield "  " + ellipse(self._new(variable), f"{label} {number}", _aval(variable))
        yield from self._operations(jaxpr, "  ")
        for number, variable in enumerate(jaxpr.outvars):
            name = f"out{number}"
            yield "  " + ellipse(name, f"output {number}", _aval(variable))
            yield from self._edge(variable, name, "  ")

    def _operations(self, jaxpr: Any, indent: str) -> Iterator[str]:
        for equation in jaxpr.eqns:
            results = ", ".join(map(_aval, equation.outvars))
            name = f"n{next(self._numbers)}"
            title = equation.params.get("name")
            operation = f"{equation.primitive} {title}" if isinstance(title, str) else str(equation.primitive)
            yield indent + box(name, operation, results)
            for variable in equation.invars:
                yield from self._edge(variable, name, indent)
            self._names.update(dict.fromkeys(equation.outvars, name))
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
                if _is_jaxpr(inner):
                    yield from self._inner(inner, name, indent)

    def _inner(self, inner: Any, outer: str, indent: str) -> Iterator[str]:
        jaxpr = getattr(inner, "jaxpr", inner)
        yield f"{indent}subgraph cluster_{outer}_{next(self._numbers)} {{"
        self._names.update(dict.fromkeys((*jaxpr.invars, *jaxpr.constvars), outer))
        yield from self._operations(jaxpr, indent + "  ")
        yield f"{indent}}}"

    def _new(self, variable: Any) -> str:
        self._names[variable] = f"n{next(self._numbers)}"
        return self._names[variable]

    def _edge(self, variable: Any, to: str, indent: str) -> Iterator[str]:
        if not isinstance(variable, Literal) and variable in self._names:
            yield indent + arrow(self._names[variable], to)


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def _aval(variable: Any) -> str:
    aval = variable.aval
    dtype, shape = getattr(aval, "dtype", None), getattr(aval, "shape", ())
    return str(aval) if dtype is None else f"{short_dtype(dtype)}[{','.join(map(str, shape))}]"
