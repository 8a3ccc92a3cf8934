"""What is known of a layer's shapes while arguments of its class are at their defaults.

``infer`` or a checkpoint may say another size than a default that the caller left as it is (see
:func:`lazymods._layer.factory.lazy`). So an axis that follows from such an argument is as unknown as any other until
the layer is sized. Which axes do, the constructor tells: it is read with another size in place of each.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from lazymods._initial.pending import PartialShape
from lazymods._layer.abstract_module import Path
from lazymods._layer.arguments import Ignored, common_multiple, constructor_parameters
from lazymods._layer.config import LayerConfig, context
from lazymods._layer.formulas import ShapeFormulas

Shapes = dict[Path, "PartialShape | None"]

_MOST = 24  # readings of one constructor, where it does not take the first other size of each


def placeholder_shapes(spec: LayerConfig, formulas: ShapeFormulas, modules: Mapping[str, Any]) -> Shapes:
    """Return the partial shape of each slot while it is empty: None for what ``infer`` may still decide.

    Args:
        spec: What the layer was configured with.
        formulas: Its formulas.
        modules: Those of its arguments that are modules.
    """
    if spec.guesses:  # not even the rank is sure
        return dict.fromkeys(formulas.shapes)
    if not spec.left_out:
        return dict(formulas.shapes)
    if modules or not isinstance(spec.key, tuple):
        return _without_defaults(spec, formulas, modules)
    return _cached(spec, context(), Ignored(formulas))


@functools.lru_cache(maxsize=1024)
def _cached(spec: LayerConfig, context: Any, formulas: Ignored) -> Shapes:
    return _without_defaults(spec, formulas.value, {})


def _without_defaults(spec: LayerConfig, formulas: ShapeFormulas, modules: Mapping[str, Any]) -> Shapes:
    shapes = dict(formulas.shapes)
    others = {name: found for name in spec.left_out if (found := _other_sizes(spec, name))}
    if not others or _vary(spec, formulas, modules, [{name: found[0]} for name, found in others.items()], shapes):
        return shapes
    left = _MOST
    for name, found in others.items():  # what the constructor takes of each alone
        for size in found[:left]:
            left -= 1
            if _vary(spec, formulas, modules, [{name: size}], shapes):
                break
    return shapes


def _vary(
    spec: LayerConfig,
    formulas: ShapeFormulas,
    modules: Mapping[str, Any],
    others: Sequence[Mapping[str, Any]],
    shapes: Shapes,
) -> bool:
    """Read the constructor with each of some other defaults, and note which axes are others; False if it refuses."""
    multiple = common_multiple({"others": list(others)})
    given = {name: multiple * size for name, size in formulas.sizes.items()}
    probe = next(iter(given.values()), common_multiple(spec.arguments))
    values = spec.values(given)
    try:
        before, *after = spec.trace([(values, probe), *(({**values, **other}, probe) for other in others)], modules)
    except Exception:  # what a constructor says of arguments that nobody gave
        return False
    for path, slot in before.slots.items():
        for other in [read.slots[path] for read in after if path in read.slots]:
            known = shapes.get(path)
            if known is None or len(other.shape) != len(slot.shape):
                shapes[path] = None
            else:
                pairs = zip(known, slot.shape, other.shape, strict=True)
                shapes[path] = tuple([k if a == b else None for k, a, b in pairs])
    return True


def _other_sizes(spec: LayerConfig, name: str) -> list[Any]:
    """Return what an argument might be in place of its default, if that is a size, or may be one."""
    default = spec.default_of(name)
    if default is None:
        return [common_multiple(spec.arguments) * 7] if _may_be_a_size(spec.cls, name) else []
    leaves, structure = jax.tree.flatten(default)
    if not leaves or not all(type(leaf) is int and leaf >= 0 for leaf in leaves):
        return []
    return [jax.tree.unflatten(structure, new) for new in zip(*map(_others, leaves), strict=True)]


def _others(size: int) -> Iterator[int]:
    yield from (2 * size or 1, size // 2 or 3, size + 1, 3 * size or 2)


def _may_be_a_size(cls: type, name: str) -> bool:
    """Whether a constructor says of an argument that it takes an int, or nothing at all."""
    annotation = constructor_parameters(cls)[name].annotation
    text = annotation if isinstance(annotation, str) else repr(annotation)
    return annotation is inspect.Parameter.empty or "int" in text.replace("[", " ").replace("|", " ").split()
