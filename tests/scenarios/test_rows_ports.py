"""Rows 190-207: what JAX and Flax NNX make a lazy layer decide that PyTorch never had to."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import array, assert_same_bits, assert_same_model, lazy_mlp, plain_mlp, spec

import lazymods as lm

PATHS = ["fc1.kernel", "fc1.bias", "fc2.kernel", "fc2.bias"]
X = array(2, 8)


def test_placeholders_show_in_the_state_and_not_among_leaves() -> None:
    model = lazy_mlp()
    state = nnx.state(model, nnx.Param)
    assert jax.tree.leaves(state) == []
    assert sorted(".".join(map(str, p)) for p, _ in nnx.to_flat_state(state)) == sorted(PATHS)
    with pytest.raises(lm.UninitializedError, match="fc1"):  # at creation, not at the first update
        nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


class Bias(lm.LazyModuleMixin, nnx.Module):
    """Its slot is a Variable from construction: its value may come later."""

    def __init__(self) -> None:
        self.b = lm.UninitializedParameter((None,), init=nnx.initializers.ones)

    def initialize_parameters(self, x: Any) -> None:
        self.b.materialize(x.shape[-1:])

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.b[None]


@pytest.mark.parametrize("run", [lambda m, x: m(x), nnx.jit(lambda m, x: m(x)), nnx.remat(lambda m, x: m(x))],
                         ids=["python", "nnx.jit", "nnx.remat"])
def test_a_slot_is_a_variable_from_the_start(run: Callable[[Any, Any], Any]) -> None:
    layer = Bias()
    assert_same_bits(run(layer, X), X + 1.0)
    assert type(layer.b) is nnx.Param


def pure(model: Any, x: jax.Array) -> Any:
    graphdef, state = nnx.split(model)
    return jax.jit(lambda s, x: nnx.merge(graphdef, s)(x))(state, x)


@pytest.mark.parametrize("run", [
    pytest.param(lambda m, x: jax.jit(lambda m, x: m(x))(m, x), id="row_192-report_b48-jax.jit"),
    pytest.param(pure, id="row_192-report_b48-split_merge"),
    pytest.param(lambda m, x: nnx.grad(lambda m: m(x).sum())(m), id="row_195-report_a19-nnx.grad"),
    pytest.param(lambda m, x: nnx.value_and_grad(lambda m: m(x).sum())(m), id="row_195-report_a19-value_and_grad"),
])
def test_where_parameters_would_be_lost_the_call_is_refused(run: Callable[[Any, Any], Any]) -> None:
    model = lazy_mlp()
    with pytest.raises(lm.UninitializedError) as error:
        run(model, X)
    assert "fc1" in str(error.value) and "lm.materialize(model, x)  # before" in str(error.value)
    assert lm.uninitialized_paths(model) == PATHS
    lm.materialize(model, spec(2, 8))
    run(model, X)
    assert_same_model(model, plain_mlp())


CLOSURES: dict[str, Callable[[Any, jax.Array], Any]] = {
    "jit": lambda f, x: jax.jit(lambda x: f(x))(x),
    "eval_shape": lambda f, x: jax.eval_shape(lambda x: f(x), x),
    "scan": lambda f, x: jax.lax.scan(lambda c, row: (c, f(row)), 0, x),
    "cond": lambda f, x: jax.lax.cond(True, lambda x: f(x), lambda x: 2 * f(x), x),
    "while": lambda f, x: jax.lax.while_loop(lambda c: c[1] < 2, lambda c: (c[0] + f(c[0]).sum(), c[1] + 1), (x, 0)),
    "vmap": lambda f, x: jax.vmap(lambda row: f(row))(x),
    "grad": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    "checkpoint": lambda f, x: jax.checkpoint(lambda x: f(x))(x),
    "linearize": lambda f, x: jax.linearize(lambda x: f(x), x)[0],
    "jit_of_grad_of_vmap": lambda f, x: jax.jit(jax.grad(lambda x: jax.vmap(f)(x).sum()))(x),
}


@pytest.mark.parametrize("run", CLOSURES.values(), ids=[f"row_193-reports_b47_c77_c80-{k}" for k in CLOSURES])
def test_closed_over_the_model_keeps_concrete_parameters(run: Callable[[Any, Any], Any]) -> None:
    model, want = lazy_mlp(), plain_mlp()
    with jax.checking_leaks():
        got = run(model, X)
    assert_same_model(model, want)  # looks for tracers as well
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, run(want, X))
    assert_same_bits(model(X), want(X))


CARRIED: dict[str, Callable[[Any], Any]] = {
    "jit": lambda f: nnx.jit(f),
    "vmap": lambda f: nnx.jit(nnx.vmap(f, in_axes=(None, 0))),
    "remat": lambda f: nnx.jit(nnx.remat(f)),
}


@pytest.mark.parametrize("wrap", CARRIED.values(), ids=[f"rows_194_202-report_a13-{k}" for k in CARRIED])
def test_as_argument_it_is_traced_at_most_twice(wrap: Callable[[Any], Any]) -> None:
    traces: list[str] = []

    def forward(model: Any, x: jax.Array) -> jax.Array:
        traces.append(type(model.fc1).__name__)
        return model(x)

    run, model, want = wrap(forward), lazy_mlp(), plain_mlp()
    for _ in range(5):
        assert jnp.allclose(run(model, X), want(X), rtol=1e-6)
    assert len(traces) <= 2
    assert_same_model(model, want)
    seen = len(traces)
    run(want, X)  # the same GraphDef: the program made for the lazy model serves the explicit one
    assert len(traces) == seen


@pytest.mark.parametrize("first", [lambda m: lm.materialize(m, spec(2, 8)), lambda m: m(X),
                                   lambda m: lm.load_state_dict(m, lm.state_dict(plain_mlp()))],
                         ids=["materialize", "call", "load"])
def test_made_ready_first_it_is_traced_once(first: Callable[[Any], Any]) -> None:
    traces: list[str] = []

    def forward(model: Any, x: jax.Array) -> jax.Array:
        traces.append(type(model.fc1).__name__)
        return model(x)

    run, model = nnx.jit(forward), lazy_mlp()
    first(model)
    for _ in range(3):
        run(model, X)
    run(plain_mlp(), X)
    assert traces == ["Linear"]


def test_shapes_without_becoming_ready() -> None:
    model = lazy_mlp()
    output = lm.infer_shapes(model, spec(2, 8)).output
    assert (output.shape, output.dtype) == ((2, 4), jnp.float32)
    with pytest.raises(lm.UninitializedError, match=r"lm\.infer_shapes"):
        nnx.eval_shape(lambda m, x: m(x), model, spec(2, 8))
    assert lm.uninitialized_paths(model) == PATHS


@pytest.mark.parametrize("names", [lambda sd: sd, lambda sd: {str(k): v for k, v in sd.items()}], ids=["own", "str"])
def test_list_children(names: Callable[[Any], Any]) -> None:
    def build(size: int | None) -> Any:
        return nnx.List([lazy_mlp(seed) if size is None else plain_mlp(size, seed) for seed in range(2)])

    model, want = build(None), build(8)
    sd = lm.state_dict(want)
    assert all(type(k) is str for k in sd) and list(sd) == [f"{i}.{name}" for i in range(2) for name in PATHS]
    assert lm.load_state_dict(model, names(sd)) == ([], [], [])
    assert_same_model(model[1], want[1])


UPDATES: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"fc1.kernel": jnp.ones((9, 9))}, "fc1.kernel"),
    "dtype": ({"fc1.kernel": jnp.ones((8, 16), jnp.complex64)}, "fc1.kernel"),
    "unknown": ({"fc3.kernel": jnp.ones((8, 16))}, "fc3.kernel"),
    "missing": ({"fc1.bias": None}, "fc1.bias"),
}


@pytest.mark.parametrize("change, name", UPDATES.values(), ids=[f"row_198-report_b67-{k}" for k in UPDATES])
@pytest.mark.parametrize("make", [lazy_mlp, plain_mlp], ids=["lazy", "ready"])
def test_a_load_checks_what_nnx_update_does_not(make: Callable[[], Any], change: dict[str, Any], name: str) -> None:
    model = make()
    before = lm.state_dict(model)
    entries = {k: v for k, v in (lm.state_dict(plain_mlp(seed=3)) | change).items() if v is not None}
    with pytest.raises(lm.StateDictError, match=name):
        lm.load_state_dict(model, entries)
    assert all(a is b for a, b in zip(lm.state_dict(model).values(), before.values(), strict=True))
    assert not hasattr(model, "fc3")


def test_nnx_update_of_a_lazy_layer_is_checked_at_its_first_call() -> None:
    layer, want = lm.LazyLinear(4, rngs=nnx.Rngs(0)), nnx.Linear(3, 4, rngs=nnx.Rngs(5))
    nnx.update(layer, nnx.state(want))
    assert_same_bits(layer(array(2, 3)), want(array(2, 3)))
    assert_same_model(layer, want)
    wrong = lm.LazyLinear(4, rngs=nnx.Rngs(0))
    nnx.update(wrong, nnx.state(nnx.Linear(7, 3, rngs=nnx.Rngs(5))))
    with pytest.raises(lm.ShapeInferenceError, match=r"kernel(.|\n)*\(7, 3\)(.|\n)*\(7, 4\)"):
        wrong(array(2, 7))


def tied() -> Any:
    r = nnx.Rngs(0)
    pair = nnx.List([lm.LazyLinear(8, rngs=r), lm.LazyLinear(8, rngs=r)])
    pair[1].kernel = pair[0].kernel
    return pair


@pytest.mark.parametrize("copier", [lambda m: m, lambda m: nnx.merge(*nnx.split(m)), nnx.clone],
                         ids=["itself", "merge", "clone"])
def test_a_tied_slot_is_one_entry_and_one_value(copier: Callable[[Any], Any]) -> None:
    pair = copier(tied())
    assert len(nnx.to_flat_state(nnx.state(pair))) == 3
    nnx.Sequential(*pair)(X)
    assert pair[0].kernel is pair[1].kernel
    assert len(jax.tree.leaves(nnx.state(pair))) == 3
    again = nnx.merge(*nnx.split(pair))
    assert again[0].kernel is again[1].kernel


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_are_saved_and_loaded(impl: str) -> None:
    def build(seed: int) -> Any:
        r = nnx.Rngs(jax.random.key(seed, impl=impl))
        return nnx.Sequential(nnx.Dropout(0.5, rngs=r), lm.LazyLinear(4, rngs=nnx.Rngs(seed)))

    model, other = build(0), build(1)
    model(X)
    assert list(lm.state_dict(model)) == ["layers.1.kernel", "layers.1.bias"]
    sd = lm.state_dict(model, include_rng=True)
    assert bytes(np.asarray(sd["layers.0.rngs.key.impl"])).decode() == impl
    plain = {k: np.asarray(v) for k, v in sd.items()}  # every value is an ordinary array
    assert plain["layers.0.rngs.key"].dtype == np.uint32
    assert lm.load_state_dict(other, plain) == ([], [], [])
    assert_same_bits(other(X), model(X))  # the mask as well


def test_norms_are_flax_s() -> None:
    norm, x = lm.LazyBatchNorm(rngs=nnx.Rngs(0)), jnp.array([[1.0], [5.0]])
    norm(x)
    np.testing.assert_allclose(norm.mean[...], [0.01 * 3.0], rtol=1e-6)  # momentum is the part that is kept
    np.testing.assert_allclose(norm.var[...], [0.99 + 0.01 * 4.0], rtol=1e-6)  # biased: divided by n
    assert (norm.momentum, norm.epsilon) == (0.99, 1e-5)
    for kind in (lm.LazyLayerNorm, lm.LazyGroupNorm, lm.LazyInstanceNorm):
        assert kind(rngs=nnx.Rngs(0)).epsilon == 1e-6
    assert lm.LazyGroupNorm(rngs=nnx.Rngs(0)).num_groups == 32


def test_layouts_are_flax_s() -> None:
    x = array(1, 5, 5, 2)
    conv, transposed = lm.LazyConv(4, (3, 3), rngs=nnx.Rngs(0)), lm.LazyConvTranspose(4, (3, 3), rngs=nnx.Rngs(0))
    assert conv(x).shape == transposed(x).shape == (1, 5, 5, 4)  # padding SAME
    assert conv.kernel.shape == transposed.kernel.shape == (3, 3, 2, 4)
    kernel = transposed.kernel[...]
    want = jax.lax.conv_transpose(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    np.testing.assert_allclose(transposed(x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [lambda r: lm.LazyLinear(4, rngs=r), lambda r: lm.LazyLinearGeneral(4, rngs=r),
                                  lambda r: lm.LazyConv(4, (3,), rngs=r), lambda r: lm.LazySimpleCell(4, rngs=r)],
                         ids=["Linear", "LinearGeneral", "Conv", "SimpleCell"])
def test_zero_width_is_a_clear_error(make: Callable[[nnx.Rngs], Any]) -> None:
    layer = make(nnx.Rngs(0))
    args = (jnp.zeros((2, 4)), jnp.ones((2, 0))) if isinstance(layer, lm.LazySimpleCell) else (jnp.ones((2, 5, 0)),)
    with pytest.raises(ValueError, match="at least one feature") as error:
        layer(*args)
    assert isinstance(error.value, lm.ShapeInferenceError) and lm.is_lazy(layer)


@pytest.mark.parametrize("make", [lambda: lm.LazyLinear(4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)),
                                  lambda: nnx.Linear(3, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))],
                         ids=["lazy", "ready"])
def test_bfloat16_through_numpy(make: Callable[[], Any]) -> None:
    want = nnx.Linear(3, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(7))
    as_numpy = {k: np.asarray(v) for k, v in lm.state_dict(want).items()}
    assert {str(v.dtype) for v in as_numpy.values()} == {"bfloat16"}
    layer = make()
    lm.load_state_dict(layer, as_numpy)
    assert_same_model(layer, want)


@pytest.mark.parametrize("make", [lambda: lm.UninitializedParameter((None,), dtype=jnp.int32),
                                  lm.UninitializedParameter, lambda: nnx.Param(jnp.zeros(2, jnp.int32))],
                         ids=["int32", "any_dtype", "ready"])
def test_integers_that_do_not_fit_are_refused(make: Callable[[], Any]) -> None:
    model = nnx.Dict({"count": make()})
    with pytest.raises(lm.StateDictError, match="count"):
        lm.load_state_dict(model, {"count": np.array([2**40, 1])})
    lm.load_state_dict(model, {"count": np.array([2**31 - 1, -(2**31)])})
    assert_same_bits(model["count"][...], jnp.array([2**31 - 1, -(2**31)], jnp.int32))
