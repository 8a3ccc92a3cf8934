"""The operators that come with the package: by numpy, and by Flax's own layers, forward and backward."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm
from lazymods.dispatch import attention

TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 1e-2}


@pytest.fixture(autouse=True)
def standard_promotion() -> Iterator[None]:
    """Attention of jax.nn and norms of flax.nnx mix float32 with half precision."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def arrays(*shapes: tuple[int, ...], dtype: Any = "float32") -> list[Any]:
    draw = np.random.default_rng(0).standard_normal
    return [jnp.asarray(draw(shape, np.float32).astype(dtype)) for shape in shapes]


def close(got: Any, want: Any, dtype: Any = "float32") -> None:
    assert jnp.shape(got) == jnp.shape(want)
    wide = [np.asarray(x, np.float64) for x in (got, want)]
    np.testing.assert_allclose(*wide, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def attend(query: Any, key: Any, value: Any, mask: Any = None, bias: Any = 0.0, scale: Any = None) -> Any:
    """Attention as its definition has it, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    weights = np.einsum("bqhd,bkhd->bhqk", q, k) * (1 / np.sqrt(q.shape[-1]) if scale is None else scale)
    weights = weights + np.asarray(bias, np.float64)
    weights = weights if mask is None else np.where(np.asarray(mask), weights, -np.inf)
    weights = np.exp(weights - weights.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # XLA has no attention in float16 on CPU
@pytest.mark.parametrize("wrap", [jax.jit, lm.jit], ids=["jit", "lm_jit"])
def test_attention(wrap: Any, dtype: str) -> None:
    query, key, value = arrays((2, 5, 3, 8), (2, 7, 3, 8), (2, 7, 3, 8), dtype=dtype)
    op: Any = lm.dispatch.dot_product_attention
    out = wrap(lambda q, k, v: op(q, k, v))(query, key, value)
    assert out.dtype == dtype
    close(out, attend(query, key, value), dtype)
    (bias,), mask = arrays((2, 3, 5, 7), dtype=dtype), (jnp.arange(7) < 4).reshape(1, 1, 1, 7)
    close(wrap(lambda q, k, v: op(q, k, v, bias, mask, scale=0.5))(query, key, value),
          attend(query, key, value, mask, bias, 0.5), dtype)  # fmt: skip
    causal = np.tril(np.ones((7, 7), bool))
    close(wrap(lambda k, v: op(k, k, v, is_causal=True))(key, value), attend(key, key, value, causal), dtype)


def test_the_gradient_of_attention_is_that_of_flax() -> None:
    given = arrays((2, 5, 3, 8), (2, 7, 3, 8), (2, 7, 3, 8))
    ours = jax.jit(jax.grad(lambda *x: (lm.dispatch.dot_product_attention(*x) ** 2).sum(), (0, 1, 2)))(*given)
    theirs = jax.jit(jax.grad(lambda *x: (nnx.dot_product_attention(*x) ** 2).sum(), (0, 1, 2)))(*given)
    jax.tree.map(close, ours, theirs)


@pytest.mark.parametrize(
    "case, fits",
    [
        ({}, True),
        ({"dtype": "float16"}, True),
        ({"dtype": "float32"}, False),
        ({"tokens": 1023}, False),
        ({"features": 136}, False),
        ({"features": 60}, False),
        ({"keys": 2048}, False),
        ({"keys": 2048, "is_causal": False}, True),
        ({"keys": 512, "is_causal": False}, False),
    ],
    ids=str,
)
def test_what_cudnn_is_taken_for(case: dict[str, Any], fits: bool) -> None:
    facts = {"dtype": "bfloat16", "tokens": 1024, "features": 64, "is_causal": True} | case
    query = jax.ShapeDtypeStruct((2, facts["tokens"], 4, facts["features"]), facts["dtype"])
    shape = (2, facts.get("keys", facts["tokens"]), 4, facts["features"])
    key = jax.ShapeDtypeStruct(shape, facts["dtype"])
    assert attention.fits_cudnn(query, key, key, facts["is_causal"]) is fits


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="JAX lowers cuDNN's attention for one platform at a time")
def test_a_program_for_cuda_is_made_without_cudnn_too() -> None:
    """On a machine that has none, it is XLA's."""
    spec = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.bfloat16)

    def loss(q: Any) -> Any:
        return lm.dispatch.dot_product_attention(q, q, q, is_causal=True).astype("float32").sum()

    for function in (loss, jax.grad(loss)):
        exported = jax.export.export(
            jax.jit(function),
            platforms=["cpu", "cuda"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("__cudnn$fmhaSoftmax")],
        )
        assert exported(spec).platforms == ("cpu", "cuda")


