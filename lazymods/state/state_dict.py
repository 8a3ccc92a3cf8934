"""``state_dict``: a model's arrays by dotted name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from lazymods import _graph
from lazymods._errors import Problem, StateDictError
from lazymods._frames import entry
from lazymods._graph import hooks_of, run_hooks
from lazymods._initial.keys import is_key
from lazymods._layer import stacks
from lazymods.state.entries import IMPL, check_is_model, named_places, prefix_of
from lazymods.state.values import is_deleted


@entry
def state_dict(model: nnx.Pytree | Mapping[str, Any], *, include_rng: bool = False) -> dict[str, Any]:
    """Return a model's parameters, statistics and raw arrays by dotted name.

    Args:
        model: An nnx module, any nnx object, or a dict of them; it may be lazy.
        include_rng: Add random state: a key as its data (``uint32``) under its name and the name of its
            implementation, in ASCII codes, under ``name.impl``; a counter as it is.

    Returns:
        An ordinary dict in definition order. Values are the live arrays (also those in tuples and in registered
        pytrees: ``pair.a``), and the numbers and texts that a training state holds; placeholders appear
        as themselves, and what is shared appears under each of its names. Caches and intermediates are left out.

    Raises:
        StateDictError: If two entries would have one name, or a random key was deleted or donated.
        ArgumentError: If it is neither an nnx object nor a dict or list.

    Example:
        >>> import lazymods as lm
        >>> from flax import nnx
        >>> list(lm.state_dict(nnx.List([nnx.Linear(2, 3, rngs=nnx.Rngs(0))])))
        ['0.kernel', '0.bias']
    """
    check_is_model(model)
    with stacks.apart():
        return _state_dict(model, include_rng)


def _state_dict(model: Any, include_rng: bool) -> dict[str, Any]:
    hooked = [(p, n) for p, n in _graph.nodes(model) if hooks_of(n)]
    for path, node in hooked:
        run_hooks(node, "state_dict_pre", prefix_of(path), True)
    out: dict[str, Any] = {}
    places = named_places(model)
    for place in places.values():
        if place.is_rng and not include_rng:
            continue
        value = place.value
        if is_key(value) and not _graph.is_placeholder(value):
            if is_deleted(value):
                needed, line = "a key with data", "lm.state_dict(model)  # before the step that donates the model"
                raise StateDictError(Problem(place.name, "a random key that was deleted or donated", needed, line))
            out[place.name] = jax.random.key_data(value)
            name = f"{place.name}.{IMPL}"
            if name in places:
                needed, line = "that name for the key's implementation", f"module.other = module.{IMPL}  # another name"
                raise StateDictError(Problem(name, f"an entry beside the key {place.name}", needed, line))
            out[name] = np.frombuffer(str(jax.random.key_impl(value)).encode(), np.uint8)
        else:
            out[place.name] = value
    for path, node in reversed(hooked):  # children before parents
        run_hooks(node, "state_dict_post", out, prefix_of(path), {})
    return out
