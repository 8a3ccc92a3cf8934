"""The full text of every kind of message: where, what was got, what is needed and why, the line to write."""

import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import array, lazy_mlp, spec

import lazymods as lm


def text(where: str, got: str, needed: str, write: str) -> str:
    """The four parts, as a message shows them."""
    return f"{where}\n  got:    {got}\n  needed: {needed}\n  write:  {write}"


def linear(**options: Any) -> Any:
    return lm.LazyLinear(4, rngs=nnx.Rngs(0), **options)


def reason(f: Callable[[], Any]) -> str:
    """What Flax, jax or Python itself says, whose words differ between their versions."""
    with pytest.raises(Exception) as caught:  # the type is not what this is about
        f()
    return " ".join(str(caught.value).split())


class Unpicklable:
    """An initializer with a fixed name that refuses to be pickled."""

    def __call__(self, key: Any, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.zeros(shape, dtype)

    def __repr__(self) -> str:
        return "<an initializer>"

    def __reduce__(self) -> Any:
        raise TypeError("not this one")


class Forgetful(lm.LazyModuleMixin, nnx.Module):
    def __init__(self) -> None:
        self.w = lm.UninitializedParameter()
        self.b = lm.UninitializedParameter((3,))

    def initialize_parameters(self, x: jax.Array) -> None:
        del x

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


class Decides(nnx.Module):
    """A forward that decides on values."""

    def __init__(self) -> None:
        self.fc = linear()

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.fc(x)
        return y if y.sum() > 0 else -y


class Twice(nnx.Module):
    """One layer at two widths."""

    def __init__(self) -> None:
        self.fc = linear()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(self.fc(x))


class Fails(nnx.Module):
    """A forward that multiplies what does not fit."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ x


class Elsewhere(nnx.Module):
    """A forward that uses a layer which is not its own."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return ELSEWHERE(x)


ELSEWHERE = linear()
X = array(2, 3)
SIZES = "its sizes, which follow from the first input, from a shape spec or from a checkpoint"
LINE = "lm.materialize(model, jax.ShapeDtypeStruct(x.shape, x.dtype))  # or model(x), first"
BEFORE = "lm.materialize(model, x)  # before the transform"
DICT = "a dict of positive ints for in_features: the arguments that were not given"
RETURN = 'return {"in_features": x.shape[-1]}'
OPTIONS = (
    "arguments as in LazyLinear(out_features, use_bias=..., dtype=..., param_dtype=..., precision=..., "
    "kernel_init=..., ...); options go by keyword, rngs is required"
)


def infers(value: Any) -> Callable[[], Any]:
    """A first call of a layer whose infer returns a value."""
    layer = lm.lazy(nnx.Linear, infer=lambda config, x: value)
    return lambda: layer(out_features=4, rngs=nnx.Rngs(0))(X)


def fails(config: Any, x: Any) -> dict[str, int]:
    raise KeyError("width")


def tiny_heads() -> Any:
    return lm.LazyMultiHeadAttention(3, rngs=nnx.Rngs(0))(array(2, 5, 4))


def half_filled() -> Any:
    layer = linear()
    layer.kernel.materialize((7, 4))
    return layer(X)


def other_bias() -> Any:
    layer = linear()
    layer.bias = lm.UninitializedParameter((5,))
    return layer(X)


MESSAGES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "placeholder-shape": (
        lambda: linear().kernel.materialize((7, 11)),
        lm.ShapeInferenceError,
        text("kernel (UninitializedParameter of LazyLinear)", "shape (7, 11)",
             "shape (?, 4), whose known axes are fixed", "parameter.materialize(shape)  # with sizes that agree"),
    ),
    "placeholder-sizes": (
        lambda: lm.UninitializedBuffer().materialize((2, -1)),
        lm.ShapeInferenceError,
        text("UninitializedBuffer", "shape (2, -1)", "whole sizes",
             "parameter.materialize(shape)  # with sizes that agree"),
    ),
    "placeholder-value": (
        lambda: linear().kernel.materialize((7, 4), jnp.ones((7, 3))),
        lm.ShapeInferenceError,
        text("kernel (UninitializedParameter of LazyLinear)", "a value f32[7,3]", "shape (7, 4), as asked for",
             "parameter.materialize(value.shape, value)"),
    ),
    "placeholder-use": (
        lambda: linear().kernel.get_value(),
        lm.UninitializedError,
        text("kernel (UninitializedParameter of LazyLinear)",
             "a use of its value, while it is an uninitialized parameter of shape (?, 4)", SIZES, LINE),
    ),
    "placeholder-size": (
        lambda: len(linear().kernel),
        lm.UninitializedError,
        text("kernel (UninitializedParameter of LazyLinear)",
             "a use of its length, while it is an uninitialized parameter of shape (?, 4)", SIZES, LINE),
    ),
    "placeholder-rank": (
        lambda: lm.UninitializedParameter().shape,
        lm.UninitializedError,
        text("UninitializedParameter", "a use of its shape, while it is an uninitialized parameter", SIZES, LINE),
    ),
    "placeholder-element": (
        lambda: linear().kernel.__setitem__(0, 1.0),
        lm.UninitializedError,
        text("kernel (UninitializedParameter of LazyLinear)",
             "a use of one of its elements, while it is an uninitialized parameter of shape (?, 4)", SIZES, LINE),
    ),
    "placeholder-attribute": (
        lambda: linear().kernel.at,
        AttributeError,
        text("kernel (UninitializedParameter of LazyLinear)",
             "a use of its attribute .at, while it is an uninitialized parameter of shape (?, 4)", SIZES, LINE),
    ),
    "layer-attribute": (
        lambda: linear().in_features,
        AttributeError,
        text("LazyLinear", "a use of .in_features", "its sizes, which are not known yet",
             "lm.materialize(model, jax.ShapeDtypeStruct(x.shape, x.dtype))  # or model(x), first"),
    ),
    "constructor-positional": (
        lambda: lm.LazyLinear(4, 5, rngs=nnx.Rngs(0)),  # pyright: ignore[reportCallIssue]
        lm.ConfigurationError,
        text("LazyLinear", "4, 5, rngs=Rngs (too many positional arguments)",
             f"no in_features: it is inferred from the first input; {OPTIONS}", "lm.LazyLinear(5, rngs=nnx.Rngs(0))"),
    ),
    "constructor-no-rngs": (
        lambda: lm.LazyLinear(4),  # pyright: ignore[reportCallIssue]
        lm.ConfigurationError,
        text("LazyLinear", "4 (missing a required argument: 'rngs')", OPTIONS,
             "lm.LazyLinear(4, rngs=nnx.Rngs(0))"),
    ),
    "constructor-rngs": (
        lambda: lm.LazyLinear(4, rngs=0),  # pyright: ignore[reportArgumentType]
        lm.ConfigurationError,
        text("LazyLinear", "rngs=0", "an nnx.Rngs with one key a stream", "LazyLinear(..., rngs=nnx.Rngs(0))"),
    ),
    "constructor-split-rngs": (
        lambda: lm.LazyLinear(4, rngs=nnx.Rngs(0).split(3)),
        lm.ConfigurationError,
        text("LazyLinear", "rngs=streams of several keys", "an nnx.Rngs with one key a stream",
             "LazyLinear(..., rngs=nnx.Rngs(0))"),
    ),
    "infer-rank": (
        lambda: linear()(jnp.float32(3.0)),
        lm.ShapeInferenceError,
        text("LazyLinear", "f32[]", "an array of at least 1 axis, whose axis -1 holds the features",
             "layer(x)  # with x of shape (batch, ..., features)"),
    ),
    "infer-zero": (
        lambda: linear()(jnp.zeros((3, 0))),
        lm.ShapeInferenceError,
        text("LazyLinear", "f32[3,0]: in_features=0",
             "at least one feature: an initializer divides by their number",
             "layer(x)  # with an input whose feature axis is not empty"),
    ),
    "infer-no-array": (
        lambda: linear()([1, 2.5]),
        lm.ShapeInferenceError,
        text("LazyLinear", "[1, 2.5]", "an array as the first argument: its shape tells the sizes",
             "layer(jnp.asarray(x))"),
    ),
    "infer-raises": (
        lambda: lm.lazy(nnx.Linear, infer=fails)(out_features=4, rngs=nnx.Rngs(0))(X),
        lm.ShapeInferenceError,
        text("LazyLinear", "f32[2,3]", "a call from which infer can tell the sizes; it raised KeyError: 'width'",
             "layer(x)  # with the arguments that its forward takes"),
    ),
    "infer-type": (
        infers(3),
        lm.ShapeInferenceError,
        text("LazyLinear", "f32[2,3]: infer returned 3", DICT, RETURN),
    ),
    "infer-names": (
        infers({"features": 3}),
        lm.ShapeInferenceError,
        text("LazyLinear", "f32[2,3]: infer returned the arguments ['features']", DICT, RETURN),
    ),
    "infer-value": (
        infers({"in_features": "3"}),
        lm.ShapeInferenceError,
        text("LazyLinear", "f32[2,3]: infer returned in_features='3'", DICT, RETURN),
    ),
    "constructor-refuses-sizes": (
        tiny_heads,
        lm.ShapeInferenceError,
        text("LazyMultiHeadAttention", "f32[2,5,4], so in_features=4, in_kv_features=4",
             "sizes that MultiHeadAttention takes; it says: "
             + reason(lambda: nnx.MultiHeadAttention(3, 4, rngs=nnx.Rngs(0))),
             "layer(x)  # with an input of another width"),
    ),
    "first-call-forward": (
        lambda: linear()(X > 0),
        lm.ShapeInferenceError,
        text("LazyLinear", "bool[2,3]",
             "an input that the layer takes; Flax says: "
             + reason(lambda: nnx.Linear(3, 4, rngs=nnx.Rngs(0))(X > 0)),
             "layer(x)  # with another input: the layer is as lazy as before"),
    ),
    "first-call-filled-slot": (
        half_filled,
        lm.ShapeInferenceError,
        text("kernel (Param of LazyLinear)", "a value of shape (7, 4)", "shape (3, 4), by the sizes inferred",
             "layer(x)  # with an input whose sizes give kernel that shape"),
    ),
    "first-call-other-placeholder": (
        other_bias,
        lm.ShapeInferenceError,
        text("bias (UninitializedParameter of LazyLinear)", "a placeholder of shape (5,)",
             "shape (4,), by the sizes inferred", "layer(x)  # with an input whose sizes give bias that shape"),
    ),
    "first-call-left-empty": (
        lambda: Forgetful()(X),
        lm.UninitializedError,
        text("Forgetful", "initialize_parameters left w, b uninitialized",
             "every parameter of the layer materialized by its initialize_parameters",
             "self.w.materialize(shape)\n          self.b.materialize(shape)"),
    ),
    "first-call-on-a-copy": (
        lambda: jax.jit(lambda m, x: m(x))(linear(), X),
        lm.UninitializedError,
        text("LazyLinear (bias, kernel)",
             "its first call on a copy of it that was made inside jax.jit (or an eval_shape)",
             "parameters that outlive the call: those made here would be lost",
             f"{BEFORE}; for output shapes alone, lm.infer_shapes(model, x)"),
    ),
    "first-call-under-nnx-grad": (
        lambda: nnx.grad(lambda m: m(X).sum())(linear()),
        lm.UninitializedError,
        text("LazyLinear (bias, kernel)",
             "its first call inside nnx.grad (or nnx.value_and_grad), of which it is an argument",
             "parameters to differentiate with respect to: none exist yet", BEFORE),
    ),
    "first-call-in-an-nnx-loop": (
        lambda: nnx.fori_loop(0, 2, lambda i, c: (c[0], c[0](c[1])), (linear(), jnp.ones((4, 4)))),
        lm.UninitializedError,
        text("LazyLinear (bias, kernel)",
             "its first call inside an NNX loop (nnx.scan, nnx.while_loop, nnx.fori_loop)",
             "the same parameters before and after every step of the loop", BEFORE),
    ),
    "abstract-run-values": (
        lambda: lm.materialize(Decides(), X),
        lm.ShapeInferenceError,
        text("Decides", "a forward that decides on the values of arrays",
             "shapes and dtypes alone: there are no values in an abstract run", "model(x), once"),
    ),
    "abstract-run-forward": (
        lambda: lm.infer_shapes(Fails(), spec(2, 3)),
        lm.ShapeInferenceError,
        text("Fails", "f32[2,3]", f"an input that the layer takes; it says: {reason(lambda: X @ X)}",
             "lm.materialize(model, x)  # with another input"),
    ),
    "abstract-run-elsewhere": (
        lambda: lm.infer_shapes(Elsewhere(), X),
        lm.UninitializedError,
        text("LazyLinear", "a lazy layer that is no part of the model, reached by its forward",
             "every lazy layer as an attribute of the model, so that it can be sized with it",
             "self.layer = layer  # in the model's __init__"),
    ),
    "optimizer-update": (
        lambda: lm.LazyOptimizer(linear(), optax.adam(0.1), wrt=nnx.Param).update(linear(), {}),
        lm.UninitializedError,
        text("LazyOptimizer", "an update while kernel, bias are uninitialized",
             "parameters with values, to make the optimizer's state from",
             "lm.materialize(model, x)  # before; a layer that the loss does not reach: call it once, remove it, or "
             "leave it out of wrt"),
    ),
    "optimizer-state": (
        lambda: lm.LazyOptimizer(linear(), optax.adam(0.1), wrt=nnx.Param).opt_state,
        AttributeError,
        text("LazyOptimizer", "a use of .opt_state", "the model's parameters, which have no values yet",
             "lm.materialize(model, x); optimizer.update(model, grads)"),
    ),
    "pickle": (
        lambda: pickle.dumps(linear(kernel_init=Unpicklable())),
        lm.SerializationError,
        text("LazyLinear", "kernel_init=<an initializer>, which does not pickle (not this one)",
             "arguments that pickle: a lazy layer is stored with those that it was given",
             "lm.materialize(model, x)  # or a function defined at the top of a module for kernel_init"),
    ),
}