def test_one_batch_axis_may_be_symbolic() -> None:
    shape = jax.export.symbolic_shape("b, 4, 2, 8")
    op: Any = lm.dispatch.dot_product_attention
    spec = jax.ShapeDtypeStruct(shape, jnp.float32)
    exported = jax.export.export(jax.jit(lambda q: op(q, q, q)), platforms=["cpu", "cuda"])(spec)
    (query,) = arrays((3, 4, 2, 8))
    close(exported.call(query), attend(query, query, query))


# ---------------------------------------------------------------- in Flax's layers


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lazy", [False, True], ids=["explicit", "lazy"])
def test_use_changes_no_value(lazy: bool, dtype: str) -> None:
    (x,) = arrays((2, 5, 16), dtype=dtype)
    options: Any = {"decode": False, "dtype": dtype}
    own: Any = nnx.MultiHeadAttention(4, 16, rngs=nnx.Rngs(0), **options)
    other: Any = lm.LazyMultiHeadAttention(4, rngs=nnx.Rngs(0), **options) if lazy else nnx.clone(own)
    model = nnx.Sequential(other)
    assert lm.dispatch.use(model, "attention") == ["layers.0"]
    assert lm.dispatch.use(model, "attention") == []  # it has it already
    mask = nnx.make_causal_mask(x[..., 0])
    other(x)
    for given in ({}, {"mask": mask}, {"is_causal": True}):
        call = nnx.jit(lambda m, x, given=given: m(x, **given))
        close(call(other, x), call(own, x), dtype)
    if dtype == "float32":
        gradient = nnx.jit(nnx.grad(lambda m: (m(x, is_causal=True) ** 2).sum()))
        of_own, of_other = gradient(own), gradient(other)
        jax.tree.map(close, nnx.to_pure_dict(of_other), nnx.to_pure_dict(of_own))
    for copied in (copy.deepcopy(other), pickle.loads(pickle.dumps(other)), nnx.clone(other)):
        assert copied.attention_fn is lm.dispatch.attention_fn
        close(copied(x), own(x), dtype)


@pytest.mark.slow
def test_what_the_operator_lacks_is_left_to_flax() -> None:
    (x,) = arrays((2, 5, 16))
    several: tuple[Any, ...] = ({"dropout_rate": 0.5, "deterministic": False}, {"precision": "highest"})
    for options in several:
        own: Any = nnx.MultiHeadAttention(4, 16, rngs=nnx.Rngs(0), decode=False, **options)
        other: Any = nnx.clone(own)
        lm.dispatch.use(other, "attention")
        close(other(x, rngs=nnx.Rngs(3)), own(x, rngs=nnx.Rngs(3)))
    own = nnx.MultiHeadAttention(4, 16, rngs=nnx.Rngs(0), decode=False)
    other = nnx.clone(own)
    lm.dispatch.use(other, "attention")
    close(other(x[None]), own(x[None]))  # two axes of the batch


def test_an_attention_fn_of_the_users_own_stays() -> None:
    def mine(*args: Any, **kwargs: Any) -> Any:
        return nnx.dot_product_attention(*args, **kwargs)

    model = nnx.List([nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0), attention_fn=fn) for fn in (mine, mine)])
    model.append(nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0)))
    assert lm.dispatch.use(model, "attention") == ["2"]
    assert model[0].attention_fn is mine


