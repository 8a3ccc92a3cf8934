"""safe_where: value and gradients of the elements that count, by fn at those alone, and zero elsewhere."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

safe_where = lm.autograd.safe_where

UNSAFE: dict[str, tuple[Callable[[Any], Any], list[float]]] = {
    "log": (jnp.log, [-1.0, 0.0, 2.0]),
    "sqrt": (jnp.sqrt, [-4.0, 0.0, 9.0]),
    "reciprocal": (lambda x: 1 / x, [0.0, -0.0, 4.0]),
    "arcsin": (jnp.arcsin, [1.0, 7.0, 0.5]),
    "exp": (jnp.exp, [1e4, 1e8, 1.0]),
    "power": (lambda x: x**0.5, [-1.0, 0.0, 4.0]),
    "nan": (lambda x: x * x, [np.nan, np.inf, 3.0]),
    "norm": (lambda x: jnp.sqrt(x * x), [0.0, 0.0, -3.0]),
}
JITS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "checkpoint": jax.checkpoint,
    "lm.jit": lm.jit,
    "lazy": lambda f: lm.lazytensor.lazy()(f),
}
COUNTS = np.array([False, False, True])


def derivative(fn: Any, order: int, x: float) -> Any:
    for _ in range(order):
        fn = jax.grad(fn)
    return fn(jnp.float32(x))


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize("name", UNSAFE)
def test_what_is_masked_has_the_fill_and_no_derivative(name: str, jit: str) -> None:
    fn, values = UNSAFE[name]
    x, mask = jnp.array(values), jnp.array(COUNTS)
    f = JITS[jit](lambda mask, x: safe_where(mask, fn, x, fill=-7.0))
    np.testing.assert_array_equal(f(mask, x), jnp.array([-7.0, -7.0, derivative(fn, 0, values[2])]))
    found = f
    for order in (1, 2):
        found = jax.grad(lambda mask, x, f=found: f(mask, x).sum(), argnums=1)
        want = jnp.array([0.0, 0.0, derivative(fn, order, values[2])])
        np.testing.assert_allclose(found(mask, x), want, rtol=1e-5, atol=1e-6, err_msg=f"order {order}")
    forward = jax.jvp(lambda x: f(mask, x), (x,), (jnp.ones(3),))[1]
    np.testing.assert_allclose(forward, [0.0, 0.0, derivative(fn, 1, values[2])], rtol=1e-6)


def test_nan_is_not_computed_at_all() -> None:
    x = jnp.array([0.0, -1.0, 4.0])
    with jax.debug_nans(True):
        f = jax.value_and_grad(lambda x: safe_where(x > 0, jnp.log, x).sum())
        value, gradient = f(x)
        jitted = jax.jit(f)(x)
    np.testing.assert_allclose(value, np.log(4.0), rtol=1e-6)
    np.testing.assert_array_equal(gradient, [0.0, 0.0, 0.25])
    np.testing.assert_array_equal(jitted[1], gradient)


def test_what_the_function_closes_over_has_a_gradient_through_the_elements_that_count() -> None:
    x = jnp.array([0.0, 2.0, 3.0])
    gradient = jax.grad(lambda scale: safe_where(x > 0, lambda x: scale * jnp.log(x), x).sum())(5.0)
    np.testing.assert_allclose(gradient, np.log(6.0), rtol=1e-6)


@pytest.mark.slow
def test_the_hessian_and_what_follows_it() -> None:
    x = jnp.array([0.0, 2.0])
    hessian = jax.hessian(lambda x: safe_where(x > 0, jnp.log, x).sum())
    np.testing.assert_allclose(hessian(x), [[0.0, 0.0], [0.0, -0.25]])
    np.testing.assert_allclose(jax.jacfwd(hessian)(x)[1, 1], [0.0, 0.25], rtol=1e-6)


@pytest.mark.parametrize("mask", [[False, False], [True, True]])
def test_all_or_nothing_counts(mask: list[bool]) -> None:
    x = jnp.array([0.0, 0.0]) if not mask[0] else jnp.array([1.0, 2.0])
    value, gradient = jax.value_and_grad(lambda x: safe_where(jnp.array(mask), jnp.log, x).sum())(x)
    want = np.log(2.0) if mask[0] else 0.0
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(gradient, [1.0, 0.5] if mask[0] else [0.0, 0.0])


@pytest.mark.slow
def test_arguments_and_mask_are_broadcast() -> None:
    a, b = jnp.arange(1.0, 4.0)[:, None], jnp.array([[0.0, 2.0, 0.0, 4.0]])
    mask = b != 0

    def f(a: jax.Array, b: jax.Array) -> jax.Array:
        return safe_where(mask, jnp.divide, a, b)

    want = np.where(mask, np.asarray(a) / np.where(mask, b, 1), 0)
    np.testing.assert_allclose(f(a, b), want, rtol=1e-6)
    got = jax.grad(lambda a, b: f(a, b).sum(), (0, 1))(a, b)
    np.testing.assert_allclose(got[0], np.full((3, 1), 0.75), rtol=1e-6)
    np.testing.assert_allclose(got[1], [[0.0, -6 / 4, 0.0, -6 / 16]], rtol=1e-6)
    scalar = safe_where(True, jnp.multiply, a, 2.0)
    np.testing.assert_array_equal(scalar, 2 * a)
    assert safe_where(jnp.ones((2, 3), bool), jnp.log, jnp.float32(2)).shape == (2, 3)
    assert safe_where(jnp.zeros((0, 3), bool), jnp.log, jnp.zeros((0, 3))).shape == (0, 3)


def test_a_pair_that_counts_is_never_torn() -> None:
    """The arguments that stand in for others are those of one element: no mixture of two is finite here."""
    a, b = jnp.array([5.0, 1.0, 9.0, 0.0]), jnp.array([4.0, 2.0, 8.0, 3.0])
    mask = a >= b

    def f(a: jax.Array, b: jax.Array) -> jax.Array:
        return safe_where(mask, lambda a, b: jnp.log(a - b + 0.5), a, b).sum()

    with jax.debug_nans(True):
        value, gradient = jax.value_and_grad(f, (0, 1))(a, b)
    np.testing.assert_allclose(value, 2 * np.log(1.5), rtol=1e-6)
    np.testing.assert_allclose(gradient[0], [1 / 1.5, 0, 1 / 1.5, 0], rtol=1e-6)
    np.testing.assert_allclose(gradient[1], [-1 / 1.5, 0, -1 / 1.5, 0], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.complex64])
@pytest.mark.parametrize("fill", [0.0, 1, -2.5])
def test_the_dtype_is_that_of_where(dtype: Any, fill: Any) -> None:
    x, mask = jnp.array([0, 2], dtype), jnp.array([False, True])
    got = safe_where(mask, jnp.log, x, fill=fill)
    want = jnp.where(mask, jnp.log(jnp.array([1, 2], dtype)), fill)
    assert got.dtype == want.dtype == dtype
    assert got[0] == want[0]
    gradient = jax.grad(lambda x: jnp.abs(safe_where(mask, jnp.log, x, fill=fill)).sum())(x)
    assert gradient.dtype == dtype
    assert gradient[0] == 0 and jnp.isfinite(gradient[1])


def test_integers_bools_and_python_numbers_are_handed_on() -> None:
    n, even, x = jnp.array([0, 2, 0]), jnp.array([True, False, True]), jnp.array([1.0, 2.0, 3.0])
    got = safe_where(n != 0, lambda n, even, x, k: jnp.where(even, k, k * x / n.astype(x.dtype)), n, even, x, 3.0)
    np.testing.assert_array_equal(got, [0.0, 3.0, 0.0])
    got = safe_where(n != 0, lambda n: 12 // n, n, fill=-1)
    np.testing.assert_array_equal(got, [-1, 6, -1])
    assert got.dtype == n.dtype
    got = safe_where(n, lambda x: x * x, x)  # a mask of numbers, as jnp.where takes them
    np.testing.assert_array_equal(got, [0.0, 4.0, 0.0])
    got = safe_where(np.array([False, True]), np.log, np.array([0.0, 1.0], np.float32))
    np.testing.assert_array_equal(got, [0.0, 0.0])


def test_arguments_and_results_may_be_pytrees() -> None:
    tree = {"a": jnp.array([0.0, 2.0]), "b": (jnp.array([3.0, 4.0]),)}

    def both(tree: Any) -> Any:
        return [jnp.log(tree["a"]), tree["b"][0] / tree["a"]]

    def f(tree: Any) -> Any:
        return safe_where(tree["a"] > 0, both, tree, fill=1.0)

    got = f(tree)
    np.testing.assert_allclose(got[0], [1.0, np.log(2)], rtol=1e-6)
    np.testing.assert_allclose(got[1], [1.0, 2.0], rtol=1e-6)
    gradient = jax.grad(lambda tree: sum(x.sum() for x in f(tree)))(tree)
    np.testing.assert_allclose(gradient["a"], [0.0, 0.5 - 1.0], rtol=1e-6)
    np.testing.assert_allclose(gradient["b"][0], [0.0, 0.5], rtol=1e-6)


def test_the_fill_may_be_an_array_with_a_gradient() -> None:
    x, mask = jnp.array([0.0, 2.0]), jnp.array([False, True])
    gradient = jax.grad(lambda fill: safe_where(mask, jnp.log, x, fill=fill).sum())(jnp.array([5.0, 6.0]))
    np.testing.assert_array_equal(gradient, [1.0, 0.0])


def test_a_mask_for_each_element_of_a_map() -> None:
    x = jnp.array([[0.0, 2.0], [4.0, 0.0], [0.0, 0.0]])
    got = jax.vmap(jax.grad(lambda x: safe_where(x > 0, jnp.log, x).sum()))(x)
    np.testing.assert_array_equal(got, [[0.0, 0.5], [0.25, 0.0], [0.0, 0.0]])


# what is not finite at 0, and is at 2; its derivative by what it is multiplied with, at 2
CLOSED_OVER: dict[str, tuple[Callable[[Any], Any], float]] = {
    "log": (jnp.log, np.log(2.0)),
    "reciprocal": (lambda a: 1 / a, 0.5),
    "both": (lambda a: jnp.log(a) / a, np.log(2.0) / 2),
}
MAPS: dict[str, Callable[[Any], Any]] = {
    "vmap": jax.vmap,
    "jitted": lambda f: jax.vmap(jax.jit(f)),
    "nested": lambda f: lambda x: jax.vmap(jax.vmap(f))(x[:, None])[:, 0],
    "last axis": lambda f: lambda x: jax.vmap(jax.vmap(f, in_axes=-1, out_axes=-1))(x[:, None])[:, 0],
    "checkpoint": lambda f: jax.vmap(jax.checkpoint(f)),
}


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit, lm.jit], ids=["plain", "jit", "lm.jit"])
@pytest.mark.parametrize("how", MAPS)
@pytest.mark.parametrize("name", CLOSED_OVER)
def test_a_scalar_mask_for_each_example_of_a_map(name: str, how: str, outer: Any) -> None:
    fn, want = CLOSED_OVER[name]
    x = jnp.array([0.0, 2.0, 0.0, 2.0])

    def loss(w: Any, x: Any) -> Any:
        return MAPS[how](lambda x: safe_where(x > 0, lambda a: w * fn(a), x))(x).sum()

    gradient = outer(jax.grad(loss, (0, 1)))(3.0, x)
    np.testing.assert_allclose(gradient[0], 2 * want, rtol=1e-6)
    slope = jax.grad(lambda a: 3.0 * fn(a))(2.0)
    np.testing.assert_allclose(gradient[1], [0.0, slope, 0.0, slope], rtol=1e-6)
    assert outer(jax.jacfwd(loss))(3.0, x) == gradient[0]
    assert outer(jax.hessian(loss))(3.0, x) == 0
    with jax.debug_nans(True):
        outer(jax.value_and_grad(loss))(3.0, x)


def test_a_map_over_an_argument_and_one_over_the_mask() -> None:
    x, mask = jnp.array([0.0, 2.0]), jnp.array([False, True])

    def f(w: Any, mask: Any, x: Any) -> Any:
        return safe_where(mask, lambda a: w * jnp.log(a), x)

    by_mask = jax.vmap(f, (None, 0, None))(1.0, mask[None], x)
    by_value = jax.vmap(f, (None, None, 0))(1.0, mask, x[None])
    np.testing.assert_allclose(by_mask, [[0.0, np.log(2.0)]], rtol=1e-6)
    np.testing.assert_array_equal(by_mask, by_value)
    scalar = jax.grad(lambda w: jax.vmap(f, (None, 0, None))(w, mask, jnp.float32(2)).sum())(1.0)
    np.testing.assert_allclose(scalar, np.log(2.0), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.complex64])
@pytest.mark.parametrize("fn", [jnp.log, jnp.sqrt, lambda x: 1 / x, jnp.arctanh], ids=["log", "sqrt", "1/x", "arctanh"])
def test_where_nothing_counts_what_is_closed_over_has_no_gradient(fn: Any, dtype: Any) -> None:
    x = jnp.zeros(2, dtype)
    one = jnp.ones((), dtype)
    with jax.debug_nans(True):
        gradient = jax.grad(lambda w: jnp.abs(safe_where(x != 0, lambda a: w * fn(a), x, fill=one)).sum())(one)
    assert gradient.dtype == dtype and gradient == 0


def test_where_no_integer_counts() -> None:
    n = jnp.zeros(2, jnp.int32)
    assert jax.grad(lambda w: safe_where(n != 0, lambda n: w / n.astype(w.dtype), n).sum())(1.0) == 0


@pytest.mark.slow
def test_a_module_may_change_in_the_function() -> None:
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    twin = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    x, mask = jnp.ones(8), jnp.arange(8) < 6

    def loss(dropout: Any, x: Any) -> Any:
        return safe_where(mask, dropout, x).sum()

    for transform in (lambda f: f, nnx.jit, lm.jit):
        got = transform(nnx.value_and_grad(loss, argnums=1))(dropout, x)
        kept = twin(jnp.ones(8))
        np.testing.assert_array_equal(got[1], jnp.where(mask, kept, 0))
        assert got[0] == jnp.where(mask, kept, 0).sum()


def four(where: str, got: str, write: str, needed: str = "an array or a number, as jnp.where takes them") -> str:
    return f"lm.autograd.safe_where{where}\n  got:    {got}\n  needed: {needed}\n  write:  {write}"


OPTION = "lambda x: fn(x, option)  # for what is an option of fn and no array"
BROADCAST = "shapes that broadcast with each other: one element of each for one of the result"
ROWS = "mask[:, None]  # for a mask of rows; arrays of another shape in a closure: lambda x: x @ w"
KEY = jax.random.key(0)
REFUSED: dict[str, tuple[Any, tuple[Any, ...], Any, str]] = {
    "mask": ("x > 0", (1.0,), 0.0, four(": mask", "'x > 0'", "safe_where(x > 0, jnp.log, x)")),
    "no mask": (None, (1.0,), 0.0, four(": mask", "None", "safe_where(x > 0, jnp.log, x)")),
    "a key": (KEY, (1.0,), 0.0, four(": mask", "key<fry>[]", "safe_where(x > 0, jnp.log, x)")),
    "argument": (True, (1.0, {"a": "text"}), 0.0, four(": argument [1]['a']", "'text'", OPTION)),
    "an object": (True, (object(),), 0.0, four(": argument [0]", "object", OPTION)),
    "fill": (True, (1.0,), None, four(": fill", "None", "fill=0.0")),
    "a text": (True, (1.0,), "0", four(": fill", "'0'", "fill=0.0")),
    "shapes": (
        np.ones((3,), bool),
        (np.ones((2, 4), np.float32), 1.0),
        0.0,
        four("", "a mask bool[3], arguments f32[2,4], and fill f32[]", ROWS, BROADCAST),
    ),
    "a wide fill": (
        np.ones((3,), bool),
        (1.0,),
        np.ones(2, np.float32),
        four("", "a mask bool[3], arguments without arrays, and fill f32[2]", ROWS, BROADCAST),
    ),
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.grad], ids=["plain", "jit", "grad"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_jnp_where_does_not_take(name: str, wrap: Any) -> None:
    mask, args, fill, text = REFUSED[name]
    with pytest.raises(lm.ArgumentError) as error:
        wrap(lambda w: safe_where(mask, lambda *args: w, *args, fill=fill))(1.0)
    assert str(error.value) == text


def test_keys_go_with_keys() -> None:
    keys, mask = jax.random.split(KEY, 3), jnp.array([True, False, True])
    got = safe_where(mask, lambda keys: keys, keys, fill=KEY)
    want = jnp.where(mask, keys, KEY)
    np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(want))
    for fn, fill, name in ((lambda keys: keys, 0.0, "0.0"), (lambda keys: jnp.ones(3), KEY, "key<fry>[]")):
        with pytest.raises(lm.ArgumentError, match="fill\n  got:    " + re.escape(name)):
            safe_where(mask, fn, keys, fill=fill)


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(lm.ArgumentError) as error:
        safe_where("m", jnp.log, "x", fill="f")
    assert str(error.value).count("got:") == 3


def test_what_does_not_work_element_by_element_is_refused() -> None:
    with pytest.raises(lm.ArgumentError) as error:
        safe_where(jnp.array([True, False]), jnp.sum, jnp.ones(2))
    assert str(error.value) == (
        "lm.autograd.safe_where: what fn returned\n  got:    f32[]\n"
        "  needed: an array of the shape (2,), to which the mask and the arguments broadcast: one element for each\n"
        "  write:  lm.autograd.safe_where(mask, jnp.log, x).sum()  # fn element by element; its result is reduced"
    )
    with pytest.raises(lm.ArgumentError, match="what can be called"):
        safe_where(jnp.array([True]), jnp.ones(1), jnp.ones(1))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
