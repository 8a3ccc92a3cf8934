"""A forgotten ``flatten=``: a Linear of PyTorch after a flatten reads channels first, that of the model channels last.

The file does not tell, and all shapes fit. The model's forward does: what reaches the layer is a map of a convolution
whose axes a reshape has made one. So where a model has convolutions and a layer that may follow a flatten, a load looks
at one run without values, of an image of any size: the width is another then, but the way is the same. A forward that
takes something else than an image is not looked at.

A decoder goes the other way, from the row that a Linear gives to a map: its numbers stand channels first in PyTorch.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from lazymods._graph import Path, at, dotted
from lazymods._model import hooks
from lazymods._model.abstract_call import AbstractCall, Producers
from lazymods.state.entries import Survey
from lazymods.state.layouts.importing import with_sizes
from lazymods.state.layouts.linear import LINEAR
from lazymods.state.layouts.site import Site
from lazymods.state.layouts.table import rule_for, sites

_CONVOLUTION = "conv_general_dilated"
_MIXES = frozenset(("dot_general", "transpose", "gather", "sort", "rev"))  # what comes out may lie otherwise
_WIDTHS = ("out_features", "num_features", "features")
_MOST = 2000  # operations that are looked at
_MOST_MAPS = 4  # layers whose outputs are looked at
_LENGTHS = (64, 224, 32)  # of an image's axes, to be tried


def remarks(
    survey: Survey, loaded: Mapping[str, Any], flatten: Mapping[str, Sequence[int]] | None
) -> Iterator[str]:
    """Say which layers read or give what the model has channels last, and were loaded as PyTorch has them.

    Args:
        survey: The model, loaded.
        loaded: What was loaded, by the model's names.
        flatten: Of which layers the user has said what is flattened: of those nothing is said.
    """
    model = survey.model
    found = with_sizes(list(sites(model)), flatten)[0]
    layers = {_called_at(site): site for site in found if rule_for(type(site.node)).flattens}
    widths = {name: width for name, site in layers.items() if (width := _input_width(site, loaded)) is not None}
    said = [name for name in widths if layers[name].sizes is not None]
    suspects = [name for name in _suspects(found, widths) if name not in said]
    maps = list(itertools.islice(_before_maps(found, loaded), _MOST_MAPS))
    images: Sequence[Any] = ()
    if isinstance(model, nnx.Module) and callable(model):
        convolutions = (s.node for s in found if isinstance(s.node, (nnx.Conv, nnx.ConvTranspose)))
        images = [image for first in itertools.islice(convolutions, 1) for image in _images(first)]
        merged: dict[str, tuple[int, ...]] = {}
        if suspects or (maps and said):
            merged, images = _first_found(model, [*suspects, *said], widths, images)
        row = _of_rows(model, layers, widths, {name: sizes for name, sizes in merged.items() if name not in said})
        yield from () if row is None else (row,)
    for linear, convolution in maps:
        sizes = _made_map(model, linear, convolution, images)
        if sizes is not None:
            yield _of_map(model, linear, sizes)


def _of_rows(
    model: Any, layers: Mapping[str, Site], widths: Mapping[str, int], merged: Mapping[str, tuple[int, ...]]
) -> str | None:
    """Say which layers read what was flattened channels last."""
    sizes = {name: _sizes(whole, widths[name]) for name, whole in merged.items()}
    said = {name: str(site.sizes) for name, site in layers.items() if site.sizes is not None}
    for name, told in [*sizes.items(), *said.items()]:  # a norm leaves the order to what comes after it
        after = _after_norm(layers, widths, name)
        if after is not None and after not in said:
            sizes.setdefault(after, told)
    if not sizes:
        return None
    named = {_named(layers[name]): (told, widths[name]) for name, told in sizes.items()}
    shown = ", ".join(f"{name!r}: {told}" for name, (told, _) in named.items())
    same = ", ".join(f"{name!r}: ({width},)" for name, (_, width) in named.items())
    where = f"{', '.join(named)} of {hooks.unhooked_class(type(model)).__name__}"
    return (
        f"{where}: the input is flattened channels last, and the weight was loaded as one of PyTorch, which flattens "
        f"channels first: the output is wrong. Write flatten={{{shown}}}, or {{{same}}} if PyTorch flattens as the "
        "model does"
    )


def _called_at(site: Site) -> str:
    """Return the path of what is called with a layer's input: of a cell in an ``nnx.RNN`` that."""
    return dotted(site.path[:-1] if site.suffix else site.path)


def _named(site: Site) -> str:
    """Return what ``flatten`` calls a layer; of a recurrent one both directions."""
    return site.prefix[:-1] if site.suffix else dotted(site.path)


