"""An array to everything that asks: placement, mutable values, checks, Orbax and Flax's own questions, in a block."""

import contextlib
import copy
import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.errors import FlaxError
from jax.core import Tracer
from jax.experimental import checkify
from jax.typing import ArrayLike

import lazymods as lm

lt = lm.lazytensor

SCENES = """
import contextlib
import copy
import jax, jax.numpy as jnp, numpy as np
import lazymods as lm
from flax import nnx

devices, P = jax.devices(), jax.sharding.PartitionSpec
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
spread = jax.NamedSharding(mesh, P("data"))

def on_two_devices():
    return jax.device_put(jnp.ones(4), devices[0]) * 2, jax.device_put(jnp.ones(4) * 3, devices[1]) * 3, jnp.ones(4) * 5

def spread_and_not():
    a = jax.device_put(jnp.ones(8), spread) * 2
    return a, jax.device_put(jnp.ones(4), devices[1]) * 3, jax.device_put(a, devices[2]) + 1, a.sum(), jnp.ones(3) + 1

def moved():
    a = jnp.ones(4) * 2
    b = jax.device_put(a, devices[3])
    return a, b, b * 2, b[0] + b[1]

def made_there():
    made = jnp.zeros(4, device=devices[2]), jnp.ones(4, device=spread), jnp.full(4, 2.0, device=devices[3])
    others = jnp.arange(4.0, device=devices[1]), jnp.asarray(jnp.ones(4) * 2, device=devices[1])
    return *made, *(v + 1 for v in made), *others

def jitted():
    x = jnp.ones(8) * 2
    out = jax.jit(lambda x: x * 2, out_shardings=spread)(x)
    return out, out + 1, jax.jit(lambda x: x * 2, in_shardings=spread)(x), x

def constrained():
    x = jnp.ones((8, 4)) * 2
    with jax.set_mesh(mesh):
        inner = jax.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, P("data", None)))(x)
        return inner, jax.lax.with_sharding_constraint(inner, P(None, "data")), jnp.zeros((8, 4)) + 1

def mapped():
    x = jnp.ones((8, 4)) * 2
    sums = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())(x)
    asked = P(None), P("data", None), P(None, None, "data")
    x = x.reshape(4, 2, 4)
    return sums, x, *(jax.shard_map(lambda x: x + 1, mesh=mesh, in_specs=s, out_specs=s)(x) for s in asked)

def parameters():
    with jax.set_mesh(mesh):
        w = nnx.Param(jnp.ones((8, 4)), out_sharding=("data", None))
        model = nnx.Linear(8, 4, kernel_metadata={"out_sharding": ("data", None)}, rngs=nnx.Rngs(0))
        y = model(jnp.ones((2, 8)))
    return w.get_raw_value(), model.kernel.get_raw_value(), model.bias.get_raw_value(), y

def of_explicit_axes():
    grid = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(grid):
        spread = jax.device_put(jnp.arange(16.0).reshape(4, 4), jax.NamedSharding(grid, P("x", "y"))) * 2
        rngs = nnx.Rngs(0)
        drawn = jax.random.uniform(rngs(), (4, 4))
        moved = jax.sharding.reshard(drawn, P("x", "y"))  # what was recorded before has values here
        again = jax.sharding.reshard(jax.random.uniform(rngs(), (4, 4)), P("x"))
        mask = jax.random.bernoulli(rngs(), 0.5, (4, 4), out_sharding=P("x", "y"))
        dropped = nnx.Dropout(0.5, rngs=rngs)(spread)
        return spread + 1, spread.sum(), drawn, moved + spread, again, mask.astype(jnp.float32), dropped

def of_numpy():
    parts = [jax.device_put(jnp.ones(2) * n, device) for n, device in enumerate(devices)]
    return (
        jax.make_array_from_callback((8,), spread, lambda index: np.arange(8.0)[index]) * 2,
        jax.make_array_from_single_device_arrays((8,), spread, parts),
    )

def by_default():
    with jax.default_device(devices[2]):
        a = jnp.ones(4) * 2
    return a, jnp.ones(4) * 3

def seen(x):
    where = sorted((s.device.id, str(s.index)) for s in x.addressable_shards)
    return np.asarray(x).round(5).tolist(), where, x.committed, x.sharding.is_fully_replicated, str(x.sharding)

def same(got, want):  # to rounding: operations of one program are fused
    pairs = zip(got, want, strict=True)
    return all(a[1:] == b[1:] and np.allclose(a[0], b[0], rtol=1e-6, atol=1e-7) for a, b in pairs)

SCENES = (
    *(on_two_devices, spread_and_not, moved, made_there, jitted, constrained),
    *(mapped, parameters, of_explicit_axes, of_numpy, by_default),
)
for scene in SCENES:
    want = [seen(x) for x in scene()]
    with lm.lazytensor.lazy():
        out = scene()
        inside = [seen(x) for x in out]
    with lm.lazytensor.lazy():
        out = scene()
        lm.lazytensor.mark_step()
    assert same(inside, want), (scene, inside, want)
    after = [seen(x) for x in out]
    assert same(after, want), (scene, after, want)

with lm.lazytensor.lazy():
    a, b = jax.device_put(jnp.ones(4), devices[0]) * 2, jax.device_put(jnp.ones(4), devices[1]) * 3
    try:
        np.asarray(a + b)
    except ValueError as error:
        assert "incompatible devices" in str(error)
    else:
        raise AssertionError("devices were mixed")
    assert np.asarray(a).tolist() == [2] * 4 and np.asarray(b).tolist() == [3] * 4
print("done")
"""


