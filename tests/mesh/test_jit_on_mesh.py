"""lm.jit on a mesh: what it writes stays where it was, with the values of one device, however it is called."""

import itertools
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import raw
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from on_mesh import P, arrays, assert_placed, by_pairs, mesh_of
from steps_on_mesh import (
    MLP,
    RULES,
    STEPS,
    assert_all_close,
    batch,
    deciding,
    deciding_first,
    on,
    one_device,
    optimizer_of,
    places,
    put,
    spread,
    train,
    trainer,
)

import lazymods as lm

pytestmark = pytest.mark.usefixtures("standard_promotion")


# ---------------------------------------------------------------- however it is called


def of_numpy(step):
    return lambda model, optimizer, x, y: step(model, optimizer, np.asarray(x), np.asarray(y))


def ahead(model, optimizer, x, y, *, donate=False):
    return lm.jit(train, donate_state=donate).lower(model, optimizer, x, y).compile()


def spec(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def short_way(function):
    """What the last call has prepared for the next one."""
    return function._fast.plan._launch._ready


WAYS = {
    "plain": lambda *_: lm.jit(train),
    "donated": lambda *_: lm.jit(train, donate_state=True),
    "deciding": lambda *_: lm.jit(deciding),
    "deciding first": lambda *_: lm.jit(deciding_first),
    "check": lambda *_: lm.jit(train, check=True),
    "ahead": ahead,
    "ahead, donated": lambda model, optimizer, x, y: ahead(model, optimizer, x, y, donate=True),
    "ahead, of specs": lambda model, optimizer, x, y: ahead(model, optimizer, spec(x), spec(y)),
    "inside another": lambda *_: lm.jit(lambda model, optimizer, x, y: lm.jit(train)(model, optimizer, x, y)),
    "numpy batch": lambda *_: of_numpy(lm.jit(train)),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_step_leaves_everything_where_it_was(way):
    mesh = mesh_of(data=4, model=2)
    model, optimizer = trainer(mesh)
    step = WAYS[way](model, optimizer, *on(mesh, 0))
    losses, want, want_optimizer = one_device(STEPS)
    for number in range(STEPS):
        assert step(model, optimizer, *on(mesh, number)) == pytest.approx(losses[number], rel=1e-5)
        for owner in (model, optimizer):
            for name, array in arrays(owner).items():
                assert_placed(array, mesh, by_pairs(RULES)(name), (number, name))
    assert_all_close(model, want)
    assert_all_close(optimizer, want_optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_under_set_mesh(explicit):
    types = (AxisType.Explicit if explicit else AxisType.Auto,) * 2
    mesh, traced = jax.make_mesh((4, 2), ("data", "model"), axis_types=types), []

    def counted(*args):
        traced.append(1)
        return train(*args)

    with jax.set_mesh(mesh):
        model, optimizer = trainer(mesh, [("fc1.kernel", P(None, "model"))] if not explicit else [])
        before, step = places(model, optimizer), lm.jit(counted)
        for number in range(STEPS):
            step(model, optimizer, *on(mesh, number))
    _, want, want_optimizer = one_device(STEPS)
    assert len(traced) <= 2
    assert places(model, optimizer) == before
    assert_all_close(model, want)
    assert_all_close(optimizer, want_optimizer)


@pytest.mark.slow
def test_what_is_nowhere_in_particular_is_copied_to_each_device():
    """A model that nobody has placed; the batch is on a mesh, or jax.set_mesh names one, or the function does."""
    mesh = mesh_of(data=4, model=2)

    def constrained(model, optimizer, x, y):
        kernel = jax.lax.with_sharding_constraint(model.fc1.kernel[...], NamedSharding(mesh, P(None, "model")))
        model.fc1.kernel.set_value(kernel)
        return train(model, optimizer, x, y)

    _, want, _ = one_device(2)
    for step, context, batches in (
        (train, None, [on(mesh, 0), on(mesh, 1)]),
        (train, mesh, [batch(0), batch(1)]),
        (constrained, None, [batch(0), batch(1)]),
    ):
        model, call = MLP(), lm.jit(step)
        optimizer = optimizer_of(model)
        assert all(type(a.sharding) is SingleDeviceSharding and not a.committed for a in arrays(model).values())
        for x, y in batches:
            if context is None:
                call(model, optimizer, x, y)
            else:
                with jax.set_mesh(context):
                    call(model, optimizer, x, y)
        for owner in (model, optimizer):
            for name, array in arrays(owner).items():
                assert_placed(array, mesh, P(), name)
        assert_all_close(model, want)


@pytest.mark.slow
def test_what_is_on_no_mesh_stays_as_it_was():
    for device in (None, jax.devices()[3]):
        model, step = MLP(), lm.jit(train)
        if device is not None:
            nnx.update(model, jax.device_put(nnx.state(model), device))
        optimizer = optimizer_of(model)
        before = places(model)
        for number in range(2):
            step(model, optimizer, *batch(number))
        assert places(model) == before
        assert_all_close(model, one_device(2)[1])


# ---------------------------------------------------------------- moved between calls


@pytest.mark.slow
def test_a_model_that_is_moved_between_calls_stays_where_it_is_now():
    mesh, other, traced = mesh_of(data=4, model=2), mesh_of(model=4), []
    turns = [(mesh, RULES), (mesh, [("kernel", P("data"))]), (mesh, RULES), (mesh, [])]
    turns += [(other, [("kernel", P("model"))]), (None, []), (mesh, RULES)]

    @lm.jit
    def step(*args):
        traced.append(1)
        return train(*args)

    model, optimizer = trainer(mesh)
    losses, want, want_optimizer = one_device(len(turns))
    for number, (there, rules) in enumerate(turns):
        for thing in (model, optimizer):
            if there is None:
                nnx.update(thing, jax.device_put(nnx.state(thing), jax.devices()[5]))
            else:
                spread(thing, there, rules)
        before = places(model, optimizer)
        xy = batch(number) if there is not mesh else on(mesh, number)
        assert step(model, optimizer, *xy) == pytest.approx(losses[number], rel=1e-5)
        assert places(model, optimizer) == before, number
        if number == 3:
            assert len(traced) <= 2  # nor is it traced anew for another place on the same mesh
    assert_all_close(model, want)
    assert_all_close(optimizer, want_optimizer)


@pytest.mark.slow
def test_more_placements_than_a_program_keeps():
    mesh, step = mesh_of(a=2, b=2, c=2), lm.jit(lambda counter: counter.set_value(counter[...] + 1))
    orders = itertools.permutations((None, None, "a", "b", "c"), 2)
    specs = [P(*order) for order in dict.fromkeys(orders)]
    specs += [P(("a", "b"), other) for other in (None, "c")] + [P(other, ("b", "a")) for other in (None, "c")]
    assert len(specs) > 16
    counter = nnx.Variable(jnp.zeros((8, 8)))
    for number, spec in enumerate([*specs, *specs[:3]]):
        counter.set_value(put(mesh, spec, counter.get_value()))
        step(counter)
        assert_placed(counter.get_value(), mesh, spec)
        np.testing.assert_array_equal(counter.get_value(), np.full((8, 8), number + 1))


@pytest.mark.slow
def test_explain_says_that_a_model_has_come_to_a_mesh():
    mesh, model = mesh_of(data=4, model=2), nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0))
    call = lm.jit(lambda model, x: model(x))
    call(model, batch(0)[0])
    call(spread(model, mesh, []), batch(0)[0])
    assert str(lm.explain()).splitlines()[1:] == ["  model.kernel: f32[8,4] -> f32[8,4] on a mesh of data=4, model=2"]
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    call(spread(model, explicit, [("kernel", P(None, "model"))]), put(explicit, P(), batch(0)[0]))
    assert "-> f32[8,4] P(None, 'model') on a mesh of data=4, model=2" in str(lm.explain())


@pytest.mark.slow
def test_a_batch_on_other_devices_is_refused_and_changes_nothing():
    mesh, part = mesh_of(data=4, model=2), mesh_of(data=4)
    model, optimizer = trainer(mesh)
    step = lm.jit(train, donate_state=True)
    step(model, optimizer, *on(mesh, 0))
    before = [raw(a) for a in arrays(model).values()]
    with pytest.raises(ValueError, match="incompatible devices"):
        step(model, optimizer, *on(part, 1))
    for array, value in zip(arrays(model).values(), before, strict=True):
        np.testing.assert_array_equal(array, value)
    step(model, optimizer, *on(mesh, 1))
    assert_all_close(model, one_device(2)[1])


@pytest.mark.slow
def test_what_is_compiled_ahead_refuses_other_places():
    mesh = mesh_of(data=4, model=2)
    model, optimizer = trainer(mesh)
    compiled = lm.lower(train, model, optimizer, *on(mesh, 0)).compile()
    compiled(model, optimizer, *on(mesh, 0))
    with pytest.raises(ValueError, match="shardings that disagree"):
        compiled(model, optimizer, *on(mesh, 1, "model"))
    assert_all_close(model, one_device(1)[1])


# ---------------------------------------------------------------- programs


@pytest.mark.slow
def test_an_update_with_gradients_in_place_is_each_devices_own_business():
    mesh = mesh_of(data=4, model=2)
    model, optimizer = trainer(mesh, tx=optax.adamw(1e-2))
    grads = jax.tree.map(lambda p: 0.5 * p, nnx.state(model, nnx.Param))
    lowered = lm.lower(lambda model, optimizer, grads: optimizer.update(model, grads), model, optimizer, grads)
    assert re.findall("all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all", lowered.hlo) == []


@pytest.mark.slow
def test_calls_take_the_short_way_and_compile_once():
    mesh = mesh_of(data=4, model=2)
    model, optimizer = trainer(mesh)
    step = lm.jit(train, donate_state=True)
    for number in range(3):
        step(model, optimizer, *on(mesh, number))
    before = lm.metrics()["compiles"]
    for number in range(3, 5):
        step(model, optimizer, *on(mesh, number))
    assert lm.metrics()["compiles"] == before
    assert short_way(step).written  # it knows the new state without looking at it
    assert_all_close(model, one_device(5)[1])


class Noisy(nnx.Module):
    """Random keys and a table that nobody has placed, beside a kernel that is on a mesh."""

    def __init__(self):
        self.fc, self.drop = nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        self.table = nnx.Variable(jnp.arange(16.0))

    def __call__(self, x):
        return self.drop(self.fc(x)) + self.table[...][None]


@pytest.mark.slow
def test_small_arrays_that_nobody_has_placed_are_copied_once():
    mesh, model, want = mesh_of(data=4, model=2), Noisy(), Noisy()
    spread(model.fc, mesh, [("kernel", P(None, "model"))])
    call = lm.jit(lambda model, x: model(x))

    def same(number):
        x = batch(number)[0]
        np.testing.assert_allclose(call(model, put(mesh, P("data"), x)), want(x), rtol=1e-5, atol=1e-5)

    def settled():
        for number in range(6):
            same(number)
        return short_way(call)

    ready = settled()
    assert len(ready.copies) == 2  # the key and the table
    assert type(model.table.get_value().sharding) is SingleDeviceSharding
    copied = weakref.ref(ready.copies[1][2])
    for new in (jnp.arange(16.0) * 3, put(mesh, P(), jnp.arange(16.0) * 4), jnp.arange(16.0) * 5):
        for each in (model, want):
            each.table.set_value(new * 1)
        ready = settled()
        assert copied() is None
    assert len(ready.copies) == 2
    model.table.get_value().delete()
    with pytest.raises(RuntimeError, match="deleted"):
        call(model, put(mesh, P("data"), batch(0)[0]))


@pytest.mark.slow
def test_on_a_part_of_the_devices():
    for mesh in (mesh_of(data=2, model=2), mesh_of(data=1, model=1)):
        model, optimizer = trainer(mesh)
        step = lm.jit(train)
        for number in range(2):
            step(model, optimizer, *on(mesh, number))
        for owner in (model, optimizer):
            for name, array in arrays(owner).items():
                assert_placed(array, mesh, by_pairs(RULES)(name), name)
        assert_all_close(model, one_device(2)[1])


def test_a_lazy_model_is_sized_in_its_first_step_where_its_metadata_say():
    mesh = mesh_of(data=4, model=2)
    metadata = {"kernel_metadata": {"out_sharding": (None, "model")}, "bias_metadata": {"out_sharding": ("model",)}}
    with jax.set_mesh(mesh):
        want = nnx.Linear(8, 4, rngs=nnx.Rngs(0), **metadata)
        model = lm.LazyLinear(4, rngs=nnx.Rngs(0), **metadata)
        optimizer, step = lm.LazyOptimizer(model, optax.sgd(0.1), wrt=nnx.Param), lm.jit(train)
        want_optimizer, want_step = optimizer_of(want, optax.sgd(0.1)), nnx.jit(train)
        assert {k: a.sharding for k, a in arrays(want).items()} == {
            "bias": NamedSharding(mesh, P("model")),
            "kernel": NamedSharding(mesh, P(None, "model")),
        }
        before = {k: a.sharding for k, a in arrays(want).items()}
        for number in range(2):
            loss = step(model, optimizer, *on(mesh, number))
            np.testing.assert_allclose(loss, want_step(want, want_optimizer, *on(mesh, number)), rtol=1e-5)
            assert {k: a.sharding for k, a in arrays(model).items()} == before
    assert_all_close(model, want)
    assert optimizer.step.get_value() == 2
