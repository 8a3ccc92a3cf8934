"""Caches, counts, explanations, and what a function is lowered and exported to."""

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm
from lazymods._program_cache import Cache

X = jnp.ones((2, 3))


def linear() -> nnx.Linear:
    return nnx.Linear(3, 4, rngs=nnx.Rngs(0))


# ---------------------------------------------------------------- caches


def test_nothing_outlives_the_model_and_its_own_objects_keep_nothing() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.layer = lm.LazyLinear(4, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.layer(x)

    call, model = lm.jit(lambda m, x: m(x)), Net()
    for _ in range(3):
        call(model, X)
    gone = [weakref.ref(model), weakref.ref(model.layer), weakref.ref(model.layer.kernel.get_raw_value())]
    gc.collect()
    gc.disable()
    try:
        del model
        assert [ref() for ref in gone] == [None] * 3  # at once: no cycle was made
    finally:
        gc.enable()
    assert call.cache_info().currsize == 1


def test_a_model_with_a_cycle_is_collected() -> None:
    model: Any = linear()
    call = lm.jit(lambda m, x: m(x))
    model.me = nnx.data(model)
    call(model, X), call(model, X)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_what_is_put_under_a_key_again_replaces_what_was_there() -> None:
    class Owner:
        def __init__(self) -> None:
            self.dropped: list[str] = []

        def drop(self, thing: str) -> None:
            self.dropped.append(thing)

    owner = Owner()
    cache = Cache(owner.drop)
    cache.put("key", "first")
    cache.put("key", "second")
    assert cache.get("key") == "second" and cache.info().currsize == 1 and owner.dropped == ["first"]
    previous = lm.set_cache_size(1)
    try:
        cache.put("another", "third")
        assert owner.dropped == ["first", "second"] and cache.get("key") is None
    finally:
        lm.set_cache_size(previous)


def test_a_smaller_bound_applies_at_once() -> None:
    double = lm.jit(lambda x: x * 2)
    for rows in range(1, 6):
        double(jnp.ones(rows))
    previous = lm.set_cache_size(2)
    try:
        assert double.cache_info() == (2, 2)
        np.testing.assert_array_equal(double(jnp.ones(1)), [2.0])
        assert double.cache_info() == (2, 2)
    finally:
        lm.set_cache_size(previous)
    with pytest.raises(ValueError, match="at least 1"):
        lm.set_cache_size(0)


def test_a_model_has_no_trace_of_being_compiled() -> None:
    model, plain = linear(), linear()
    lm.jit(model)(X)
    assert list(vars(model)) == list(vars(plain)) and nnx.graphdef(model) == nnx.graphdef(plain)
    assert jax.tree.structure(model) == jax.tree.structure(plain)


# ---------------------------------------------------------------- counts and reasons


def test_counts() -> None:
    before = lm.metrics()
    call, model = lm.jit(lambda m, x: m(x)), linear()
    for rows in (2, 2, 3, 2, 3):
        call(model, jnp.ones((rows, 3)))
    after = lm.metrics()
    assert [after[n] - before[n] for n in ("traces", "compiles", "cache_hits")] == [2, 2, 3]
    assert set(after) == {"traces", "compiles", "cache_hits", "materializations", "trace_time", "compile_time"}
    assert repr(after).splitlines()[0].split()[0] == "traces"


class Mine(nnx.Linear):
    pass


class Net(nnx.Module):
    def __init__(self) -> None:
        self.layer, self.scale, self.mode = linear(), 2, "fast"

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x) * self.scale


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m, "scale", 3), "m.scale: 2 -> 3"),
        (lambda m: setattr(m, "mode", "slow"), "m.mode: 'fast' -> 'slow'"),
        (lambda m: setattr(m, "scale", 2.0), "m.scale: 2 -> 2.0"),
        (lambda m: m.layer.bias.set_metadata("note", 1), "m.layer.bias.note: added (1)"),
        (lambda m: setattr(m.layer, "__class__", Mine), "m.layer: Linear -> Mine"),
        (lambda m: m.layer.bias.set_value(m.layer.bias[...].astype(jnp.bfloat16)), "m.layer.bias: f32[4] -> bf16[4]"),
        (lambda m: setattr(m, "other", linear()), "m.other: added (Linear)"),
        (lambda m: delattr(m, "mode"), "m.mode: removed ('fast')"),
        (lambda m: setattr(m, "again", m.layer), "m.again: added (the same object as m.layer)"),
    ],
    ids=["number", "text", "type", "metadata", "class", "dtype", "module", "removed", "shared"],
)
def test_reasons(change: Any, reason: str) -> None:
    call, model = lm.jit(lambda m, x: x * 2), Net()
    call(model, X)
    change(model)
    call(model, X)
    name = "test_reasons.<locals>.<lambda>"
    assert str(lm.explain()) == f"lm.jit traced {name}:\n  {reason}" and lm.explain().reasons == (reason,)
    assert lm.explain().function == name