@pytest.mark.slow
def test_values_are_where_they_would_be() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    run = subprocess.run([sys.executable, "-c", SCENES], env=environment, capture_output=True, text=True, check=False)
    assert run.stdout == "done\n", run.stderr


def in_and_out_of_a_block(scene: Callable[[], Any]) -> tuple[Any, Any]:
    found = []
    for block in (contextlib.nullcontext(), lt.lazy()):
        with block:
            found.append(scene())
    return found[0], found[1]


# ---------------------------------------------------------------- what Flax asks


def test_an_array_is_data_of_an_object() -> None:
    class Held(nnx.Module):
        def __init__(self, x: Any) -> None:
            self.x = x

        def renew(self) -> None:
            self.y = self.x * 2

    def scene() -> Any:
        held: Any = Held(jnp.array(3.0))
        held.renew()
        with pytest.raises(ValueError, match="annotated with nnx"):
            held.z = nnx.static(jnp.ones(2))  # type: ignore[attr-defined]
        return [float(v) for v in jax.tree.leaves(held)], sorted(
            str(path) for path, _ in nnx.to_flat_state(nnx.state(held))
        )

    plain, lazy = in_and_out_of_a_block(scene)
    assert plain == lazy == ([3.0, 6.0], ["('x',)", "('y',)"])


@pytest.mark.parametrize("decides", [False, True])
def test_an_array_that_a_compiled_function_stores_is_data(decides: bool) -> None:
    def store(model: Any, x: Any) -> Any:
        model.seen = x * 2
        made = nnx.Dict(inner=x + 1)
        model.gradient = jax.grad(lambda x: nnx.Dict(y=x * 3)["y"].sum())(x)
        return made if not decides or x.sum() > 0 else None

    def state(model: Any, made: Any) -> Any:
        attributes = [dict(vars(thing)["_pytree__nodes"]) for thing in (model, made)]
        return attributes, [np.asarray(leaf).tolist() for leaf in jax.tree.leaves((model, made["inner"]))]

    models = [nnx.Linear(1, 1, rngs=nnx.Rngs(0)) for _ in range(2)]
    call = lm.jit(store)
    for _ in range(3):
        got, want = state(models[0], call(models[0], jnp.ones(2))), state(models[1], store(models[1], jnp.ones(2)))
        assert got == want


