"""An optimizer for a model that has no parameters yet."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.nnx.training.optimizer import OptState

from lazymods import _compat, _graph
from lazymods._errors import PendingAttributeError, Problem, UninitializedError
from lazymods._frames import entry
from lazymods._graph import STATE
from lazymods._layer import contexts, lifecycle
from lazymods._layer.building import LazyState
from lazymods._model.planning import place_state
from lazymods._refusals import refuse_class, wrong_argument


class LazyOptimizer(nnx.Optimizer[Any]):
    """An ``nnx.Optimizer`` whose state is made at its first update, when the model has been materialized.

    It becomes ``nnx.Optimizer`` then; at once if the model is ready when it is made. Where the model's parameters are
    on a mesh, what is kept for each is where that one is, and all else is on each device.

    Args:
        model: The model, lazy or not.
        tx: An optax gradient transformation.
        wrt: Which Variables it trains, such as ``nnx.Param``; as for ``nnx.Optimizer``.

    Raises:
        ArgumentError: If ``tx`` is no optax transformation.
        UninitializedError: At an update, if the model still has uninitialized parameters.

    Example:
        >>> import jax.numpy as jnp, lazymods as lm, optax
        >>> from flax import nnx
        >>> model = lm.LazyLinear(1, rngs=nnx.Rngs(0))
        >>> optimizer = lm.LazyOptimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        >>> x = jnp.ones((2, 3))
        >>> _ = model(x)
        >>> _ = optimizer.update(model, nnx.grad(lambda m: m(x).sum())(model))
        >>> type(optimizer).__name__
        'Optimizer'
    """

    cls_to_become = nnx.Optimizer

    @entry
    def __init__(self, model: Any, tx: optax.GradientTransformation, *, wrt: Any) -> None:
        refuse_class(model)
        if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
            needed = "the model, then an optax transformation, as optax.adam(1e-3) returns it"
            line = "lm.LazyOptimizer(model, optax.adam(1e-3), wrt=nnx.Param)"
            raise wrong_argument("LazyOptimizer: tx", tx, needed, line)
        if not _uninitialized(model, wrt):
            super().__init__(model, tx, wrt=wrt)
            place_state(self, model)
            lifecycle.finish_class(self)
            return
        self.graph: Any = None
        self.step: OptState = OptState(jnp.array(0, dtype=jnp.uint32))
        self.tx = tx
        self.wrt = wrt
        object.__setattr__(self, STATE, LazyState())
        with contextlib.suppress(TypeError):  # of a subclass that cannot be hashed
            _MODELS[self] = weakref.ref(model)

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> Any:
        """Make the state if there is none yet, then update as ``nnx.Optimizer`` does.

        Raises:
            ArgumentError: If the gradients come first.
            UninitializedError: If the model still has uninitialized parameters.
        """
        try:
            if isinstance(model, nnx.State):
                needed, line = "the model first, then its gradients", "optimizer.update(model, grads)"
                raise wrong_argument("optimizer.update", nnx.State, needed, line)
            if STATE in vars(self):
                made = _make_sized(model, self.wrt)
                self.make_state(model)
                if made:
                    grads = _with_zeros(model, grads, self.wrt, made)
            return nnx.Optimizer.update(self, model, grads, **kwargs)
        except Exception as error:
            _compat.hide_frames(error)
            raise

    def make_state(self, model: Any) -> None:
        """Make the state that the first update would make, for a model that has all its parameters.

        Args:
            model: The model that the optimizer trains.

        Raises:
            UninitializedError: If it still has uninitialized parameters.
        """
        left = _uninitialized(model, self.wrt)
        if left:
            got = f"an update while {', '.join(left)} are uninitialized"
            needed = "parameters with values, to make the optimizer's state from"
            write = "lm.materialize(model, x)  # before; a layer that the loss does not reach: call it once, "
            write += "remove it, or leave it out of wrt"
            raise UninitializedError(Problem(type(self).__name__, got, needed, write))
        if _graph.LOCAL.updated is not None:
            _graph.LOCAL.updated.append((self, model))
        keep_class = contexts.is_carried(self)
        with _compat.at_trace(_compat.home_trace(self)):
            made = nnx.Optimizer(model, self.tx, wrt=self.wrt)
            made.opt_state = jax.tree.map(_as_input, made.opt_state)
            step = self.step
            names = _compat.data_names(made)
            attributes = vars(made) | {"step": step}
            state = vars(self)[_compat.STATE]
            vars(self).clear()
            vars(self).update(attributes | {_compat.STATE: state})
            _compat.set_data_names(self, names)
        place_state(self, model)
        if not keep_class:
            lifecycle.finish_class(self)

    def __getattr__(self, name: str) -> Any:
        """Say that the optimizer's state is pending."""
        if name == "opt_state" and STATE in vars(self):
            got, needed = "a use of .opt_state", "the model's parameters, which have no values yet"
            write = "lm.materialize(model, x); optimizer.update(model, grads)"
            raise PendingAttributeError(Problem(type(self).__name__, got, needed, write))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _graph_node_clear(self) -> None:
        super()._graph_node_clear()
        lifecycle.start_update(self)

    def _graph_node_init(self, attributes: Iterable[tuple[Any, Any]]) -> None:
        super()._graph_node_init(attributes)
        lifecycle.end_update(self)


