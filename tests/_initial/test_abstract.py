"""An abstract run finds the shapes that ``jax.eval_shape`` finds, through every transform of JAX."""

import operator as operators
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from lazymods import _compat

X = jax.ShapeDtypeStruct((4, 3), jnp.float32)


@jax.custom_jvp
def with_jvp(x: Any) -> Any:
    return jnp.sin(x)


with_jvp.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), tangents[0]))


@jax.custom_vjp
def with_vjp(x: Any) -> Any:
    return jnp.cos(x)


with_vjp.defvjp(lambda x: (jnp.cos(x), None), lambda _, g: (g,))


def sharded(x: Any) -> Any:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    return jax.shard_map(lambda v: v * 2, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)


def with_ref(x: Any) -> Any:
    ref = jax.new_ref(x)
    ref[...] = ref[...] + 1
    return ref[...]


def printing(x: Any) -> Any:
    jax.debug.print("{}", x)
    return x


def called_back(x: Any) -> Any:
    return jax.pure_callback(lambda v: np.asarray(v), X, x)


PROGRAMS = {
    "jnp": lambda x: jnp.linalg.norm(x, axis=0) @ x.T,
    "jit": lambda x: jax.jit(lambda v: {"a": v, "b": v.astype(jnp.int8)})(x),
    "grad": lambda x: jax.grad(lambda v: with_jvp(v).sum() + with_vjp(v).sum())(x),
    "hessian": lambda x: jax.hessian(lambda v: (v**3).sum())(x),
    "jvp": lambda x: jax.jvp(with_jvp, (x,), (x,)),
    "vjp": lambda x: jax.vjp(with_vjp, x)[1](x),
    "linearize": lambda x: jax.linearize(jnp.tanh, x)[0],
    "vmap": lambda x: jax.vmap(lambda row: jnp.outer(row, with_vjp(row)))(x),
    "remat": lambda x: jax.grad(jax.checkpoint(lambda v: jnp.sin(v).sum()))(x),
    "scan": lambda x: lax.scan(lambda c, row: (c + row, c.sum()), x[0], x),
    "while": lambda x: lax.while_loop(lambda v: v.sum() < 3, lambda v: v + 1, x),
    "cond": lambda x: lax.cond(x.sum() > 0, lambda: x, lambda: -x),
    "switch": lambda x: lax.switch(x.shape[0] % 2, [lambda: x, lambda: -x]),
    "random": lambda x: jax.random.normal(jax.random.split(jax.random.key(0))[0], x.shape, jnp.bfloat16) + 0,
    "weak": lambda x: (1.0, jnp.asarray(2), x.sum() * 2, 3),
    "numpy": lambda x: np.zeros((2, 2), np.float32),
    "callback": called_back,
    "print": printing,
    "ref": with_ref,
    "shard_map": sharded,
    "associative": lambda x: lax.associative_scan(jnp.add, x),
    "indexing": lambda x: x.at[0, jnp.array([0, 1])].add(1.0),
    "axis": partial(jax.vmap(lambda v: lax.psum(v, "i"), axis_name="i")),
    "closure": lambda x: jax.vmap(lambda i: x[i])(jnp.arange(3)),
}


def kinds(tree: Any) -> Any:
    return jax.tree.map(lambda s: (s.shape, s.dtype, s.weak_type), tree)


@pytest.mark.parametrize("name", PROGRAMS)
def test_shapes_are_those_of_eval_shape(name: str) -> None:
    program = PROGRAMS[name]
    assert kinds(_compat.abstract.call_abstractly(program, X)) == kinds(jax.eval_shape(program, X))


@pytest.mark.parametrize("name", PROGRAMS)
def test_shapes_are_found_inside_other_traces(name: str) -> None:
    program, seen = PROGRAMS[name], []

    def outer(y: Any) -> Any:
        seen.append(kinds(_compat.abstract.call_abstractly(lambda x: (program(x), y), X)))
        return y

    jax.jit(outer)(jnp.float32(1))
    jax.vmap(outer)(jnp.zeros(2))
    assert seen == 2 * [(kinds(jax.eval_shape(program, X)), ((), jnp.dtype("float32"), False))]


@pytest.mark.slow
@given(st.data())
@settings(max_examples=300, deadline=None)
def test_arithmetic_gives_the_shapes_and_dtypes_of_eval_shape(data: st.DataObject) -> None:
    operator = data.draw(st.sampled_from(["add", "sub", "mul", "truediv"]))
    sides = st.lists(st.sampled_from([0, 1, 1, 2, 3]), max_size=3)
    dtypes = st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64, jnp.int32, jnp.bool_])
    one, other = (jax.ShapeDtypeStruct(tuple(data.draw(sides)), data.draw(dtypes)) for _ in range(2))

    def outcome(run: Any) -> Any:
        try:
            return kinds(run(lambda pair: getattr(operators, operator)(*pair), (one, other)))
        except (TypeError, ValueError) as error:
            return type(error), str(error)

    assert outcome(_compat.abstract.call_abstractly) == outcome(jax.eval_shape)


def test_arithmetic_asks_jax_where_that_may_refuse() -> None:
    row = jax.ShapeDtypeStruct((3,), jnp.float32)
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="rank"):
        _compat.abstract.call_abstractly(lambda pair: pair[0] + pair[1], (X, row))
    weak = jax.ShapeDtypeStruct((4, 3), jnp.float32, weak_type=True)
    assert _compat.abstract.call_abstractly(lambda pair: pair[0] * pair[1], (weak, weak)).weak_type
    with jax.disable_jit():
        assert kinds(_compat.abstract.call_abstractly(lambda x: x + x, X)) == ((4, 3), jnp.float32, False)


def test_a_decision_on_a_value_is_refused_as_under_jit() -> None:
    def decide(x: Any) -> Any:
        return x if x.sum() > 0 else -x

    with pytest.raises(jax.errors.TracerBoolConversionError):
        _compat.abstract.call_abstractly(decide, X)
    with pytest.raises(jax.errors.TracerArrayConversionError):
        _compat.abstract.call_abstractly(np.asarray, X)


def test_an_error_of_shapes_is_that_of_jax() -> None:
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions to have the same shape"):
        _compat.abstract.call_abstractly(lambda x: x @ x, X)
