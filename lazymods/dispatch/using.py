"""Putting an operator into the layers of a model that is there already."""

from __future__ import annotations

from flax import nnx

from lazymods import _graph
from lazymods._frames import entry
from lazymods.dispatch.attention import attention_fn
from lazymods.dispatch.refusals import RegistrationError, refused

_NAMES = ("attention",)


@entry
def use(model: nnx.Module, what: str) -> list[str]:
    """Let the layers of a model compute by an operator, in place; lazy layers, too.

    Args:
        model: The model.
        what: ``"attention"``: every ``nnx.MultiHeadAttention`` that has Flax's own ``attention_fn`` gets
            :func:`lazymods.dispatch.attention_fn`.

    Returns:
        The paths of the layers that were changed.

    Raises:
        RegistrationError: If there is no operator for that, or no layer that takes it.

    Example:
        >>> import lazymods as lm
        >>> from flax import nnx
        >>> layer = nnx.Sequential(lm.LazyMultiHeadAttention(4, rngs=nnx.Rngs(0)))
        >>> lm.dispatch.use(layer, "attention")
        ['layers.0']
    """
    if what not in _NAMES:
        raise _refusal(model, repr(what), f"one of {', '.join(_NAMES)}: what Flax's layers take as an argument")
    found = [(path, node) for path, node in _graph.nodes(model) if isinstance(node, nnx.MultiHeadAttention)]
    own = [(path, node) for path, node in found if node.attention_fn is nnx.dot_product_attention]
    if not own and not any(node.attention_fn is attention_fn for _, node in found):
        raise _refusal(model, "no layer that takes it", "an nnx.MultiHeadAttention with Flax's own attention_fn")
    for _, node in own:
        node.attention_fn = attention_fn
    return [_graph.dotted(path) for path, _ in own]


def _refusal(model: nnx.Module, got: str, needed: str) -> RegistrationError:
    write = "nnx.MultiHeadAttention(..., attention_fn=lm.dispatch.attention_fn)  # or a call of the operator"
    return refused(f"use of {type(model).__name__}", got, needed, write)
