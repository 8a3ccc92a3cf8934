"""Which parameters are trained: a flag in the metadata of a Variable, and the filter that reads it.

The metadata is part of a Variable's static side. So the flag is kept by whatever copies or splits a model, and a
function that was compiled with another one is compiled anew.
"""

from __future__ import annotations

from typing import Any, TypeVar

from flax import nnx

from lazymods import _graph
from lazymods._errors import Problem, describe
from lazymods._frames import entry
from lazymods._refusals import ArgumentError

Target = TypeVar("Target", bound=nnx.Pytree | nnx.Param[Any])


@entry
def requires_grad_(target: Target, flag: bool = True) -> Target:
    """Say whether parameters are trained, in place.

    Lazy layers can be told before they have sizes. The flag alone stops nothing: :data:`lazymods.trainable` is the
    filter that leaves such parameters out, of gradients (``nnx.DiffState(0, lm.trainable)``; the default of
    :func:`lazymods.autograd.grad`) and of updates (``nnx.Optimizer(model, tx, wrt=lm.trainable)``).

    Args:
        target: A module or a part of one, for all ``nnx.Param`` in it, or one of them.
        flag: False freezes them, True trains them again.

    Returns:
        ``target``.

    Raises:
        ArgumentError: If ``target`` is neither, or ``flag`` is no bool.

    References:
        ``torch.nn.Module.requires_grad_`` and ``torch.Tensor.requires_grad_``.

    Example:
        >>> import lazymods as lm
        >>> from flax import nnx
        >>> model = nnx.Sequential(lm.LazyLinear(8, rngs=nnx.Rngs(0)), lm.LazyLinear(2, rngs=nnx.Rngs(1)))
        >>> _ = lm.autograd.requires_grad_(model.layers[0], False)
        >>> [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, lm.trainable))]
        ['layers.1.bias', 'layers.1.kernel']
    """
    if not isinstance(target, (nnx.Param, nnx.Pytree)):
        raise ArgumentError(_not_a_module(target))
    if not isinstance(flag, bool):
        needed, write = "True, to train the parameters, or False", "lm.autograd.requires_grad_(model, False)"
        raise ArgumentError(Problem("lm.autograd.requires_grad_: flag", describe(flag), needed, write))
    found = [target] if isinstance(target, nnx.Param) else _graph.variables(target)
    for parameter in found:
        if not isinstance(parameter, nnx.Param):
            continue
        if not flag:
            parameter.set_metadata(_graph.REQUIRES_GRAD, False)
        elif parameter.has_metadata(_graph.REQUIRES_GRAD):
            parameter.del_metadata(_graph.REQUIRES_GRAD)
    return target


def _not_a_module(target: Any) -> Problem:
    needed = "an nnx.Module, or an nnx.Param of one: other values are never trained"
    write = "lm.autograd.requires_grad_(model, False)  # or a part: model.layers[0], model.layers[0].kernel"
    return Problem("lm.autograd.requires_grad_", describe(target), needed, write)


def trainable(path: Any, value: Any) -> bool:
    """Tell the parameters that are trained; a filter as ``nnx.state``, ``nnx.DiffState`` and ``nnx.Optimizer`` take.

    Args:
        path: Where the value is, as NNX tells it.
        value: Any leaf of a model.

    Returns:
        Whether it is an ``nnx.Param`` that :func:`lazymods.autograd.requires_grad_` has not frozen.
    """
    return isinstance(value, nnx.Param) and _graph.is_trained(value)
