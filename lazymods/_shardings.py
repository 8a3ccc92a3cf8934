"""Where parameters go on a mesh: rules first, then their own metadata, else a copy on each device."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from lazymods import _compat
from lazymods._errors import LazyError, Problem
from lazymods._refusals import ArgumentError

Rule = Callable[[str, tuple[int, ...], Any], PartitionSpec | None]
Rules = Sequence[tuple[str | re.Pattern[str], PartitionSpec]] | Rule


class Named(NamedTuple):
    """A parameter that is to be placed.

    Attributes:
        name: Its dotted name, as in :func:`lazymods.state_dict`.
        shape: Its whole shape.
        dtype: Its dtype.
        metadata: That of its Variable; empty for a plain array.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    metadata: Mapping[str, Any]


def mesh_for(mesh: Mesh | AbstractMesh | None, rules: Rules | None, device: Any = None) -> Mesh | AbstractMesh | None:
    """Return the mesh to place parameters on: the one that was given, else that of ``jax.set_mesh``, else None.

    Raises:
        ArgumentError: If there are rules and no mesh, both a mesh and a device, or a mesh without devices.
    """
    if mesh is not None and device is not None:
        needed = "one of them: a mesh names its devices"
        raise _wrong("device=", "both mesh= and device=", needed, "mesh=mesh  # without device=")
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise _wrong("mesh=", f"a {type(mesh).__name__}", "a jax.sharding.Mesh", "mesh=jax.make_mesh((8,), ('data',))")
    if mesh is not None and (mesh.empty or not mesh.size):
        raise _wrong("mesh=", "an empty mesh", "a mesh of one device at least", "mesh=jax.make_mesh((8,), ('data',))")
    if mesh is None and device is None and _compat.current_trace() is _compat.eval_trace():
        current = jax.sharding.get_mesh()
        mesh = None if current.empty else current
    if rules is not None and mesh is None:
        raise _wrong("rules=", "rules without a mesh", "the mesh whose axes they name", "mesh=mesh, rules=rules")
    return mesh


def find_shardings(
    parameters: Iterable[Named], mesh: Mesh | AbstractMesh, rules: Rules | None = None
) -> dict[str, NamedSharding]:
    """Find where each parameter goes; nothing is made or moved.

    Args:
        parameters: What is to be placed.
        mesh: The devices; an ``AbstractMesh`` to plan for devices that are not there.
        rules: ``(regular expression, PartitionSpec)`` pairs, of which the first that is found in the name wins, or a
            function of name, shape and dtype that returns a PartitionSpec or None. What no rule names follows its
            ``out_sharding`` metadata; what has none is copied to each device.

    Raises:
        ArgumentError: If the rules are neither, or an expression is none.
        LazyError: If a spec does not fit its parameter or the mesh; it lists every such parameter.
    """
    rule = _as_function(rules)
    found: dict[str, NamedSharding] = {}
    problems: list[Problem] = []
    for parameter in parameters:
        spec, origin = _spec_of(parameter, rule)
        faults = list(_faults(spec, parameter.shape, mesh))
        if faults:
            problems.append(_misfit(parameter, spec, origin, faults, mesh))
        else:
            found[parameter.name] = NamedSharding(mesh, spec)
    if problems:
        raise LazyError(*problems, heading="These parameters do not fit on the mesh:")
    return found


def _as_function(rules: Rules | None) -> Rule:
    if rules is None:
        return lambda name, shape, dtype: None
    if callable(rules):
        return rules
    if not isinstance(rules, Sequence) or isinstance(rules, str) or not all(map(_is_pair, rules)):
        raise _wrong(
            "rules=",
            repr(rules)[:200],
            "a list of (regular expression, PartitionSpec) pairs, or a function of name, shape and dtype",
            "rules=[('kernel$', P(None, 'model'))]",
        )
    compiled: list[tuple[re.Pattern[str], PartitionSpec]] = []
    for pattern, spec in rules:
        try:
            compiled.append((re.compile(pattern), spec))
        except re.error as error:
            needed = "a regular expression, which is searched for in the name"
            raise _wrong("rules=", f"{pattern!r}: {error}", needed, f"{re.escape(str(pattern))!r}") from error
    return lambda name, shape, dtype: next((spec for pattern, spec in compiled if pattern.search(name)), None)


def _is_pair(item: Any) -> bool:
    is_two = isinstance(item, tuple | list) and len(item) == 2
    if not is_two or not isinstance(item[1], PartitionSpec):
        return False
    return isinstance(item[0].pattern if isinstance(item[0], re.Pattern) else item[0], str)


def _spec_of(parameter: Named, rule: Rule) -> tuple[PartitionSpec, str]:
    """Return the spec of a parameter, and where it is from."""
    spec = rule(parameter.name, parameter.shape, parameter.dtype)
    if spec is None:
        return _spec_of_metadata(parameter.metadata), "its metadata"
    if not isinstance(spec, PartitionSpec):
        raise _wrong("rules=", f"{spec!r} for {parameter.name}", "a PartitionSpec, or None", "return P(None, 'model')")
    return spec, "rules="


def _spec_of_metadata(metadata: Mapping[str, Any]) -> PartitionSpec:
    """Return the spec of a Variable's ``out_sharding``, with logical names replaced as Flax does."""
    sharding = metadata.get("out_sharding")
    if not sharding:
        return PartitionSpec()
    sharding = getattr(sharding, "sharding", sharding)  # of a Format: its layout is not ours to keep
    spec = getattr(sharding, "spec", sharding)  # of a NamedSharding: the mesh that is asked for wins
    variable = nnx.Variable(None, out_sharding=None, sharding_rules=metadata.get("sharding_rules") or ())
    variable.set_metadata(out_sharding=tuple(spec))
    return nnx.spmd.get_var_pspec(variable) or PartitionSpec()


def _faults(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> Iterator[str]:
    sizes = dict(mesh.shape)
    if len(spec) > len(shape):
        yield f"the spec has {len(spec)} axes, the parameter {len(shape)}"
    names = [name for part in spec for name in names_in(part)]
    for name in dict.fromkeys(names):
        if name not in sizes:
            yield f"the mesh has no axis {name!r}"
        elif names.count(name) > 1:
            yield f"the axis {name!r} is named {names.count(name)} times"
    for size, part in zip(shape, spec, strict=False):
        count = math.prod(sizes.get(name, 1) for name in names_in(part))
        if size % count:
            yield f"{size} is not divisible by {count}, the devices along {part!r}"


def names_in(part: Any) -> tuple[Any, ...]:
    """Return the mesh axes over which one axis of an array is split."""
    if part is None:
        return ()
    return tuple(part) if isinstance(part, tuple) else (part,)


def _misfit(
    parameter: Named, spec: PartitionSpec, origin: str, faults: list[str], mesh: Mesh | AbstractMesh
) -> Problem:
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return Problem(
        where=parameter.name,
        got=f"{spec} from {origin}, for shape {parameter.shape} on a mesh of {axes}: {'; '.join(faults)}",
        needed="a spec of the mesh's axes, each at most once, whose sizes divide the parameter's",
        write=f"rules=[({'^' + re.escape(parameter.name) + '$'!r}, P()), ...]",
    )


def _wrong(where: str, got: str, needed: str, write: str) -> ArgumentError:
    return ArgumentError(Problem(where, got, needed, write))