# ---------------------------------------------------------------- norms and linear layers


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norms_are_those_of_flax(dtype: str) -> None:
    x, scale, bias = arrays((4, 3, 32), (32,), (32,), dtype=dtype)
    options: Any = {"rngs": nnx.Rngs(0), "dtype": dtype, "param_dtype": dtype}
    layer: Any = nnx.LayerNorm(32, **options)
    rms: Any = nnx.RMSNorm(32, **options)
    layer.scale[...], rms.scale[...], layer.bias[...] = scale, scale, bias
    op: Any = lm.dispatch.layer_norm
    out = jax.jit(op)(x, scale, bias)
    assert out.dtype == dtype
    close(out, layer(x), dtype)
    close(jax.jit(lm.dispatch.rms_norm)(x, scale), rms(x), dtype)
    close(jax.jit(lambda x: op(x, epsilon=0.5))(x), nnx.LayerNorm(32, epsilon=0.5, **options)(x), dtype)
    if dtype == "float32":
        ours = jax.jit(jax.grad(lambda *a: (op(*a) ** 2 * jnp.cos(x)).sum(), (0, 1, 2)))(x, scale, bias)
        for i, (got, given) in enumerate(zip(ours, (x, scale, bias), strict=True)):

            def of_flax(value: Any, i: int = i) -> Any:
                parts = [x, scale, bias]
                parts[i] = value
                wide = (parts[0] - parts[0].mean(-1, keepdims=True)) / jnp.sqrt(parts[0].var(-1, keepdims=True) + 1e-6)
                return ((wide * parts[1].reshape(1, 1, 32) + parts[2].reshape(1, 1, 32)) ** 2 * jnp.cos(x)).sum()

            np.testing.assert_allclose(got, jax.jit(jax.grad(of_flax))(given), rtol=1e-3, atol=1e-3)


def test_a_linear_layer_and_its_activation() -> None:
    x, kernel, bias = arrays((4, 3, 8), (8, 5), (5,))
    layer: Any = nnx.Linear(8, 5, rngs=nnx.Rngs(0))
    layer.kernel[...], layer.bias[...] = kernel, bias
    op: Any = lm.dispatch.linear_activation
    close(jax.jit(op)(x, kernel, bias), jax.nn.relu(layer(x)))
    close(jax.jit(lambda *a: op(*a, activation="gelu"))(x, kernel, bias), jax.nn.gelu(layer(x)))
    close(jax.jit(lambda *a: op(*a, activation=jnp.tanh))(x, kernel), jnp.tanh(x @ kernel))
    with pytest.raises(lm.dispatch.RegistrationError, match=r"(?s)activation='gellu'.*jax\.nn"):
        op(x, kernel, activation="gellu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("scaled", [False, True], ids=["bare", "scaled"])
def test_norms_are_those_of_flax_to_the_bit(dtype: str, scaled: bool) -> None:
    x = jnp.arange(24).reshape(4, 6).astype(dtype)
    wide = "float32" if dtype == "int32" else dtype
    layer: Any = nnx.LayerNorm(6, use_scale=scaled, use_bias=scaled, param_dtype=wide, rngs=nnx.Rngs(0))
    root: Any = nnx.RMSNorm(6, use_scale=scaled, param_dtype=wide, rngs=nnx.Rngs(0))
    scale = jnp.linspace(0.5, 2.0, 6).astype(wide) if scaled else None
    if scaled:
        layer.scale[...] = root.scale[...] = scale
    bias = jnp.zeros(6, wide) if scaled else None
    pairs = ((lm.dispatch.layer_norm(x, scale, bias), layer(x)), (lm.dispatch.rms_norm(x, scale), root(x)))
    for got, want in pairs:
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