def _as_input(x: Any) -> Any:
    """Hide from the compiler what a state begins with, if it is made in a trace.

    The update is compiled as for a state that is an input, then, and rounds in the same way. (jax 0.10.2 to 0.12.0, on
    CPU: Adam's first update with zeros that XLA could see differs in the last bit.)
    """
    return jax.lax.optimization_barrier(x) if _compat.is_tracer(x) else x


_MODELS: weakref.WeakKeyDictionary[LazyOptimizer, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def model_of(optimizer: LazyOptimizer) -> Any:
    """Return the model that an optimizer without a state was made for, if it is there and has its parameters now.

    A copy of an optimizer was made for none: the model may have been copied with it.
    """
    try:
        made_for = _MODELS.get(optimizer)
    except TypeError:  # of a subclass that cannot be hashed
        return None
    model = None if made_for is None else made_for()
    return None if model is None or _uninitialized(model, optimizer.wrt) else model


def _make_sized(model: Any, wrt: Any) -> set[int]:
    """Initialize the layers that no call has reached, where all sizes are given; return the ids of their parameters."""
    chosen = {id(v) for _, v in nnx.to_flat_state(nnx.state(model, wrt))}
    made: set[int] = set()
    found = []
    for _, layer in _graph.lazy_nodes(model):
        spec = vars(layer)[STATE].spec
        own = {id(v) for v in _graph.variables(layer) if _graph.is_placeholder(v)}
        if spec is None or spec.size_names or spec.modules or not own & chosen:
            continue
        if _graph.LOCAL.session is None and contexts.is_carried(layer):
            continue
        found.append((layer, spec))
        made |= own
    if not {id(v) for v in _graph.variables(model) if _graph.is_placeholder(v) and id(v) in chosen} <= made:
        return set()  # others are left: the update is refused, and changes nothing
    for layer, spec in found:
        if _graph.LOCAL.session is not None:  # in an abstract run, which notes it and makes nothing
            _graph.LOCAL.session.initialize(layer, (), {})
            continue
        lifecycle.settle(layer, lifecycle.fill(layer, spec.values({})))
    return made


def _with_zeros(model: Any, grads: Any, wrt: Any, made: set[int]) -> Any:
    """Return gradients with zeros for parameters that were made after them: the loss did not depend on those."""
    flat = dict(nnx.to_flat_state(grads))
    for path, variable in nnx.to_flat_state(nnx.state(model, wrt)):
        if (path not in flat or _graph.is_placeholder(flat[path])) and id(_graph.at(model, path)) in made:
            flat[path] = jax.tree.map(jnp.zeros_like, variable)
    return nnx.from_flat_state(flat)


def _uninitialized(model: Any, wrt: Any) -> list[str]:
    chosen = {id(v) for _, v in nnx.to_flat_state(nnx.state(model, wrt))}
    return [e.name for e in _graph.entries(model) if _graph.is_placeholder(e.value) and id(e.value) in chosen]
