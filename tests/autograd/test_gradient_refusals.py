"""What lm.autograd.grad can't differentiate is said in four parts, and nothing has changed by then."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

X = jnp.array([1.0, 2.0, 3.0])
SCALAR = "one real number: its gradient is what is asked for"
PAIR = "a pair, since has_aux=True: the scalar, and what else there is"
NUMBERS = "real or complex numbers: nothing else has a derivative"
CAST = "x.astype(jnp.float32)  # where it is made; or another argnums"
TRAINED = "a parameter that is trained: those that are frozen have no gradient"
THAW = "lm.autograd.requires_grad_(model)  # before; or argnums=nnx.DiffState(0, nnx.Param) for all the same"
PLACES = "the number of an argument, from 0, an nnx.DiffState, or a tuple of these"
EXAMPLES = "argnums=0  # or argnums=(0, 1), or argnums=nnx.DiffState(0, nnx.Param)"


def frozen() -> nnx.Linear:
    return lm.autograd.requires_grad_(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), False)


class Counting(nnx.Module):
    """A module one of whose parameters is an integer."""

    def __init__(self) -> None:
        self.steps = nnx.Param(jnp.arange(3))
        self.weight = nnx.Param(X)


def total(*args: Any) -> Any:
    return sum(x.sum() for x in jax.tree.leaves(args))


# what fn is, the options, the arguments; then place, got, needed and the line to write
CASES: dict[str, tuple[Any, dict[str, Any], tuple[Any, ...], tuple[str, str, str, str]]] = {
    "vector": (jnp.sin, {}, (X,), ("what fn returned", "f32[3]", SCALAR, "loss.mean()  # or loss.sum()")),
    "size 1": (jnp.sin, {}, (X[:1],), ("what fn returned", "f32[1]", SCALAR, "loss.mean()  # or loss.sum()")),
    "nothing": (lambda x: None, {}, (X,), ("what fn returned", "None", SCALAR, "return loss")),
    "an integer value": (
        lambda x: x.sum().astype(int),
        {},
        (X,),
        ("what fn returned", "i32[]", SCALAR, "loss.astype(jnp.float32)"),
    ),
    "a complex value": (
        lambda x: jax.lax.complex(x, x).sum(),
        {},
        (X,),
        ("what fn returned", "c64[]", SCALAR, "loss.real  # or jnp.abs(loss)"),
    ),
    "no pair": (
        total,
        {"has_aux": True},
        (X,),
        ("what fn returned", "f32[]", PAIR, "return loss, aux"),
    ),
    "a vector and aux": (
        lambda x: (x, 1),
        {"has_aux": True},
        (X,),
        ("what fn returned", "f32[3]", SCALAR, "loss.mean()  # or loss.sum()"),
    ),
    "by an integer": (total, {}, (jnp.arange(3),), ("argument 0", "i32[3]", NUMBERS, CAST)),
    "by a number": (total, {"argnums": 1}, (X, 2), ("argument 1", "2", NUMBERS, CAST)),
    "by a part": (total, {}, ({"a": X, "b": [jnp.arange(3)]},), ("argument 0['b'][0]", "i32[3]", NUMBERS, CAST)),
    "by a key": (total, {}, (jax.random.key(0),), ("argument 0", "key<fry>[]", NUMBERS, CAST)),
    "by a text": (total, {}, ("text",), ("argument 0", "'text'", NUMBERS, CAST)),
    "by a parameter": (total, {}, (Counting(),), ("argument 0: steps", "i32[3]", NUMBERS, CAST)),
    "by what is frozen": (total, {}, (frozen(),), ("argument 0", "frozen parameters and no others", TRAINED, THAW)),
    "by one that is frozen": (total, {}, (frozen().bias,), ("argument 0", "f32[1], which is frozen", TRAINED, THAW)),
    "by one of two": (
        total,
        {"argnums": (0, 1)},
        (X, frozen()),
        ("argument 1", "frozen parameters and no others", TRAINED, THAW),
    ),
    "by a filter": (
        total,
        {"argnums": nnx.DiffState(0, lm.trainable)},
        (frozen(),),
        ("argument 0", "frozen parameters and no others", TRAINED, THAW),
    ),
    "by none": (
        total,
        {"argnums": 3},
        (X,),
        ("argnums", "3", "a number below 1, the number of arguments", "argnums=0  # for the first one"),
    ),
}


@pytest.mark.parametrize("name", ["grad", "value_and_grad"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_refused(case: str, name: str) -> None:
    fn, options, args, (place, got, needed, write) = CASES[case]
    with pytest.raises(lm.ArgumentError) as error:
        getattr(lm.autograd, name)(fn, **options)(*args)
    (problem,) = error.value.problems
    assert problem.where == f"lm.autograd.{name}: {place}"
    assert (problem.got, problem.needed) == (got, needed)
    assert problem.write.startswith(write)
    assert isinstance(error.value, TypeError)  # as JAX raises


@pytest.mark.parametrize("argnums", ["x", 1.0, None, (0, "x"), ()])
def test_a_place_that_is_none_is_refused_when_it_is_given(argnums: Any) -> None:
    with pytest.raises(lm.ArgumentError) as error:
        lm.autograd.grad(total, argnums=argnums)
    (problem,) = error.value.problems
    assert (problem.where, problem.needed, problem.write) == ("lm.autograd.grad: argnums", PLACES, EXAMPLES)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(lm.ArgumentError) as error:
        lm.autograd.grad(total, argnums=(0, 1, 2))(jnp.arange(3), X, frozen())
    assert str(error.value) == (
        f"lm.autograd.grad: argument 0\n  got:    i32[3]\n  needed: {NUMBERS}\n  write:  {CAST}\n"
        "lm.autograd.grad: argument 2\n  got:    frozen parameters and no others\n"
        f"  needed: {TRAINED}\n  write:  {THAW}"
    )


def test_nothing_has_changed() -> None:
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    lm.autograd.requires_grad_(model, False)
    calls = []

    def f(model: nnx.BatchNorm, x: jax.Array) -> jax.Array:
        calls.append(1)
        return model(x)

    with pytest.raises(lm.ArgumentError, match="frozen"):
        lm.autograd.grad(f)(model, X[None])
    assert calls == []
    lm.autograd.requires_grad_(model)
    with pytest.raises(lm.ArgumentError, match="what fn returned"):
        lm.autograd.grad(f)(model, X[None])
    np.testing.assert_array_equal(model.mean[...], jnp.zeros(3))


def test_what_is_said_by_a_filter_is_done() -> None:
    layer = frozen()
    grads = lm.autograd.grad(lambda layer: layer(X[None]).sum(), argnums=nnx.DiffState(0, nnx.Param))(layer)
    np.testing.assert_array_equal(grads["kernel"][...], X[:, None])


ALLOWED: dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[Any, ...], Any]] = {
    "a Python number": (lambda x: x**2, {}, (3.0,), 6.0),
    "the last argument": (lambda a, b: (a * b).sum(), {"argnums": -1}, (X, 2 * X), X),
    "a list of places": (lambda a, b: (a * b).sum(), {"argnums": [0, 1]}, (X, 2 * X), (2 * X, X)),
    "an array of numpy": (lambda x: (x * x).sum(), {}, (np.array([1, 2, 3], np.float32),), 2 * X),
    "a shorter float": (lambda x: (x * x).sum(), {}, (X.astype(jnp.bfloat16),), (2 * X).astype(jnp.bfloat16)),
    "a module without parameters": (lambda m, x: x.sum(), {}, (nnx.Dropout(0.5), X), nnx.State({})),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_it_is_taken(case: str) -> None:
    fn, options, args, want = ALLOWED[case]
    got = lm.autograd.grad(fn, **options)(*args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_arguments_by_keyword() -> None:
    got = lm.autograd.grad(lambda a, b: (a * b).sum(), argnums=1)(a=X, b=2 * X)
    np.testing.assert_array_equal(got, X)


@pytest.mark.parametrize("jit", [jax.jit, nnx.jit, lm.jit])
def test_it_is_refused_in_a_compiled_function(jit: Any) -> None:
    with pytest.raises(lm.ArgumentError, match="what fn returned"):
        jit(lm.autograd.grad(jnp.sin))(X)


@pytest.mark.parametrize("flag", [0, None, "no"])
def test_a_flag_that_is_none_is_refused(flag: Any) -> None:
    with pytest.raises(lm.ArgumentError) as error:
        lm.autograd.requires_grad_(frozen(), flag)
    assert str(error.value) == (
        f"lm.autograd.requires_grad_: flag\n  got:    {flag!r}\n"
        "  needed: True, to train the parameters, or False\n  write:  lm.autograd.requires_grad_(model, False)"
    )


@pytest.mark.parametrize(
    "fn, argnums, got",
    [
        (lambda x: (x.sum(), 1), 0, "tuple"),
        (lambda x: [x.sum()], 0, "list"),
        (lambda x: {"loss": x.sum()}, 0, "dict"),
        (lambda x: x.sum(), (0, 0), "(0, 0), with 0 twice"),
        (lambda x: x.sum(), (0, nnx.DiffState(0, nnx.Param)), "with 0 twice"),
    ],
)
@pytest.mark.parametrize("ask", [lm.autograd.grad, lm.autograd.value_and_grad])
def test_what_is_no_number_and_what_is_asked_for_twice(ask: Any, fn: Any, argnums: Any, got: str) -> None:
    with pytest.raises(lm.ArgumentError) as caught:
        ask(fn, argnums=argnums)(jnp.ones(3))
    (problem,) = caught.value.problems
    assert got in problem.got