def test_reasons_of_arguments_are_in_their_names() -> None:
    @lm.jit
    def call(batch: Any, *rest: Any, scale: Any = 1, **more: Any) -> Any:
        return batch, rest, scale, more

    call({"image": jnp.ones((2, 3))}, jnp.ones(2), 5, scale=1, extra=jnp.ones(3))
    call({"image": jnp.ones((4, 3))}, jnp.ones(2), 5.0, scale=1.0, extra=jnp.ones(3, jnp.int32))
    assert lm.explain().reasons == (
        "batch['image']: f32[2,3] -> f32[4,3]",
        "rest[1]: int -> float",
        "scale: int -> float",
        "extra: f32[3] -> i32[3]",
    )


def test_what_changes_in_every_layer_is_one_line_and_no_more_than_twenty_are_shown() -> None:
    model = nnx.List([linear() for _ in range(30)])
    call = lm.jit(lambda layers: X)
    call(model)
    for layer in model:
        layer.kernel.set_value(layer.kernel[...].astype(jnp.bfloat16))
    call(model)
    assert lm.explain().reasons == ("layers.{0..29}.kernel: f32[3,4] -> bf16[3,4]",)
    for number, layer in enumerate(model):
        layer.in_features = 100 + number
    call(model)
    lines = str(lm.explain()).splitlines()
    assert len(lines) == 20 and lines[-1].endswith("and 12 more: see explain().reasons")
    assert len(lm.explain().reasons) == 30


def test_reasons_of_what_a_function_closes_over() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.double, self.calls = linear(), False, 0

        def step(self, x: jax.Array) -> jax.Array:
            return self.model(x) * (2 if self.double else 1)

    trainer = Trainer()
    call = lm.jit(trainer.step)
    call(X)
    trainer.double, trainer.calls = True, 7  # the second one is not read
    call(X)
    assert lm.explain().reasons == ("self.double: False -> True",)


def test_after_a_lazy_first_call_the_ready_model_is_what_was_traced() -> None:
    model = lm.LazyLinear(4, rngs=nnx.Rngs(0))
    call = lm.jit(lambda m, x: m(x))
    call(model, X)
    call(model, jnp.ones((5, 3)))
    assert lm.explain().reasons == ("x: f32[2,3] -> f32[5,3]",)


# ---------------------------------------------------------------- arguments


def test_an_argument_that_is_no_input() -> None:
    with pytest.raises(lm.ArgumentError) as caught:
        lm.jit(lambda x, options: x)(X, options={"mode": "fast"})
    assert str(caught.value) == (
        "argument options['mode']\n"
        "  got:    'fast'\n"
        "  needed: arrays, numbers and nnx objects, in any pytree: they are the inputs of the compiled program\n"
        "  write:  lm.jit(fn, static_argnames=...)  # with the parameter's name, if it is part of the program"
    )


def test_a_static_name_that_is_no_parameter() -> None:
    def call(x: jax.Array, n: int) -> jax.Array:
        return x * n

    with pytest.raises(lm.ConfigurationError) as caught:
        lm.jit(call, static_argnames=("n", "m"))
    assert str(caught.value) == (
        "test_a_static_name_that_is_no_parameter.<locals>.call\n"
        "  got:    static_argnames=('n', 'm')\n"
        "  needed: names of its parameters, which are x, n\n"
        "  write:  lm.jit(..., static_argnames=('n',))"
    )
    with pytest.raises(ValueError, match="at least 1 path"):
        lm.jit(call, max_paths=0)


