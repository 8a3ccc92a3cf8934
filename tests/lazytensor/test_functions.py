"""Eager JAX as the oracle over functions of jax.numpy, lax, nn, random and optax: values, dtypes, weak types."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

import lazymods as lm

X = jnp.asarray(np.linspace(0.1, 0.9, 12, dtype=np.float32).reshape(3, 4))
Y = jnp.asarray(np.linspace(0.9, 0.2, 12, dtype=np.float32).reshape(3, 4))
I = jnp.arange(1, 13, dtype=jnp.int32).reshape(3, 4)  # noqa: E741
B = X > 0.5
V = jnp.asarray([0.3, 0.1, 0.7], jnp.float32)
S = X @ X.T + jnp.eye(3)
KEY = jax.random.key(7)

UNARY = """
abs absolute acos acosh amax amin angle any all arccos arccosh arcsin arcsinh arctan arctanh argmax argmin
argsort argwhere around array asarray asin asinh atan atanh atleast_1d atleast_2d atleast_3d average cbrt ceil
conj copy cos cosh count_nonzero cumprod cumsum deg2rad degrees diagonal diff exp exp2 expm1 fabs flatnonzero
flip fliplr flipud floor frexp gradient i0 imag isfinite isinf isnan isneginf isposinf iscomplex isreal log
log10 log1p log2 logical_not max mean median min modf nan_to_num nanargmax nanargmin nancumprod nancumsum
nanmax nanmean nanmedian nanmin nanprod nanstd nansum nanvar negative nonzero ones_like positive prod ptp
rad2deg radians ravel real reciprocal rint rot90 round sign signbit sin sinc sinh sort spacing sqrt square std
sum tan tanh trace transpose tril triu trunc unique unwrap var zeros_like matrix_transpose
""".split()
BINARY = """
add arctan2 copysign divide equal float_power floor_divide fmax fmin fmod greater greater_equal heaviside
hypot isclose allclose array_equal less less_equal logaddexp logaddexp2 maximum minimum mod multiply nextafter
not_equal power remainder subtract true_divide concatenate_pair stack_pair hstack_pair vstack_pair outer inner
vdot kron union1d intersect1d setdiff1d append where_pair
""".split()
INTEGER = """
bitwise_and bitwise_or bitwise_xor left_shift right_shift gcd lcm bitwise_not bitwise_count invert
""".split()
LAX = """
abs acos asin atan cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor is_finite lgamma log log1p
logistic neg reciprocal round rsqrt sign sin sinh sqrt square tan tanh bessel_i0e bessel_i1e cumsum cumprod
cummax cummin cumlogsumexp full_like stop_gradient
""".split()
NN = """
relu relu6 sigmoid softplus soft_sign silu swish log_sigmoid hard_sigmoid hard_silu hard_tanh elu selu celu
gelu leaky_relu mish softmax log_softmax logsumexp standardize squareplus tanh identity sparse_plus glu
""".split()
SCIPY = """
erf erfc erfinv expit gammaln digamma i0e i1e logit ndtr log_ndtr entr
""".split()
LINALG = """
cholesky det eigvalsh inv norm slogdet matrix_rank pinv qr svd eigh cond matrix_norm vector_norm
""".split()
OTHER = {
    "matmul": lambda: X @ Y.T,
    "dot": lambda: jnp.dot(X, Y.T),
    "einsum": lambda: jnp.einsum("ij,kj->ik", X, Y),
    "tensordot": lambda: jnp.tensordot(X, Y, 2),
    "clip": lambda: jnp.clip(X, 0.3, 0.6),
    "where": lambda: jnp.where(B, X, Y),
    "select": lambda: jnp.select([B, ~B], [X, Y]),
    "pad": lambda: jnp.pad(X, ((1, 0), (0, 2))),
    "roll": lambda: jnp.roll(X, 2, 1),
    "take": lambda: jnp.take(X, jnp.array([0, 2]), 0),
    "take_along_axis": lambda: jnp.take_along_axis(X, jnp.argsort(Y, 1), 1),
    "repeat": lambda: jnp.repeat(X, 2, 0),
    "tile": lambda: jnp.tile(X, (2, 1)),
    "split": lambda: jnp.split(X, 2, 1),
    "reshape": lambda: X.reshape(4, -1),
    "swapaxes": lambda: jnp.swapaxes(X, 0, 1),
    "expand_dims": lambda: jnp.expand_dims(X, 1),
    "squeeze": lambda: jnp.squeeze(X[None]),
    "broadcast_to": lambda: jnp.broadcast_to(X, (2, 3, 4)),
    "meshgrid": lambda: jnp.meshgrid(V, V),
    "searchsorted": lambda: jnp.searchsorted(jnp.sort(V), X),
    "digitize": lambda: jnp.digitize(X, jnp.sort(V)),
    "histogram": lambda: jnp.histogram(X, 4),
    "bincount": lambda: jnp.bincount(I.ravel()),
    "percentile": lambda: jnp.percentile(X, 30),
    "quantile": lambda: jnp.quantile(X, 0.3, axis=1),
    "corrcoef": lambda: jnp.corrcoef(X),
    "cov": lambda: jnp.cov(X),
    "cross": lambda: jnp.cross(V, V[::-1]),
    "convolve": lambda: jnp.convolve(V, V),
    "correlate": lambda: jnp.correlate(V, V),
    "interp": lambda: jnp.interp(X, jnp.sort(V), V),
    "polyval": lambda: jnp.polyval(V, X),
    "polyfit": lambda: jnp.polyfit(X[0], Y[0], 1),
    "vander": lambda: jnp.vander(V),
    "diag": lambda: jnp.diag(V),
    "linspace": lambda: jnp.linspace(V[1], 1.0, 5),
    "logspace": lambda: jnp.logspace(0, 1, 3),
    "geomspace": lambda: jnp.geomspace(1, 8, 4),
    "arange": lambda: jnp.arange(I[0, 3]),
    "eye": lambda: jnp.eye(3, 4, 1),
    "full": lambda: jnp.full((2, 3), V[0]),
    "tri": lambda: jnp.tri(3),
    "insert": lambda: jnp.insert(V, 1, 5.0),
    "delete": lambda: jnp.delete(V, 1),
    "packbits": lambda: jnp.packbits(B),
    "lexsort": lambda: jnp.lexsort((X[0], Y[0])),
    "partition": lambda: jnp.partition(V, 1),
    "nan_to_num": lambda: jnp.nan_to_num(jnp.log(X - 0.5)),
    "piecewise": lambda: jnp.piecewise(X, [B, ~B], [lambda x: x, lambda x: -x]),
    "apply_along_axis": lambda: jnp.apply_along_axis(jnp.sum, 0, X),
    "vectorize": lambda: jnp.vectorize(lambda a, b: a * b)(X, Y),
    "ix_": lambda: X[jnp.ix_(jnp.array([0, 1]), jnp.array([1, 3]))],
    "at": lambda: (X.at[0].add(1.0), X.at[1, 2].set(3.0), X.at[:, 1].multiply(2.0), X.at[0].max(Y[1])),
    "fft": lambda: (jnp.fft.fft(X), jnp.fft.rfft2(X), jnp.fft.fftshift(V), jnp.fft.irfft(X)),
    "block": lambda: jnp.block([[X, Y], [Y, X]]),
    "ufunc_reduce": lambda: (jnp.add.reduce(X), jnp.multiply.accumulate(X), jnp.add.outer(V, V)),
    "astype": lambda: (X.astype(jnp.bfloat16), I.astype(float), X.astype(bool), X.astype(jnp.int8)),
    "view": lambda: jax.lax.bitcast_convert_type(X, jnp.int32),
    "lax_dot_general": lambda: lax.dot_general(X, Y, (((1,), (1,)), ((), ()))),
    "lax_conv": lambda: lax.conv(X[None, None], Y[None, None, :2, :2], (1, 1), "SAME"),
    "lax_reduce_window": lambda: lax.reduce_window(X, 0.0, lax.add, (2, 2), (1, 1), "VALID"),
    "lax_reduce": lambda: lax.reduce(X, 0.0, lax.add, (0,)),
    "lax_top_k": lambda: lax.top_k(V, 2),
    "lax_sort": lambda: lax.sort((V, V * 2), num_keys=1),
    "lax_gather": lambda: lax.slice_in_dim(X, 0, 2),
    "lax_dynamic": lambda: (lax.dynamic_slice(X, (1, I[0, 0]), (1, 2)), lax.dynamic_update_slice(X, Y[:1], (1, 0))),
    "lax_scan": lambda: lax.scan(lambda c, x: (c + x, c * x), V[0], V),
    "lax_map": lambda: lax.map(lambda x: x * 2, V),
    "lax_while": lambda: lax.while_loop(lambda c: c < 3, lambda c: c * 1.5, V[0]),
    "lax_fori": lambda: lax.fori_loop(0, 3, lambda i, c: c * V[0], V),
    "lax_cond": lambda: lax.cond(V[0] > 0, jnp.sin, jnp.cos, X),
    "lax_switch": lambda: lax.switch(I[0, 0], [jnp.sin, jnp.cos], X),
    "lax_select": lambda: lax.select(B, X, Y),
    "lax_clamp": lambda: lax.clamp(0.2, X, 0.7),
    "lax_associative_scan": lambda: lax.associative_scan(jnp.add, V),
    "lax_integer_pow": lambda: (lax.integer_pow(X, 3), lax.pow(X, Y), lax.nextafter(X, Y)),
    "lax_igamma": lambda: (lax.igamma(X, Y), lax.betainc(X, Y, X), lax.zeta(X + 1, Y)),
    "one_hot": lambda: jax.nn.one_hot(I[0] % 3, 3),
    "dot_product_attention": lambda: jax.nn.dot_product_attention(*[X.reshape(1, 3, 1, 4)] * 3),
    "solve": lambda: (jnp.linalg.solve(S, V), jnp.linalg.lstsq(S, V)[0], jnp.linalg.matrix_power(S, 3)),
    "scipy_linalg": lambda: (
        jax.scipy.linalg.expm(S),
        jax.scipy.linalg.solve_triangular(S, V),
        jax.scipy.linalg.lu(S),
    ),
    "random": lambda: (jax.random.normal(KEY, (3,)), jax.random.uniform(KEY, (2, 2)), jax.random.split(KEY, 3)),
    "random_more": lambda: (
        jax.random.gumbel(KEY, (3,)),
        jax.random.choice(KEY, V, (2,)),
        jax.random.categorical(KEY, X),
        jax.random.truncated_normal(KEY, -1.0, 1.0, (3,)),
        jax.random.exponential(KEY, (3,)),
        jax.random.dirichlet(KEY, V),
        jax.random.gamma(KEY, V),
        jax.random.laplace(KEY, (3,)),
    ),
    "image": lambda: jax.image.resize(X, (6, 8), "bilinear"),
    "checkpoint": lambda: jax.grad(jax.checkpoint(lambda x: jnp.sin(x).sum()))(X),
    "hessian": lambda: jax.hessian(lambda v: (v**3).sum())(V),
    "flatten_util": lambda: ravel_pytree({"a": X, "b": V})[0],
}
OPTIMIZERS = {
    name: getattr(optax, name)
    for name in "adabelief adadelta adagrad adam adamax adamw amsgrad fromage lamb lars lion nadam noisy_sgd novograd "
    "optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd sm3 yogi adafactor".split()
}
LOSSES = """cosine_distance cosine_similarity hinge_loss huber_loss l2_loss log_cosh squared_error
sigmoid_binary_cross_entropy softmax_cross_entropy kl_divergence""".split()
ONE = ("bitwise_not", "bitwise_count", "invert")
PAIRS = {
    "concatenate_pair": lambda x, y: jnp.concatenate([x, y]),
    "stack_pair": lambda x, y: jnp.stack([x, y]),
    "hstack_pair": lambda x, y: jnp.hstack([x, y]),
    "vstack_pair": lambda x, y: jnp.vstack([x, y]),
    "where_pair": lambda x, y: jnp.where(x > y, x, y),
}


def call(f, *args):
    return lambda: f(*args)


def cases():
    yield from ((f"jnp.{n}", call(getattr(jnp, n), X)) for n in UNARY)
    yield from ((f"jnp.{n}", call(PAIRS.get(n) or getattr(jnp, n), X, Y)) for n in BINARY)
    yield from ((f"jnp.{n}", call(getattr(jnp, n), *([I] if n in ONE else [I, I[::-1]]))) for n in INTEGER)
    yield from ((f"lax.{n}", call(getattr(lax, n), *([X, 2.0] if n == "full_like" else [X]))) for n in LAX)
    yield from ((f"nn.{n}", call(getattr(jax.nn, n), X)) for n in NN)
    yield from ((f"scipy.{n}", call(getattr(jax.scipy.special, n), X)) for n in SCIPY)
    yield from ((f"linalg.{n}", call(getattr(jnp.linalg, n), S)) for n in LINALG)
    yield from OTHER.items()
    yield from ((f"optax.{n}", call(optimizer, f, n)) for n, f in OPTIMIZERS.items())
    yield from ((f"optax.{n}", call(gradient, getattr(optax, n))) for n in LOSSES)


def gradient(loss):
    return jax.value_and_grad(lambda x: loss(x, Y).sum())(X)


def optimizer(make, name):
    tx = make(1e-2, **{"seed": 0} if name == "noisy_sgd" and "seed" in inspect.signature(make).parameters else {})
    params = {"w": X, "b": V}
    state = tx.init(params)
    for _ in range(2):
        grads = jax.grad(lambda p: (p["w"] ** 2).sum() + (p["b"] ** 3).sum())(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


CASES = dict(cases())


def plain(x):
    x = jax.random.key_data(x) if jnp.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key) else x
    return np.asarray(x)


@pytest.mark.parametrize("name", CASES)
def test_equal_to_eager(name):
    run = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what JAX says about a function is no concern of this test
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            want = run()
            with lm.lazytensor.lazy():
                got = run()
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jax.typeof(g) == jax.typeof(w)  # shape, dtype, weak type
        g, w = plain(g), plain(w)
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        if g.dtype.kind in "fc":
            np.testing.assert_allclose(g, w, rtol=2e-4, atol=2e-5)
        else:
            np.testing.assert_array_equal(g, w)


def test_there_are_many():
    assert len(CASES) >= 300
