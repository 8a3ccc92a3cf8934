"""What a placeholder holds in place of an array: equality, hashes, copies and leaves."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import pytest
from flax import nnx
from helpers import array, assert_same_bits

import lazymods as lm


def recipe(seed: int = 0, out: int = 4, dtype: Any = "float32", impl: str | None = None) -> Any:
    rngs = nnx.Rngs(jax.random.key(seed, impl=impl))
    return lm.LazyLinear(out, param_dtype=dtype, rngs=rngs).kernel.pending


OTHERS: dict[str, Callable[[], Any]] = {
    "key": lambda: recipe(seed=1),
    "shape": lambda: recipe(out=5),
    "dtype": lambda: recipe(dtype="bfloat16"),
    "implementation": lambda: recipe(impl="rbg"),
    "slot": lambda: lm.LazyLinear(4, rngs=nnx.Rngs(0)).bias.pending,  # pyright: ignore[reportOptionalMemberAccess]
    "something-else": lambda: 3,
}


WHERE: dict[str, Callable[[Callable[[], None]], Any]] = {
    "python": lambda f: f(),
    "jax.jit": lambda f: jax.jit(lambda: f() or 0)(),
    "nnx.jit": lambda f: nnx.jit(lambda: f() or 0)(),
    "eval_shape": lambda f: jax.eval_shape(lambda: f() or 0),
    "vmap": lambda f: jax.vmap(lambda x: f() or x)(array(2)),
}


@pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
def test_equality_and_hash_are_the_same_inside_a_trace(where: Callable[[Callable[[], None]], Any]) -> None:
    one, twin, others = recipe(), recipe(), [make() for make in OTHERS.values()]

    def compare() -> None:
        assert one == twin and hash(one) == hash(twin)
        for other in others:
            assert one != other

    where(compare)


def test_two_models_built_alike_have_one_graphdef_and_one_cache_entry() -> None:
    traces = []
    step = nnx.jit(lambda m: traces.append(1))
    for _ in range(2):
        step(lm.LazyLinear(4, rngs=nnx.Rngs(0)))
    assert len(traces) == 1
    step(lm.LazyLinear(4, rngs=nnx.Rngs(1)))
    assert len(traces) == 2


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r)),
                                    lambda r: jax.tree.map(lambda a: a, r)],
                         ids=["copy", "deepcopy", "pickle", "tree-map"])
def test_copies_are_equal(copier: Callable[[Any], Any], impl: str) -> None:
    one = recipe(impl=impl)
    twin = copier(one)
    assert twin == one and hash(twin) == hash(one)
    assert_same_bits(twin.make((3, 4)), one.make((3, 4)))


def test_leaves_are_the_keys_only_while_they_are_traced() -> None:
    assert jax.tree.leaves(recipe()) == [] and recipe().is_static

    def build(key: jax.Array) -> int:
        made = lm.LazyLinear(4, rngs=nnx.Rngs(key)).kernel.pending
        assert len(jax.tree.leaves(made)) == 3 and not made.is_static  # key, counter and the marker
        assert jax.tree.unflatten(*reversed(jax.tree.flatten(made))) == made
        return 0

    jax.jit(build)(jax.random.key(0))
