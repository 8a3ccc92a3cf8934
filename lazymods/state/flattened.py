"""A forgotten ``flatten=``: a Linear of PyTorch after a flatten reads channels first, that of the model channels last.

The file does not tell, and all shapes fit. The model's first call does: what reaches the layer was then a map of a
convolution whose axes a reshape has made one. So a load leaves a hook on a model with convolutions and a layer that may
follow a flatten. At the first call it runs the model once without values, says what it finds, and is gone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from lazymods import _compat
from lazymods._graph import Path, dotted, hooks_of
from lazymods._model import hooks
from lazymods._model.abstract_call import AbstractCall, Producers
from lazymods.state.entries import Survey
from lazymods.state.layouts.importing import with_sizes
from lazymods.state.layouts.site import Site
from lazymods.state.layouts.table import rule_for, sites

_CONVOLUTION = "conv_general_dilated"
_MIXES = frozenset(("dot_general", "transpose", "gather", "sort", "rev"))  # what comes out lies otherwise
_WIDTHS = ("out_features", "num_features", "features")
_MOST = 2000  # operations that are looked at


def suspects(survey: Survey, loaded: Mapping[str, Any], flatten: Mapping[str, Sequence[int]] | None) -> tuple[str, ...]:
    """Return the layers that may follow a flatten: with another width than what is defined before them.

    Args:
        survey: The model.
        loaded: What was loaded, by the model's names.
        flatten: Of which layers the user has said that they do.
    """
    if not any(isinstance(node, (nnx.Conv, nnx.ConvTranspose)) for _, node in survey.nodes):
        return ()
    before: Any = None
    found: dict[str, None] = {}
    for site in with_sizes(list(sites(survey.model)), flatten)[0]:
        width = _input_width(site, loaded) if rule_for(type(site.node)).flattens and site.sizes is None else None
        if width is not None and width != before and before is not None:
            found[dotted(site.path)] = None
        before = next((n for name in _WIDTHS if (n := site.get(name)) is not None), before)
    return tuple(found)


def _input_width(site: Site, loaded: Mapping[str, Any]) -> int | None:
    """Return how many numbers a layer takes, if it was loaded."""
    for entry in ("kernel", "scale", "mean"):
        shape = np.shape(loaded.get(site.name(entry), 0))
        if shape:
            return shape[0]
    return None


def watch(model: Any, names: tuple[str, ...]) -> None:
    """Let the next call of a model tell of layers that read what was flattened channels last."""
    if names and isinstance(model, nnx.Module) and callable(model):
        hooks.register(model, hooks.Hook(next(hooks.ids), "forward_pre", FirstCall(names), with_kwargs=True))


def forget(model: Any) -> None:
    """Take the hook of an earlier load off a model."""
    for hook in hooks_of(model, "forward_pre") if isinstance(model, nnx.Module) else ():
        if isinstance(hook.function, FirstCall):
            hooks.RemovableHandle(_compat.incarnations(model), hook).remove()


@dataclasses.dataclass(frozen=True)
class FirstCall:
    """The hook: a value, so that models that wait for the same are equal."""

    names: tuple[str, ...]

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at a call before it runs, and be gone."""
        forget(model)
        found = flattened(model, self.names, args, kwargs)
        if found:
            from lazymods.state.checkpoint import warn

            shown = ", ".join(f"{name!r}: {sizes}" for name, sizes in found.items())
            same = ", ".join(f"{name!r}: ({math.prod(sizes)},)" for name, sizes in found.items())
            warn(
                f"{', '.join(found)} of {hooks.unhooked_class(type(model)).__name__}: the input was flattened channels "
                "last, and the weight was loaded as one of PyTorch, which flattens channels first: the output is "
                f"wrong. Load again with flatten={{{shown}}}, or {{{same}}} if PyTorch flattens as the model does"
            )


def flattened(
    model: Any, names: Collection[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Return the sizes ``(*spatial, channels)`` of what is flattened before some layers in a call.

    Args:
        model: The model; nothing of it is executed or changed.
        names: Dotted paths of the layers.
        args: The call's arguments.
        kwargs: Its keyword arguments.
    """
    found: dict[str, tuple[int, ...]] = {}

    def look(path: Path, given: Sequence[Any], producers: Producers) -> None:
        name = dotted(path)
        for value in given[:1] if name in names and name not in found else ():
            sizes = _flattened_sizes(value, producers)
            if sizes is not None:
                found[name] = sizes

    try:
        AbstractCall(model, args, kwargs, look=look).run()
    except Exception:  # what is wrong with the call, the call itself will say
        return {}
    return found


def _flattened_sizes(value: Any, producers: Producers) -> tuple[int, ...] | None:
    """Return the sizes of the map whose axes became the last one of a value, channels last; None if there is none."""
    for made, name, operands, _ in _back(value, producers, lambda made, operand: np.shape(operand) == np.shape(made)):
        if name == "reshape":
            shape, width = np.shape(operands[0]), np.shape(made)[-1:]
            first = next((i for i in reversed(range(len(shape))) if (math.prod(shape[i:]),) == width), len(shape))
            merged = shape[first:]
            if merged and 1 < merged[-1] < math.prod(merged) and _is_map(operands[0], producers):
                return merged
    return None


def _is_map(value: Any, producers: Producers) -> bool:
    """Whether a value comes from a convolution, channels last, by ways that leave its axes in their order."""
    for _, name, _, params in _back(value, producers, lambda _, operand: len(np.shape(operand)) > 1, _MIXES):
        if name == _CONVOLUTION:
            numbers = params["dimension_numbers"].out_spec
            return numbers[1] == len(numbers) - 1
        if any(_has_convolution(param) for param in params.values()):
            return True
    return False


def _back(
    value: Any, producers: Producers, follows: Callable[[Any, Any], bool], ends: Collection[str] = ()
) -> Iterator[tuple[Any, str, Sequence[Any], dict[str, Any]]]:
    """Go from a value back to what it was computed from: each value, and the operation that made it."""
    waiting, seen = [value], {id(value)}
    for _ in range(_MOST):
        if not waiting:
            return
        made = waiting.pop(0)
        if id(made) not in producers:
            continue
        name, operands, params = producers[id(made)]
        yield made, name, operands, params
        for operand in operands if name not in ends else ():
            if id(operand) not in seen and follows(made, operand):
                seen.add(id(operand))
                waiting.append(operand)


def _has_convolution(param: Any) -> bool:
    """Whether a parameter of an operation is a program with a convolution in it."""
    program = getattr(param, "jaxpr", param)
    return any(
        equation.primitive.name == _CONVOLUTION or any(map(_has_convolution, equation.params.values()))
        for equation in getattr(program, "eqns", ())
    )