@pytest.mark.parametrize("raises, error, expected", MESSAGES.values(), ids=MESSAGES)
def test_full_text(raises: Callable[[], Any], error: type[Exception], expected: str) -> None:
    with pytest.raises(error) as caught:
        raises()
    assert isinstance(caught.value, lm.LazyError)
    assert str(caught.value) == expected


def test_initializer_without_a_key() -> None:
    init = nnx.initializers.normal()
    said = reason(lambda: init(None, (2,), jnp.float32))  # type: ignore[arg-type]
    with pytest.raises(lm.UninitializedError) as caught:
        lm.UninitializedParameter((None,), init=init).materialize((2,))
    assert str(caught.value) == text("UninitializedParameter", "no key",
                                     f"its initializer draws random numbers ({said})",
                                     "UninitializedParameter(..., init=init, key=rngs.params())")


def test_sharding_without_a_mesh() -> None:
    metadata = {"out_sharding": ("a", "b")}
    said = reason(lambda: nnx.Linear(3, 4, kernel_metadata=metadata, rngs=nnx.Rngs(0)))
    with pytest.raises(lm.LazyError) as caught:
        linear(kernel_metadata=metadata)(X)
    message = str(caught.value)
    assert message.startswith("kernel ") and said in message
    assert "\n  got:    out_sharding=('a', 'b')\n" in message
    assert message.endswith("\n  write:  with jax.set_mesh(mesh): lm.materialize(model, x)")