@pytest.mark.parametrize("decides", [False, True])
def test_an_array_is_of_the_class_of_arrays(decides: bool) -> None:
    @functools.singledispatch
    def dispatched(_: object) -> str:
        return "object"

    dispatched.register(jax.Array, lambda _: "array")

    def ask(x: Any) -> list[Any]:
        if decides and x > 5:
            return []
        unions: list[Any] = [ArrayLike, ArrayLike | nnx.Variable, jax.Array, jax.Array | str]
        asked = (x, x + 1, 1, "text", nnx.Param(x))
        found = [isinstance(value, union) for value in asked for union in unions]
        return [*found, *(issubclass(type(value), jax.Array) for value in asked), *map(dispatched, asked)]

    array, number = [True] * 4, [True, True, False, False]
    text, variable = [False, False, False, True], [False, True, False, False]
    classes, kinds = [True, True, False, False, False], ["array", "array", "object", "object", "object"]
    want = [*array, *array, *number, *text, *variable, *classes, *kinds]
    plain, lazy = in_and_out_of_a_block(lambda: ask(jnp.array(1.0) * 2))
    assert plain == lazy == lm.jit(ask)(jnp.array(2.0)) == want
    assert not issubclass(Tracer, type(jnp.ones(1)))  # of that class are arrays with a value only


def test_arrays_are_popped() -> None:
    class Held(nnx.Module):
        def __init__(self, x: Any) -> None:
            self.seen, self.kept, self.count = x * 2, x * 3, nnx.BatchStat(x)

    def pop(held: Any, x: Any) -> Any:
        inside = {"seen": x + 1, "kept": x}
        popped = [nnx.pop(node, lambda path, _: path[-1] in ("seen", "count")) for node in (held, {"a": inside})]
        return [dict(nnx.to_flat_state(state)) for state in popped], inside

    def scene(pop: Callable[..., Any]) -> Any:
        x = jnp.array(1.0) * 2
        held = Held(x)
        out = jax.tree.map(lambda v: float(v[...]), pop(held, x), is_leaf=lambda v: isinstance(v, nnx.Variable))
        return out, sorted(name for name in vars(held) if not name.startswith("_")), float(held.kept)

    plain, lazy = in_and_out_of_a_block(lambda: scene(pop))
    compiled, both = in_and_out_of_a_block(lambda: scene(lm.jit(pop)))
    want = ([{("seen",): 4.0, ("count",): 2.0}, {("a", "seen"): 3.0}], {"kept": 2.0}), ["kept"], 6.0
    assert plain == lazy == compiled == both == want


def test_sharding_asked_of_a_variable() -> None:
    with lt.lazy():
        variable = nnx.Param(jnp.ones(2) * 2)
        sharding, devices = variable.sharding, variable.devices()
    assert sharding == jnp.ones(2).sharding and devices == jnp.ones(2).devices()


# ---------------------------------------------------------------- what no program can do


@pytest.mark.xfail(
    jax.config.jax_check_tracer_leaks and jax.__version_info__ < (0, 11),  # type: ignore[attr-defined]
    raises=IndexError,
    reason="jax's checker fails itself at a jitted write to a mutable Variable, without a block too",
)
def test_mutable_variables() -> None:
    def scene() -> Any:
        with nnx.var_defaults(hijax=True):
            model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        count = nnx.Variable(jnp.array(1.0), hijax=True)
        count[...] += 1
        x = jnp.ones((1, 2))
        gradient = jax.grad(lambda x: (model(x) * count[...]).sum())(x)

        def step(count: Any, x: Any) -> Any:
            count[...] += x.sum()
            return x * count[...]

        try:
            out = jax.jit(step)(count, x * 2)
        except FlaxError as error:  # flax 0.12.12 lets nothing be written there
            return type(error), gradient.tolist()
        return out.tolist(), float(count[...]), gradient.tolist()

    plain, lazy = in_and_out_of_a_block(scene)
    assert plain == lazy


@pytest.mark.slow
def test_checks_raise_where_they_are_thrown() -> None:
    def check(x: Any) -> Any:
        checkify.check(x > 0, "not positive: {x}", x=x)
        return x * 2

    def scene() -> list[Any]:
        found: list[Any] = []
        cases = [(jnp.sin, jnp.array(jnp.inf), checkify.float_checks), (check, jnp.array(-1.0), checkify.user_checks)]
        for function, x, errors in cases:
            for made in (function, jax.jit(function)):
                error, _ = checkify.checkify(made, errors=errors)(x * 1)
                with pytest.raises(ValueError) as caught:
                    error.throw()
                found.append(str(caught.value))
        error, out = checkify.checkify(check)(jnp.array(2.0))
        error.throw()
        with pytest.raises(ValueError) as caught:
            check(jnp.array(-3.0) * 1)
        return [*found, float(out), str(caught.value)]

    plain, lazy = in_and_out_of_a_block(scene)
    assert plain == lazy and len(plain) == 6


