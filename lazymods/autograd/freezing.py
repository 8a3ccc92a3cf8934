"""Which parameters are trained: a flag in the metadata of a Variable, and the filter that reads it.

The metadata is part of a Variable's static side. So the flag is kept by whatever copies or splits a model, and a
function that was compiled with another one is compiled anew.
"""

from __future__ import annotations

from typing import Any, TypeVar

from flax import nnx

from lazymods import _graph

_FLAG = "requires_grad"  # PyTorch's name; a parameter without it is trained

Target = TypeVar("Target", bound=nnx.Module | nnx.Param[Any])


def requires_grad_(target: Target, flag: bool = True) -> Target:
    """Say whether parameters are trained, in place.

    Lazy layers can be told before they have sizes. The flag alone stops nothing: :data:`lazymods.trainable` is the
    filter that leaves such parameters out, of gradients (``nnx.DiffState(0, lm.trainable)``; the default of
    :func:`lazymods.autograd.grad`) and of updates (``nnx.Optimizer(model, tx, wrt=lm.trainable)``).

    Args:
        target: A module, for all of its ``nnx.Param``, or one of them.
        flag: False freezes them, True trains them again.

    Returns:
        ``target``.

    Raises:
        TypeError: If ``target`` is neither.

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
    if isinstance(target, nnx.Param):
        found = [target]
    elif isinstance(target, nnx.Module):
        found = [v for v in _graph.variables(target) if isinstance(v, nnx.Param)]
    else:
        raise TypeError(f"requires_grad_ takes an nnx.Module or an nnx.Param, got {type(target).__name__}")
    for parameter in found:
        if not flag:
            parameter.set_metadata(_FLAG, False)
        elif parameter.has_metadata(_FLAG):
            parameter.del_metadata(_FLAG)
    return target


def trainable(path: Any, value: Any) -> bool:
    """Tell the parameters that are trained; a filter as ``nnx.state``, ``nnx.DiffState`` and ``nnx.Optimizer`` take.

    Args:
        path: Where the value is, as NNX tells it.
        value: Any leaf of a model.

    Returns:
        Whether it is an ``nnx.Param`` that :func:`lazymods.autograd.requires_grad_` has not frozen.
    """
    return isinstance(value, nnx.Param) and (not value.has_metadata(_FLAG) or bool(value.get_metadata(_FLAG)))