def _first_found(
    model: Any, names: Collection[str], widths: Mapping[str, int], images: Sequence[Any]
) -> tuple[dict[str, tuple[int, ...]], Sequence[Any]]:
    """Return what is flattened before some layers in runs of the first image that is large enough, and of its size.

    Returns:
        The sizes by name, and the images that are left to be tried: the one of the right size, if it is known.
    """
    for image in images:
        found = _flattened(model, names, image)
        if found is None:
            continue
        scaled = _scaled(image, found, widths)
        if scaled is None:
            return found, images
        return found | (_flattened(model, names, scaled) or {}), [scaled]
    return {}, images


def _images(convolution: Any) -> Iterator[jax.ShapeDtypeStruct]:
    """Give images of several sizes that a convolution takes."""
    for length in _LENGTHS if isinstance(convolution.in_features, int) else ():
        shape = (1, *(length,) * len(convolution.kernel_size), convolution.in_features)
        yield jax.ShapeDtypeStruct(shape, convolution.kernel.dtype)


def _scaled(image: Any, found: Mapping[str, tuple[int, ...]], widths: Mapping[str, int]) -> Any:
    """Return the image whose map has as many numbers as the layer takes that reads it; None if it is not known."""
    length = image.shape[1]
    for name, (*spatial, channels) in found.items():
        side = round((widths[name] // channels) ** (1 / len(spatial)))
        if len(set(spatial)) == 1 and side != spatial[0] and side ** len(spatial) * channels == widths[name]:
            length += (side - spatial[0]) * 2 ** round(math.log2(length / spatial[0]))  # as strides are mostly
            return jax.ShapeDtypeStruct((1, *(max(length, 1),) * len(spatial), image.shape[-1]), image.dtype)
    return None


def _after_norm(layers: Mapping[str, Site], widths: Mapping[str, int], name: str) -> str | None:
    """Return the linear layer that comes after a norm of what was flattened: the first one of its width."""
    if rule_for(type(layers[name].node)) is LINEAR or len(layers[name].sizes or (1, 1)) < 2:
        return None
    linear = [n for n, site in layers.items() if rule_for(type(site.node)) is LINEAR]
    return next((n for n in linear if widths.get(n) == widths.get(name)), None)


def _sizes(merged: tuple[int, ...], width: int) -> str:
    """Return the sizes of the map for a width, from those of another one: exactly, if it is square."""
    *spatial, channels = merged
    rest = width // channels
    side = round(rest ** (1 / len(spatial)))
    if math.prod(merged) == width:
        return str(merged)
    if side ** len(spatial) == rest and len(set(spatial)) == 1:
        return str((*(side,) * len(spatial), channels))
    return f"({', '.join(('depth', 'height', 'width')[3 - len(spatial) :])}, {channels})"


def _suspects(found: Sequence[Site], widths: Mapping[str, int]) -> Iterator[str]:
    """Find the layers that may follow a flatten: with another width than what is defined before them has."""
    before: Any = None
    for site in found:
        name = _called_at(site)
        if name in widths and before is not None and widths[name] != before:
            yield name
        before = next((n for attribute in _WIDTHS if (n := site.get(attribute)) is not None), before)


def _input_width(site: Site, loaded: Mapping[str, Any]) -> int | None:
    """Return how many numbers a layer takes, if it was loaded."""
    for entry in ("kernel", "scale", "mean", "dense_i.kernel", "ii.kernel"):
        shape = np.shape(loaded.get(site.name(entry), 0))
        if shape:
            return shape[0]
    return None


def _flattened(model: Any, names: Collection[str], image: Any) -> dict[str, tuple[int, ...]] | None:
    """Return the sizes ``(*spatial, channels)`` of what is flattened before some layers in a run without values.

    Args:
        model: The model; nothing of it is executed or changed.
        names: Dotted paths of the layers.
        image: What it is called with.

    Returns:
        The sizes by name; None if no such layer was reached.
    """
    found: dict[str, tuple[int, ...]] = {}
    reached: set[str] = set()

    def look(path: Path, given: Sequence[Any], producers: Producers) -> None:
        name = dotted(path)
        if name in names and name not in reached and given:
            reached.add(name)
            sizes = _flattened_sizes(given[0], producers)
            if sizes is not None:
                found[name] = sizes

    try:
        AbstractCall(model, (image,), {}, look=look).run()
    except Exception:  # of an image of another size than the model takes, at the latest in that layer
        return found if reached else None
    return found


def _flattened_sizes(value: Any, producers: Producers) -> tuple[int, ...] | None:
    """Return the sizes of the map whose axes became the last one of a value, channels last; None if there is none."""
    for made, name, operands, _ in _back(value, producers, _has_shape_of):
        if name == "reshape":
            shape, width = np.shape(operands[0]), np.shape(made)[-1:]
            first = next((i for i in reversed(range(len(shape))) if (math.prod(shape[i:]),) == width), len(shape))
            merged = shape[first:]
            if merged and 1 < merged[-1] < math.prod(merged) and _is_map(operands[0], producers, len(merged)):
                return merged
    return None


def _is_map(value: Any, producers: Producers, merged: int) -> bool:
    """Whether a value comes from a convolution, channels last, by ways that leave its last axes in their order."""

    def mixes(name: str, params: Mapping[str, Any]) -> bool:
        order = list(params["permutation"])[-merged:] if name == "transpose" else []
        return name in _MIXES and not (order and order == sorted(order) and order[-1] == len(params["permutation"]) - 1)

    for _, name, _, params in _back(value, producers, lambda _, operand: len(np.shape(operand)) > 1, mixes):
        if name == _CONVOLUTION:
            numbers = params["dimension_numbers"].out_spec
            return numbers[1] == len(numbers) - 1
        if any(_has_convolution(param) for param in params.values()):
            return True
    return False


def _back(
    value: Any,
    producers: Producers,
    follows: Callable[[Any, Any], bool],
    ends: Callable[[str, Mapping[str, Any]], bool] = lambda name, params: False,
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
        for operand in () if ends(name, params) else operands:
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


# ---------------------------------------------------------------- maps that are made of a row


def _of_map(model: Any, linear: Site, sizes: tuple[int, ...]) -> str:
    """Say that a layer's output is made a map channels last.

    PyTorch's ``view(-1, C, H, W)`` takes the numbers of a row in another order than a reshape to ``(-1, H, W, C)``.
    """
    name, first = dotted(linear.path), ", ".join(map(str, (sizes[-1], *sizes[:-1])))
    return (
        f"{name} of {hooks.unhooked_class(type(model)).__name__}: its output becomes a map {sizes}, channels last, and "
        "was loaded as that of PyTorch, whose maps have channels first: the output is wrong. Write "
        f"jnp.moveaxis(x.reshape(len(x), {first}), 1, -1) for it, or flatten={{{name!r}: "
        f"({linear.node.in_features},)}} if PyTorch's view is as the model's"
    )


def _before_maps(found: Sequence[Site], loaded: Mapping[str, Any]) -> Iterator[tuple[Site, Site]]:
    """Find the linear layers that may give the map that the next convolution takes, each with that."""
    before: Site | None = None
    for site in found:
        if rule_for(type(site.node)) is LINEAR:
            before = site if site.sizes is None and site.name("kernel") in loaded else None
        elif isinstance(site.node, (nnx.Conv, nnx.ConvTranspose)):
            channels, width = site.get("in_features"), before.get("out_features") if before is not None else 0
            if before is not None and type(channels) is int and width > channels and width % channels == 0:
                yield before, site
            before = None


def _made_map(model: Any, linear: Site, convolution: Site, images: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the sizes of the map that a layer's output becomes: in a run of an image, or of the row that it takes."""
    path, row = linear.path, jax.ShapeDtypeStruct((1, linear.node.in_features), linear.node.kernel.dtype)
    shared = next((i for i, (a, b) in enumerate(zip(path, convolution.path, strict=False)) if a != b), 0)
    runs = [(at(model, path[:depth]), path[:depth], row) for depth in range(shared + 1)]
    runs += [(model, (), image) for image in images]
    for module, begin, given in runs:
        seen: list[tuple[int, ...] | None] = []

        def look(path: Path, given: Sequence[Any], producers: Producers, begin: Path = begin, seen: Any = seen) -> None:
            if dotted((*begin, *path)) == dotted(convolution.path) and given and not seen:
                seen.append(_sizes_of_row(given[0], linear.node.out_features, producers))

        if isinstance(module, nnx.Module) and callable(module):
            with contextlib.suppress(Exception):  # of what the module does not take
                AbstractCall(module, (given,), {}, look=look).run()
        if seen and seen[0] is not None:
            return seen[0]
    return None


def _sizes_of_row(value: Any, width: int, producers: Producers) -> tuple[int, ...] | None:
    """Return the sizes ``(*spatial, channels)`` of a map that was a row of some width, a linear layer's output."""
    for made, name, operands, _ in _back(value, producers, _has_shape_of):
        if name == "reshape" and np.shape(operands[0])[-1:] == (width,):
            sizes = np.shape(made)[np.ndim(operands[0]) - 1 :]
            is_linear = any(op == "dot_general" for _, op, _, _ in _back(operands[0], producers, _has_shape_of))
            if len(sizes) > 1 and math.prod(sizes) == width and is_linear:
                return sizes
    return None


def _has_shape_of(made: Any, operand: Any) -> bool:
    return np.shape(operand) == np.shape(made)
