"""What to write where the value of a placeholder is asked for: it depends on who asks."""

from __future__ import annotations

from typing import Any

from flax import nnx

from lazymods import _graph

SIZE_LINE = "lm.materialize(model, jax.ShapeDtypeStruct(x.shape, x.dtype))  # or model(x), first"
_LINES = {  # by the module of Flax that asks for a value
    nnx.bridge.__name__: "nnx.bridge.to_linen(make)  # make(rngs) returns the model after lm.materialize(model, spec)",
    nnx.Optimizer.__module__: "optimizer = lm.LazyOptimizer(model, tx, wrt=nnx.Param)  # waits for the parameters",
    nnx.tabulate.__module__: "print(lm.summary(model, jax.ShapeDtypeStruct(x.shape, x.dtype)))",
}


def line_for_caller() -> str:
    """Return the line to write instead of what the callers do."""
    asked = (line for module, line in _LINES.items() if _graph.is_called_from(module))
    return next(asked, SIZE_LINE)


def plain_holder(target: Any) -> tuple[str, Any] | None:
    """Return the class of the module without anything that infers sizes which holds a placeholder, and under which key.

    None if it hangs in a lazy layer, or in nothing that the callers have.
    """
    found = None
    for (*above, key), holder in _graph.holders(target):
        for step in above:
            if _graph.is_lazy_node(holder):
                return None
            holder = _graph.get_child(holder, step)
        if _graph.is_lazy_node(holder):
            return None
        if isinstance(holder, nnx.Pytree):
            found = type(holder).__name__, key
    return found


def line_for_holder(name: str, key: Any, shape: tuple[int | None, ...] | None) -> str:
    """Return the method that sizes a placeholder of a module of one's own, once its class is a lazy one."""
    lengths = (None,) if shape is None else shape
    sizes = ", ".join("x.shape[-1]" if n is None else str(n) for n in lengths) + ("," if len(lengths) == 1 else "")
    method = f"def initialize_parameters(self, x): self.{key}.materialize(({sizes}))"
    return f"{method}  # in class {name}(lm.LazyModuleMixin, nnx.Module)"
