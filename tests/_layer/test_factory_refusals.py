"""``lm.lazy`` when the constructor, ``infer``, the arguments or the input are not what they should be."""
# pyright: reportCallIssue=false, reportArgumentType=false

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import array, assert_same_bits, assert_same_model, lazy_mlp, plain_mlp
from jax import export

import lazymods as lm

X = array(4, 6)


def width(config: Mapping[str, Any], x: Any, **_: Any) -> dict[str, int]:
    return {"n": x.shape[-1]}


class Plain(nnx.Module):
    def __init__(self, n: int, m: int = 2, *, rngs: nnx.Rngs):
        self.w = nnx.Param(nnx.initializers.normal()(rngs.params(), (n, m), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...]


def lazy_plain(infer: Callable[..., Any] = width, **options: Any) -> Any:
    return lm.lazy(Plain, infer=infer)(rngs=nnx.Rngs(0), **options)


def assert_still_lazy(layer: Any) -> None:
    """It is as it was."""
    assert lm.is_lazy(layer) and lm.uninitialized_paths(layer) == ["w"] and layer.w.shape[0] is None


# ---------------------------------------------------------------- what infer returns

NONSENSE: dict[str, Any] = {
    "none": None,
    "int": 6,
    "list": [6],
    "tuple": ("n", 6),
    "text": "n",
    "empty": {},
    "other-name": {"in_features": 6},
    "too-many": {"n": 6, "k": 2},
    "no-text-name": {0: 6},
    "none-value": {"n": None},
    "text-value": {"n": "6"},
    "float-value": {"n": 6.0},
    "nan-value": {"n": float("nan")},
    "bool-value": {"n": True},
    "numpy-bool": {"n": np.True_},
    "negative": {"n": -6},
    "zero": {"n": 0},
    "tuple-value": {"n": (6,)},
    "array-value": {"n": np.ones(2, np.int32)},
    "float-array": {"n": jnp.float32(6.0)},
    "spec-value": {"n": jax.ShapeDtypeStruct((6,), jnp.float32)},
    "module": {"n": nnx.Linear(2, 2, rngs=nnx.Rngs(0))},
    "dict-value": {"n": {"n": 6}},
    "class": {"n": int},
}


@pytest.mark.parametrize("returned", NONSENSE.values(), ids=NONSENSE)
def test_infer_returns_nonsense(returned: Any) -> None:
    answers = [returned]
    layer = lazy_plain(lambda config, x: answers[0])
    for first in (lambda: layer(X), lambda: lm.materialize(layer, X), lambda: nnx.jit(lambda m: m(X))(layer),
                  lambda: jax.jit(lambda x: layer(x))(X)):
        with pytest.raises(lm.ShapeInferenceError, match="LazyPlain"):
            first()
        assert_still_lazy(layer)
    answers[0] = {"n": 6}
    assert_same_bits(layer(X), Plain(6, rngs=nnx.Rngs(0))(X))
    assert_same_model(layer, Plain(6, rngs=nnx.Rngs(0)))


def test_infer_returns_a_generator() -> None:
    layer = lazy_plain(lambda config, x: (c for c in "n"))
    with pytest.raises(lm.ShapeInferenceError, match="infer returned"):
        layer(X)
    assert_still_lazy(layer)


READS: dict[str, Callable[[Any], Any]] = {
    "index": lambda x: x[0, 0],
    "sum": lambda x: x.sum(),
    "jnp": jnp.sum,
    "numpy": lambda x: np.asarray(x, np.float32).max(),
    "compare": lambda x: x > 0,
    "iterate": list,
    "arithmetic": lambda x: x + 1,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_infer_that_reads_values(read: Callable[[Any], Any]) -> None:
    layer = lazy_plain(lambda config, x: {"n": int(read(x))})
    for first in (lambda: layer(X), lambda: lm.materialize(layer, X), lambda: jax.jit(lambda x: layer(x))(X)):
        with pytest.raises(lm.ShapeInferenceError, match=r"f32\[4,6\](.|\n)*infer can tell the sizes; it raised"):
            first()
        assert_still_lazy(layer)


def test_the_cause_of_an_error_in_infer_is_kept() -> None:
    def infer(config: Mapping[str, Any], x: Any) -> dict[str, int]:
        raise LookupError("no such table")

    with pytest.raises(lm.ShapeInferenceError, match="LookupError: no such table") as caught:
        lazy_plain(infer)(X)
    assert isinstance(caught.value.__cause__, LookupError)


def test_an_infer_of_other_arguments_than_the_call() -> None:
    with pytest.raises(lm.ConfigurationError, match=r"infer\(config, x, y\)\n.*Plain.__call__ requires x"):
        lazy_plain(lambda config, x, y: {"n": x.shape[-1]})


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize("cls", [int, "Linear", None, Plain(2, rngs=nnx.Rngs(0)), lambda: 0, nnx.Pytree],
                         ids=["int", "text", "none", "instance", "function", "pytree"])
def test_not_a_module_class(cls: Any) -> None:
    with pytest.raises(TypeError, match=r"lazy takes an nnx\.Module class"):
        lm.lazy(cls, infer=width)


@pytest.mark.parametrize("infer", [None, 3, {"n": 6}], ids=str)
def test_infer_is_not_callable(infer: Any) -> None:
    with pytest.raises(TypeError, match="infer is a function"):
        lm.lazy(Plain, infer=infer)


ARGUMENTS: dict[str, Callable[[], Any]] = {
    "positional-option": lambda: lm.LazyLinear(4, 5, rngs=nnx.Rngs(0)),
    "positional-norm": lambda: lm.LazyBatchNorm(64, rngs=nnx.Rngs(0)),
    "positional-rngs": lambda: lm.LazyLinear(4, nnx.Rngs(0)),
    "positional-lazy": lambda: lm.lazy(Plain, infer=width)(6, rngs=nnx.Rngs(0)),
    "unknown-option": lambda: lm.LazyLinear(4, biased=True, rngs=nnx.Rngs(0)),
    "inferred-argument": lambda: lm.LazyLinear(4, in_features=3, rngs=nnx.Rngs(0)),
    "missing-required": lambda: lm.LazyLinear(rngs=nnx.Rngs(0)),
    "missing-rngs": lambda: lm.LazyLinear(4),
    "missing-rngs-lazy": lambda: lm.lazy(Plain, infer=width)(),
    "int-rngs": lambda: lm.LazyLinear(4, rngs=0),
    "key-rngs": lambda: lm.LazyLinear(4, rngs=jax.random.key(0)),
    "split-rngs": lambda: lm.LazyLinear(4, rngs=nnx.Rngs(0).split(2)),
}


@pytest.mark.parametrize("make", ARGUMENTS.values(), ids=ARGUMENTS)
def test_constructor_arguments(make: Callable[[], Any]) -> None:
    with pytest.raises(lm.ConfigurationError, match=r"Lazy\w+\n  got: (.|\n)*write:  (lm[.])?Lazy\w+\("):
        make()


def test_a_failed_constructor_draws_nothing() -> None:
    rngs = nnx.Rngs(0)
    for make in (lambda: lm.LazyLinear(4, biased=True, rngs=rngs), lambda: lm.LazyEinsum("ab,bc,cd->ad", rngs=rngs)):
        with pytest.raises(Exception, match=r"biased|einsum_str|operands"):
            make()
    layer, want = lm.LazyLinear(4, rngs=rngs), nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    layer(X)
    assert_same_model(layer, want)


def test_no_advice_to_give_rngs_to_a_class_that_takes_none() -> None:
    class Bare(nnx.Module):
        def __init__(self, n: int):
            self.w = nnx.Param(jnp.ones(n))

    with pytest.raises(lm.ConfigurationError) as caught:
        lm.lazy(Bare, infer=width)(depth=3)
    assert "rngs" not in str(caught.value)


def test_an_argument_that_has_no_hash() -> None:
    class Tagged(Plain):
        def __init__(self, n: int, tags: Any, *, rngs: nnx.Rngs):
            super().__init__(n, rngs=rngs)
            self.tags = tuple(sorted(tags))

    tags = {"a", "b"}
    layer = lm.lazy(Tagged, infer=width)(tags=tags, rngs=nnx.Rngs(0))
    assert_same_bits(layer(X), Plain(6, rngs=nnx.Rngs(0))(X))
    assert_same_model(layer, Tagged(6, tags, rngs=nnx.Rngs(0)))


# ---------------------------------------------------------------- constructors


class DecidesOnValues(nnx.Module):
    def __init__(self, n: int, *, rngs: nnx.Rngs):
        w = jax.random.normal(rngs.params(), (n,))
        self.w = nnx.Param(w if w[0] > 0 else -w)


class UsesNumpy(nnx.Module):
    def __init__(self, n: int, *, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.asarray(np.asarray(jax.random.normal(rngs.params(), (n,)))))


class ChecksFinite(nnx.Module):
    def __init__(self, n: int, *, rngs: nnx.Rngs):
        self.scale = float(jax.random.uniform(rngs.params(), ()))
        self.w = nnx.Param(jnp.ones(n))


class PicksByMask(nnx.Module):
    def __init__(self, n: int, *, rngs: nnx.Rngs):
        w = jax.random.normal(rngs.params(), (n,))
        self.w = nnx.Param(w[w > 0])


@pytest.mark.parametrize("cls", [DecidesOnValues, UsesNumpy, ChecksFinite, PicksByMask], ids=lambda c: c.__name__)
def test_a_constructor_that_cannot_be_traced(cls: type) -> None:
    rngs = nnx.Rngs(0)
    with pytest.raises(lm.LazyError) as caught:
        lm.lazy(cls, infer=width)(rngs=rngs)
    message = str(caught.value)
    assert f"Lazy{cls.__name__}" in message and "values" in message and "_blueprint" not in message
    assert_same_bits(rngs.params(), nnx.Rngs(0).params())


class EvenOnly(Plain):
    def __init__(self, n: int, *, rngs: nnx.Rngs):
        if n % 2:
            raise ValueError(f"an even number, not {n}")
        super().__init__(n, rngs=rngs)


def test_a_constructor_that_refuses_the_size() -> None:
    layer = lm.lazy(EvenOnly, infer=width)(rngs=nnx.Rngs(0))
    said = r"f32\[2,3\], so n=3(.|\n)*EvenOnly takes; it says: an even number"
    with pytest.raises(lm.ShapeInferenceError, match=said):
        layer(array(2, 3))
    assert_still_lazy(layer)
    layer(X)
    assert_same_model(layer, EvenOnly(6, rngs=nnx.Rngs(0)))


class Table(Plain):
    """Knows a few sizes only."""

    def __init__(self, n: int, *, rngs: nnx.Rngs):
        super().__init__(n, {4: 2, 6: 3}[n], rngs=rngs)


class Small(Plain):
    def __init__(self, n: int, *, rngs: nnx.Rngs):
        if n > 6:
            raise ValueError("at most 6")
        super().__init__(n, rngs=rngs)


@pytest.mark.parametrize("cls", [Table, Small], ids=lambda c: c.__name__)
def test_a_constructor_that_takes_few_sizes_works_or_is_refused_clearly(cls: Any) -> None:
    try:
        layer = lm.lazy(cls, infer=width)(rngs=nnx.Rngs(0))
    except lm.LazyError as error:
        assert f"Lazy{cls.__name__}" in str(error)
    else:
        layer(X)
        assert_same_model(layer, cls(6, rngs=nnx.Rngs(0)))


class Broken(nnx.Module):
    def __init__(self, n: int, *, rngs: nnx.Rngs):
        raise OSError("no such file")


def test_other_errors_of_a_constructor_come_through() -> None:
    with pytest.raises(OSError, match="no such file"):
        lm.lazy(Broken, infer=width)(rngs=nnx.Rngs(0))


# ---------------------------------------------------------------- symbolic sizes

(B, D) = export.symbolic_shape("b, d")


def exported(model: Any, *shape: Any) -> Any:
    return export.export(jax.jit(lambda x: model(x)))(jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.mark.slow
def test_a_symbolic_batch_axis() -> None:
    model = lazy_mlp()
    program = exported(model, B, 8)
    assert_same_model(model, plain_mlp())
    for batch in (1, 5):
        x = array(batch, 8)
        np.testing.assert_allclose(program.call(x), plain_mlp()(x), rtol=1e-5, atol=1e-6)


def test_a_symbolic_batch_axis_before_a_flatten() -> None:
    model = nnx.Sequential(lm.LazyConv(2, (3, 3), rngs=nnx.Rngs(0)), lambda x: x.reshape(x.shape[0], -1),
                           lm.LazyLinear(3, rngs=nnx.Rngs(1)))
    program = exported(model, B, 4, 4, 1)
    head: Any = model.layers[2]
    assert head.in_features == 32
    x = array(3, 4, 4, 1)
    np.testing.assert_allclose(program.call(x), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("find", [lm.materialize, lm.infer_shapes], ids=["materialize", "infer_shapes"])
def test_symbolic_specs(find: Callable[..., Any]) -> None:
    report = find(lazy_mlp(), jax.ShapeDtypeStruct((B, 8), jnp.float32))
    assert report.output.shape == (B, 4) and report.rows[0].inferred == {"in_features": 8}


@pytest.mark.parametrize("axis", [D, 2 * D, D + 1], ids=str)
@pytest.mark.parametrize("use", [exported, lambda m, *s: lm.materialize(m, jax.ShapeDtypeStruct(s, jnp.float32)),
                                 lambda m, *s: lm.infer_shapes(m, jax.ShapeDtypeStruct(s, jnp.float32))],
                         ids=["export", "materialize", "infer_shapes"])
def test_a_symbolic_feature_axis_is_refused(use: Callable[..., Any], axis: Any) -> None:
    model = lazy_mlp()
    with pytest.raises(lm.ShapeInferenceError) as caught:
        use(model, B, axis)
    assert str(caught.value).splitlines() == [
        "fc1 (LazyLinear)",
        f"  got:    f32[b,{axis}]: in_features={axis}, a symbolic size",
        "  needed: a concrete feature axis: parameters need their sizes, only batch axes may be symbolic",
        "  write:  layer(x)  # with an input whose feature axis is an int",
    ]
    assert lm.uninitialized_paths(model) == ["fc1.kernel", "fc1.bias", "fc2.kernel", "fc2.bias"]
    model(array(2, 8))
    assert_same_model(model, plain_mlp())


# ---------------------------------------------------------------- first calls that fail, wrapped layers


class Containers(nnx.Module):
    """Raw arrays in a list and a dict, which are filled in place."""

    def __init__(self, n: int, *, rngs: nnx.Rngs):
        self.pair = nnx.data([jnp.ones(n), {"a": jax.random.normal(rngs.params(), (n,))}])

    def __call__(self, x: jax.Array) -> jax.Array:
        if x.dtype == jnp.bool_:
            raise TypeError("numbers only")
        return x * jnp.broadcast_to(self.pair[1]["a"], x.shape)


def test_containers_are_put_back_when_the_forward_fails() -> None:
    layer = lm.lazy(Containers, infer=width)(rngs=nnx.Rngs(0))
    pair, inner = layer.pair, layer.pair[1]
    with pytest.raises(TypeError, match="numbers only"):
        layer(X > 0)
    assert layer.pair is pair and pair[1] is inner and lm.uninitialized_paths(layer) == ["pair.0", "pair.1.a"]
    want = Containers(3, rngs=nnx.Rngs(0))
    assert_same_bits(layer(array(2, 3)), want(array(2, 3)))
    assert_same_model(layer, want)


def test_an_error_of_lazymods_in_infer_comes_through() -> None:
    def infer(config: Mapping[str, Any], x: Any) -> dict[str, int]:
        return {"n": len(lm.UninitializedParameter((None,)))}

    layer = lazy_plain(infer)
    with pytest.raises(lm.UninitializedError, match="a use of its length"):
        layer(X)
    assert_still_lazy(layer)


def test_a_parameter_of_a_wrapper_cannot_come_before_what_it_wraps() -> None:
    norm = lm.LazyWeightNorm(lm.LazyLinear(4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    (scale,) = [v for k, v in lm.state_dict(norm).items() if "scale" in k]
    with pytest.raises(lm.UninitializedError, match="a parameter that depends on a wrapped module"):
        scale.materialize((4,))
    want = nnx.WeightNorm(nnx.Linear(6, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    assert_same_bits(norm(X), want(X))
    assert_same_model(norm, want)


def test_a_wrapper_of_a_model_that_holds_lazy_layers() -> None:
    class Block(nnx.Module):
        def __init__(self, lazy: bool):
            self.fc: Any = lm.LazyLinear(4, rngs=nnx.Rngs(0)) if lazy else nnx.Linear(6, 4, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.fc(x)

    lazy, want = lm.LazyWeightNorm(Block(True), rngs=nnx.Rngs(1)), nnx.WeightNorm(Block(False), rngs=nnx.Rngs(1))
    assert_same_bits(lazy(X), want(X))
    assert_same_model(lazy, want)
