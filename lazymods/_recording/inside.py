"""What an operation contains: the operations of its jaxprs, of theirs, and so on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax

from lazymods._compat import tracing

_DULL = frozenset({type(None), int, bool, float, str})


class _Question:
    """A question to an operation and to all inside of it. For each jaxpr it is asked once."""

    def __init__(self, of_operation: Callable[[Any], bool], of_parameter: Callable[[Any], bool]) -> None:
        self._of_operation = of_operation
        self._of_parameter = of_parameter
        self._known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def __call__(self, primitive: Any, params: dict[str, Any]) -> bool:
        return self._of_operation(primitive) or any([self._about(v) for v in params.values() if type(v) not in _DULL])

    def _about(self, value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return any([self._about(v) for v in value if type(v) not in _DULL])
        return self.inside(value) if tracing.is_jaxpr(value) else self._of_parameter(value)

    def inside(self, jaxpr: Any) -> bool:
        """Ask the operations of a jaxpr."""
        jaxpr = tracing.open_jaxpr(jaxpr)[0]
        if jaxpr not in self._known:
            self._known[jaxpr] = any(self(eqn.primitive, eqn.params) for eqn in jaxpr.eqns)
        return self._known[jaxpr]


_calls_python = _Question(lambda primitive: "callback" in primitive.name, lambda _: False)
_names_devices = _Question(
    lambda primitive: primitive.name == "shard_map",
    lambda value: isinstance(value, (jax.sharding.Sharding, jax.Device)),
)


def calls_python(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether an operation calls a Python function when it runs, or has one inside that does."""
    return _calls_python(primitive, params)


def jaxpr_calls_python(jaxpr: Any) -> bool:
    """Whether a jaxpr, with constants or without, has an operation that calls a Python function when it runs."""
    return _calls_python.inside(jaxpr)


def mesh_in(jaxpr: Any) -> jax.sharding.Mesh | None:
    """Return the first mesh that an operation of a jaxpr names; None if none does."""
    inner = tracing.open_jaxpr(jaxpr)[0]
    if not _names_devices.inside(inner):
        return None
    found = (_mesh_of(value) for eqn in inner.eqns for value in eqn.params.values() if type(value) not in _DULL)
    return next((mesh for mesh in found if mesh is not None), None)


def _mesh_of(value: Any) -> jax.sharding.Mesh | None:
    if isinstance(value, (tuple, list)):
        return next((mesh for mesh in map(_mesh_of, value) if mesh is not None), None)
    if tracing.is_jaxpr(value):
        return mesh_in(value)
    mesh = getattr(value, "mesh", value)  # of a NamedSharding
    return mesh if isinstance(mesh, jax.sharding.Mesh) else None


def names_devices(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether an operation says where it runs or where its results are, or has one inside that does.

    Where there is one device, nothing is said by that.
    """
    return jax.device_count() > 1 and _names_devices(primitive, params)