def test_missing_initialize_parameters_is_a_plain_python_error() -> None:
    class Unfinished(lm.LazyModuleMixin, nnx.Module):
        def __init__(self) -> None:
            self.w = lm.UninitializedParameter()

        def __call__(self, x: jax.Array) -> jax.Array:
            return x

    with pytest.raises(NotImplementedError) as caught:
        Unfinished()(X)
    assert str(caught.value) == (
        "Unfinished must define initialize_parameters(self, *args, **kwargs): it gets the arguments of the first call "
        "and materializes every parameter, self.w.materialize((x.shape[-1],))"
    )


# ---------------------------------------------------------------- where: the path in the model that the caller holds


def use_of_value(model: Any) -> None:
    model.fc1.kernel.get_value()


def use_of_attribute(model: Any) -> None:
    _ = model.fc1.in_features


def wrong_shape(model: Any) -> None:
    model.fc1.kernel.materialize((7, 11))


def filled_slot(model: Any) -> None:
    model.fc1.kernel.materialize((7, 16))
    model(array(2, 8))


def ordinary_optimizer(model: Any) -> None:
    nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


WHERE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "value": (use_of_value, "fc1.kernel (UninitializedParameter of LazyLinear)"),
    "attribute": (use_of_attribute, "fc1 (LazyLinear)"),
    "wrong-shape": (wrong_shape, "fc1.kernel (UninitializedParameter of LazyLinear)"),
    "optimizer": (ordinary_optimizer, "fc1.bias (UninitializedParameter of LazyLinear)"),
    "input": (lambda model: model(jnp.float32(1.0)), "fc1 (LazyLinear)"),
    "forward": (lambda model: model(array(2, 8) > 0), "fc1 (LazyLinear)"),
    "materialize": (lambda model: lm.materialize(model, spec()), "fc1 (LazyLinear)"),
    "infer_shapes": (lambda model: lm.infer_shapes(model, spec(3, 0)), "fc1 (LazyLinear)"),
    "jax.jit": (lambda model: jax.jit(lambda m, x: m(x))(model, array(2, 8)), "fc1 (LazyLinear (bias, kernel))"),
    "nnx.grad": (lambda model: nnx.grad(lambda m: m(array(2, 8)).sum())(model), "fc1 (LazyLinear (bias, kernel))"),
}


@pytest.mark.parametrize("use, where", WHERE.values(), ids=WHERE)
def test_path_in_the_model(use: Callable[[Any], Any], where: str) -> None:
    model = lazy_mlp()
    with pytest.raises(lm.LazyError) as caught:
        use(model)
    assert str(caught.value).splitlines()[0] == where


def test_path_of_a_slot_that_was_filled_by_hand() -> None:
    model = lazy_mlp()
    with pytest.raises(lm.ShapeInferenceError) as caught:
        filled_slot(model)
    where = str(caught.value).splitlines()[0]
    assert where.startswith("fc1") and "kernel" in where and "LazyLinear" in where


def test_longest_path_wins() -> None:
    outer = nnx.List([nnx.Dict(block=lazy_mlp())])
    inner = outer[0]["block"].fc2
    with pytest.raises(lm.ShapeInferenceError) as caught:
        inner(jnp.float32(1.0))
    assert str(caught.value).splitlines()[0] == "0.block.fc2 (LazyLinear)"
