"""What to write where the value of a placeholder is asked for: it depends on who asks."""

from __future__ import annotations

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
