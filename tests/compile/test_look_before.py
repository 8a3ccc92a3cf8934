"""``trace``, ``lower``, ``compile`` and ``eval_shape`` of a function of ``lm.jit``, as ``nnx.jit`` has them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lazymods as lm
from tests.helpers import array, spec

X, Y = array(4, 3, seed=1), array(4, 2, seed=2)


SGD = optax.sgd(0.1, momentum=0.9)


def training() -> tuple[nnx.Linear, nnx.Optimizer[Any]]:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, SGD, wrt=nnx.Param)


def step(model: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def values(*things: Any) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves([nnx.state(thing) for thing in things])]


def assert_same_values(a: Any, b: Any) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("donate_state", [False, True])
def test_what_is_compiled_trains_as_flax_does(donate_state: bool) -> None:
    ours, theirs = training(), training()
    lowered = lm.jit(step, donate_state=donate_state).lower(*ours, X, Y)
    assert_same_values(values(*ours), values(*theirs))  # nothing has run
    compiled, plain = lowered.compile(), nnx.jit(step).lower(*theirs, X, Y).compile()
    for _ in range(3):
        np.testing.assert_allclose(compiled(*ours, X, Y), plain(*theirs, X, Y), rtol=1e-6)
    assert_same_values(values(*ours), values(*theirs))
    other = training()
    compiled(*other, X, Y)  # of equal structure
    once = training()
    step(*once, X, Y)
    assert_same_values(values(*other), values(*once))


def test_what_is_compiled_is_called_as_the_function_is() -> None:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    @lm.jit(static_argnames="times")
    def call(m: Any, x: jax.Array, times: int, *, shift: Any) -> Any:
        return m(x) * times + shift, m

    compiled = call.lower(model, spec(4, 3), 2, shift=1.0).compile()
    got, same = compiled(model, X, 2, shift=3.0)
    assert same is model
    np.testing.assert_allclose(got, model(X) * 2 + 3.0, rtol=1e-6)
    with pytest.raises(lm.ArgumentError, match="of another structure"):
        compiled(model, X, 3, shift=3.0)
    with pytest.raises(TypeError, match="float32"):
        compiled(model, X[:2], 2, shift=3.0)


def test_another_structure_is_refused_and_nothing_changes() -> None:
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    compiled = lm.jit(lambda m, x: m(x)).lower(model, X).compile()
    model.eval()
    before = values(model)
    with pytest.raises(lm.ArgumentError) as caught:
        compiled(model, X)
    assert str(caught.value) == (
        "test_another_structure_is_refused_and_nothing_changes.<locals>.<lambda>\n"
        "  got:    arguments, or models that it reaches, of another structure than those that it was lowered for\n"
        "  needed: the same: classes, attributes, static values and sharing, as they are when this call begins\n"
        "  write:  lm.lower(f, model, x).compile()  # with these; or call the function itself, "
        "which does so when it has to"
    )
    assert_same_values(values(model), before)
    model.train()
    twin = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(compiled(model, X), twin(X), rtol=2e-6, atol=1e-6)
    assert_same_values(values(model), values(twin))


def test_a_lazy_model_stays_lazy_until_what_is_compiled_is_called() -> None:
    model, twin = lm.LazyLinear(2, rngs=nnx.Rngs(0)), nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    lowered = lm.jit(lambda m, x: m(x)).lower(model, X)
    assert lm.is_lazy(model) and lowered.compile().out_tree == jax.tree.structure(0)
    assert lm.is_lazy(model)
    np.testing.assert_allclose(lowered.compile()(model, X), twin(X), rtol=1e-6)
    assert type(model) is nnx.Linear
    np.testing.assert_array_equal(model.kernel[...], twin.kernel[...])


def test_a_call_that_fails_leaves_a_lazy_model_lazy() -> None:
    model = lm.LazyLinear(2, rngs=nnx.Rngs(0))
    compiled = lm.jit(lambda m, x: m(x)).lower(model, X).compile()
    with pytest.raises(TypeError, match="float32"):
        compiled(model, X[:2])
    assert lm.is_lazy(model)


def test_stages_tell_what_those_of_flax_tell() -> None:
    ours, theirs = training(), training()
    trace, other = lm.jit(step).trace(*ours, X, Y), nnx.jit(step).trace(*theirs, X, Y)
    assert (trace.out_info.shape, trace.out_info.dtype) == (other.out_info[-1].shape, other.out_info[-1].dtype)
    lowered = trace.lower()
    assert lowered.as_text() == lowered.stablehlo and "stablehlo.dot_general" in lowered.as_text("stablehlo")
    assert "HloModule" in lowered.as_text("hlo") and lowered.compiler_ir() is not None
    assert bool(lowered.cost_analysis()) == bool(other.lower().cost_analysis())  # of a GPU's programs it tells nothing
    assert lowered.cost["flops"] > 0
    compiled = lowered.compile({"xla_embed_ir_in_executable": True})
    assert "HloModule" in str(compiled.as_text()) and compiled.cost_analysis()["flops"] > 0
    assert compiled.memory_analysis().argument_size_in_bytes > 4 * (12 + 8) and compiled.runtime_executable()
    flat = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    assert {len(sharding.device_set) for sharding in flat} == {1}
    assert len(jax.tree.leaves(compiled.input_formats)) == len(jax.tree.leaves(compiled.input_layouts)) > 4


def test_what_is_known_of_the_arguments_is_what_jax_tells() -> None:
    def call(x: Any, n: int, *, scale: Any) -> Any:
        return {"y": x["a"] * n * scale}

    ours = lm.jit(call, static_argnames="n").lower({"a": X}, 2, scale=1.0)
    theirs = jax.jit(call, static_argnames="n").lower({"a": X}, 2, scale=1.0)
    assert (ours.in_tree, ours.out_tree, ours.in_avals) == (theirs.in_tree, theirs.out_tree, theirs.in_avals)
    assert (ours.args_info, ours.donate_argnums) == (theirs.args_info, theirs.donate_argnums)


def test_donated_state_is_named() -> None:
    model = nnx.BatchNorm(3, use_bias=False, use_scale=False, rngs=nnx.Rngs(0))
    lowered = lm.jit(lambda m, x: m(x), donate_state=True).lower(model, X)
    leaves = jax.tree.leaves((model, X))
    assert [leaves[n].shape for n in lowered.donate_argnums] == [(3,), (3,)]  # mean and var; not x
    assert lowered.jaxpr.in_avals[0].shape == (4, 3)


def test_lowering_for_another_platform() -> None:
    lowered = lm.jit(lambda x: jnp.sin(x)).trace(X).lower(lowering_platforms=("tpu",))
    assert "stablehlo.sine" in lowered.as_text()


# ---------------------------------------------------------------- eval_shape


def test_eval_shape_of_arrays_and_objects_is_that_of_flax() -> None:
    class Counter(nnx.Module):
        def __init__(self) -> None:
            self.count = nnx.Variable(jnp.zeros((), jnp.int32))
            self.layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> Any:
            self.count[...] += 1
            self.last = nnx.Intermediate(self.layer(x))
            return {"y": self.last[...], "made": nnx.Param(x.astype(jnp.bfloat16)), "me": self}

    model, twin = Counter(), Counter()
    got, want = lm.jit(Counter.__call__).eval_shape(model, X), nnx.jit(Counter.__call__).eval_shape(twin, X)
    assert got["me"] is not model and not hasattr(model, "last") and int(model.count[...]) == 0
    assert isinstance(got["me"].layer.kernel.get_raw_value(), jax.ShapeDtypeStruct)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    kinds = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)] for tree in (got, want)]
    assert kinds[0] == kinds[1]


def test_eval_shape_leaves_a_lazy_model_lazy() -> None:
    model = lm.LazyLinear(2, rngs=nnx.Rngs(0))
    assert lm.jit(lambda m, x: m(x)).eval_shape(model, spec(4, 3)).shape == (4, 2)
    assert lm.is_lazy(model)


def test_eval_shape_of_what_is_closed_over() -> None:
    held = {"model": nnx.Linear(3, 2, rngs=nnx.Rngs(0)), "scale": (jnp.ones(()), 2)}

    @lm.jit
    def call(x: jax.Array) -> Any:
        held["model"].bias[...] += 1
        return held["model"](x) * held["scale"][0], held["model"].bias

    before = values(held["model"])
    out, bias = call.eval_shape(X)
    assert (out.shape, bias.get_raw_value().shape) == ((4, 2), (2,)) and bias is not held["model"].bias
    assert_same_values(values(held["model"]), before)


def test_a_function_that_decides_on_values_is_no_single_program() -> None:
    call = lm.jit(lambda x: x if x.sum() > 0 else -x)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        call.lower(X)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        call.eval_shape(X)


def test_random_keys_as_arguments_and_state() -> None:
    rngs, twin = nnx.Rngs(3), nnx.Rngs(3)

    def draw(rngs: Any, key: Any) -> Any:
        return jax.random.normal(rngs(), (2,)) + jax.random.normal(key, (2,))

    key = jax.random.key(7)
    compiled = lm.jit(draw).lower(rngs, key).compile()
    for _ in range(2):
        np.testing.assert_allclose(compiled(rngs, key), draw(twin, key), rtol=1e-6)
    assert int(rngs.default.count[...]) == 2