# ---------------------------------------------------------------- lower, export


def test_lowering_leaves_a_lazy_model_lazy() -> None:
    model = nnx.List([lm.LazyLinear(4, rngs=nnx.Rngs(0))])
    low = lm.lower(lambda m, x: m[0](x), model, jax.ShapeDtypeStruct((2, 3), jnp.float32))
    assert low.cost["flops"] >= 2 * 2 * 3 * 4
    assert lm.has_uninitialized_params(model)


def test_a_graph_has_every_operation_and_inner_functions() -> None:
    low = lm.lower(lambda x: jax.lax.scan(lambda c, v: (jnp.sin(c) + v, c), 0.0, x)[0], jnp.ones(3))
    lines = low.dot.splitlines()
    assert lines[0] == "digraph program {" and lines[-1] == "}"
    assert sum("subgraph" in line for line in lines) == low.dot.count("subgraph") >= 1
    assert any("sin" in line for line in lines) and any("output 0" in line for line in lines)
    assert low.dot.count("{") == low.dot.count("}")


def test_export_of_a_function_with_models_as_arguments() -> None:
    pytest.importorskip("flatbuffers")
    model = linear()
    blob = lm.export(lambda m, batch: m(batch["x"]), model, {"x": X}, platforms=("cpu", "cuda"))
    back = jax.export.deserialize(bytearray(blob))
    np.testing.assert_allclose(back.call({"x": X}), model(X), rtol=1e-6)


def test_export_of_a_function_that_returns_a_model() -> None:
    with pytest.raises(lm.LazyError) as caught:
        lm.export(lambda m, x: m, linear(), X)
    assert str(caught.value) == (
        "test_export_of_a_function_that_returns_a_model.<locals>.<lambda>\n"
        "  got:    a function that returns an nnx object\n"
        "  needed: a function of arrays that returns arrays: an artifact holds no Python objects\n"
        "  write:  return nnx.to_pure_dict(nnx.state(module))  # or the arrays themselves"
    )


def test_export_without_flatbuffers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "flatbuffers" or "export.serialization" in n]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(lm.LazyError) as caught:
        lm.export(linear(), X)
    assert str(caught.value) == (
        "Linear\n"
        "  got:    no flatbuffers\n"
        "  needed: the package in whose format JAX exports\n"
        "  write:  pip install flatbuffers"
    )


PROGRAM = """
import jax, jax.numpy as jnp, lazymods as lm, sys
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
jax.jit(lambda x: x - 1)(jnp.ones(3))
lm.set_compilation_cache(sys.argv[1])
lm.jit(lambda x: jnp.sin(x) * 2)(jnp.ones(3))
print(sum(name.endswith("/cache_hits") for name in events))
"""


@pytest.mark.slow
def test_the_compilation_cache_serves_the_next_process(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}

    def hits() -> int:
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
        )
        return int(run.stdout)

    first, second = hits(), hits()
    assert first == 0 < second


@pytest.mark.parametrize("look", ["lower", "trace", "eval_shape", "lm.lower", "lm.export"])
def test_a_function_that_decides_is_not_one_program_to_look_at(look: str) -> None:
    def step(model: Any, x: Any) -> Any:
        return model(x) if x.sum() > 0 else x

    model, x, call = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), jnp.ones((2, 3)), lm.jit(step)
    asked = getattr(lm, look[3:]) if look.startswith("lm.") else getattr(call, look)
    given = (call, model, x) if look.startswith("lm.") else (model, x)
    with pytest.raises(jax.errors.ConcretizationTypeError) as found:
        asked(*given)
    assert "step> Python decides on the value of an array" in "".join(found.value.__notes__)
    np.testing.assert_allclose(call(model, x), model(x), rtol=1e-6)


def test_one_platform_is_exported_by_its_name() -> None:
    pytest.importorskip("flatbuffers", reason="jax.export needs it")
    blob = lm.export(lambda x: x * 2, jnp.ones(3), platforms="cuda")
    assert jax.export.deserialize(bytearray(blob)).platforms == ("cuda",)