def test_a_derivative_of_the_users_own_with_arguments_that_it_leaves_out() -> None:
    @jax.custom_vjp
    def plain_rule(x: Any) -> Any:
        return x * 2

    plain_rule.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 5,))

    def times(x: Any, n: Any) -> Any:
        return x * n

    rule = jax.custom_vjp(times, nondiff_argnums=(1,))
    rule.defvjp(lambda x, n: (x * n, None), lambda n, _, g: (g * 10 * n,))

    def scene() -> list[float]:
        x, n = jnp.float32(3) * 1, jnp.float32(2) * 1
        return [float(v) for v in (rule(x, n), jax.grad(rule)(x, n), jax.grad(plain_rule)(x), rule(x, n=n))]

    plain, lazy = in_and_out_of_a_block(scene)
    assert plain == lazy == [6, 20, 5, 6]


# ---------------------------------------------------------------- Orbax


def test_orbax_saves_and_restores(tmp_path: Path) -> None:
    want = {"a": [2.0, 2.0], "b": {"c": [1.0, 2.0, 3.0]}}
    with lt.lazy():
        tree = {"a": jnp.ones(2) * 2, "b": {"c": jnp.arange(3.0) + 1}}
        with ocp.StandardCheckpointer() as standard:
            standard.save(tmp_path / "standard", tree)
            standard.wait_until_finished()
            restored = standard.restore(tmp_path / "standard", tree)
        with ocp.PyTreeCheckpointer() as pytree:
            pytree.save(tmp_path / "pytree", tree)
        inside = jax.tree.map(lambda x: x.tolist(), restored)
    arguments = ocp.checkpoint_utils.construct_restore_args(restored)
    with ocp.PyTreeCheckpointer() as pytree:
        after = jax.tree.map(lambda x: x.tolist(), pytree.restore(tmp_path / "pytree", restore_args=arguments))
    assert inside == after == want


def test_weights_can_be_read_after_a_cut_that_failed() -> None:
    def scene() -> Any:
        weight = nnx.Param(jnp.ones(2) * 3)
        bad = jax.pure_callback(_fails, jax.ShapeDtypeStruct((2,), jnp.float32), weight[...])
        other = weight[...] + 1
        with pytest.raises(Exception, match="no value"):
            np.asarray(bad)
        return np.asarray(weight[...]).tolist(), np.asarray(other).tolist()

    with lt.lazy():
        assert scene() == ([3, 3], [4, 4])


def _fails(_: Any) -> Any:
    raise ValueError("no value")


PICKLED: dict[str, Callable[[], Any]] = {
    "array": lambda: jnp.arange(3) + 1,
    "weak": lambda: jnp.asarray(2.0) * 3.0,
    "narrow": lambda: jnp.ones(2, jnp.bfloat16) * 2,
    "key": lambda: jax.random.split(jax.random.key(0))[0],
    "keys": lambda: jax.random.split(jax.random.key(0, impl="rbg"), 3),
    "rngs": lambda: nnx.Rngs(jax.random.fold_in(jax.random.key(0), 1)),
    "model": lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=jax.random.fold_in(jax.random.key(0), 1))),
}


def known(tree: Any) -> list[Any]:
    leaves = jax.tree.leaves(nnx.state(tree) if isinstance(tree, nnx.Pytree) else tree)
    return [(x.aval, np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x))
            for x in leaves]  # fmt: skip


@pytest.mark.parametrize("make", PICKLED.values(), ids=PICKLED)
@pytest.mark.parametrize("again", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_copies_of_what_is_pending_and_of_what_is_not(make: Callable[[], Any], again: Callable[[Any], Any]) -> None:
    outside = make()
    want = known(outside)
    text = repr(again(outside))
    with lt.lazy():
        inside = [again(make()), again(outside), *again([make(), outside])]
        assert {repr(x) for x in inside} == {text}
    for found in inside:
        for (aval, value), (other, expected) in zip(known(found), want, strict=True):
            assert (aval.dtype, aval.weak_type) == (other.dtype, other.weak_type)
            np.testing.assert_array_equal(value, expected)
