"""``export_torch``: a model's arrays as PyTorch's state dict, or as those of the very file that it was loaded from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from lazymods._errors import Problem, StateDictError
from lazymods._frames import entry
from lazymods._layer import stacks
from lazymods._refusals import wrong_argument
from lazymods.state.entries import check_is_model
from lazymods.state.files.stored import Array, printable
from lazymods.state.layouts import with_sizes, written
from lazymods.state.layouts.exporting import second, without_layers
from lazymods.state.layouts.table import sites
from lazymods.state.load import LoadResult
from lazymods.state.noted import WayBack
from lazymods.state.warned import warn
from lazymods.state.way_back import as_loaded


@entry
def export_torch(
    model: nnx.Module,
    *,
    flatten: Mapping[str, Sequence[int]] | None = None,
    like: LoadResult | None = None,
) -> dict[str, Array]:
    """Return a model's parameters as PyTorch's state dict: its names and layouts, by module type.

    What is shared appears under each of its names. Modules of types that PyTorch does not have keep their names and
    layouts. A recurrent layer's bias is written as ``bias_ih``, with zeros as ``bias_hh``; ``num_batches_tracked`` is
    0.

    With ``like`` it is the inverse of that load: the file's names, its prefix and its fused or separate projections,
    each array laid, shaped and typed as there, so that a strict ``load_state_dict`` of PyTorch takes it. Buffers that
    the load has left out, known ones, whole numbers and those of a ``torch.nn.Module``, are the file's. What ``rename``
    has dropped is left out, and what ``ignore`` or ``strict=False`` has, with a warning, unless it is tied to what was
    loaded: one tensor under two names, as PyTorch's files and :func:`save` tell; in other files an output layer
    (``lm_head``) with the numbers of an embedding of the model. Parameters that the file did not have are written
    under their own names, but for biases of zeros.

    Args:
        model: An nnx module, initialized.
        flatten: As for a load: by a layer's name, the sizes ``(*spatial, channels)`` of what is flattened before it,
            for a layer that is to follow a flatten with channels first; with ``like``, None is what the load had.
        like: The result of the :func:`lazymods.load` of the model, or of one like it.

    Returns:
        numpy arrays by name, writable and contiguous, in the model's dtypes (bfloat16 is that of ml_dtypes), or those
        of the file.

    Raises:
        UninitializedError: If a parameter has no value yet.
        StateDictError: If PyTorch cannot hold a layer exactly, ``flatten`` does not fit, or the file's entries cannot
            hold what the model has now.
        ArgumentError: If ``model`` is none, or ``like`` is no result of :func:`lazymods.load`.

    Warns:
        UserWarning: If entries of the file are left out that the load has left out without a rename: a file does not
            say which are buffers, that do not change, and which are parameters that the model lacks.

    Example:
        >>> import lazymods as lm
        >>> from flax import nnx
        >>> {k: v.shape for k, v in lm.export_torch(nnx.Linear(3, 4, rngs=nnx.Rngs(0))).items()}
        {'weight': (4, 3), 'bias': (4,)}
    """
    check_is_model(model)
    way: WayBack | None = None
    if like is not None:
        way = like.way_back if isinstance(like, LoadResult) else None
        if way is None:
            line = "result = lm.load(model, path); lm.export_torch(model, like=result)"
            raise wrong_argument("lm.export_torch: like", like, "the result of lm.load", line)
        flatten = way.flatten if flatten is None else flatten
    with stacks.apart():
        out, problems = _exported(model, way, flatten)
    if problems:
        raise StateDictError(*problems, heading=f"PyTorch cannot hold {type(model).__name__}")
    left = [name for name in way.left if name not in out] if way is not None else []
    if left:
        warn(_left_out(left))
    # torch.from_numpy takes neither reversed nor read-only arrays in silence
    return {name: np.array(value, order="C") for name, value in out.items()}


def _left_out(names: Collection[str]) -> str:
    """Say what of the file is not written."""
    shown = ", ".join(map(printable, list(names)[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return (
        f"the file's {shown} {'is' if len(names) == 1 else 'are'} left out, as by the load; PyTorch's strict "
        f"load_state_dict wants all. For buffers, which do not change, write out[name] = lm.open(path)[name]; "
        f"rename={{{next(iter(names))!r}: None}} in the load leaves out without this warning"
    )


def _exported(
    model: nnx.Module, way: WayBack | None, flatten: Mapping[str, Sequence[int]] | None
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the arrays, and what PyTorch cannot hold."""
    problems: list[Problem] = []
    if way is not None:
        return as_loaded(model, way, flatten, problems), problems
    found, problems = with_sizes(list(sites(model)), flatten)
    made = written(model, found)
    problems += made.problems
    sequential = [site.prefix for site in found if isinstance(site.node, nnx.Sequential)]
    out: dict[str, Any] = {}
    for name, value in made.entries.items():
        name = without_layers(name, sequential)
        if name in out:
            problems.append(second(name))
        out[name] = value
    return out, problems
