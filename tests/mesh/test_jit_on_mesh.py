"""lm.jit on a mesh: what it writes stays where it was, with the values of one device, however it is called."""

import functools
import itertools
import math
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

import lazymods as lm

RULES = [("fc1.kernel", P(None, "model")), ("fc2.kernel", P("model"))]  # XLA would split fc1.bias as well
STEPS = 3


@pytest.fixture(autouse=True)
def _optax_counts_in_integers():
    with jax.numpy_dtype_promotion("standard"):
        yield


class MLP(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.fc1, self.fc2 = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.fc2(jax.nn.relu(self.fc1(x)))


def batch(number):
    rng = np.random.default_rng(number)
    return rng.standard_normal((8, 8)).astype(np.float32), rng.standard_normal((8, 4)).astype(np.float32)


def train(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def deciding(model, optimizer, x, y):
    loss = train(model, optimizer, x, y)
    return loss if loss > 1e6 else loss * 1


def deciding_first(model, optimizer, x, y):
    return train(model, optimizer, x, y) if x.sum() > 0 else train(model, optimizer, x, y) * 1


def put(mesh, spec, array):
    return jax.device_put(array, NamedSharding(mesh, spec))


def spread(thing, mesh, rules):
    """Move an object's arrays, random state too, to where the first rule says whose expression is in the name."""
    spec_of = by_pairs(rules)
    moved = [(path, spec_of(".".join(map(str, path))), v) for path, v in nnx.to_flat_state(nnx.state(thing))]
    nnx.update(thing, nnx.from_flat_state([(p, v.replace(put(mesh, spec, v.get_value()))) for p, spec, v in moved]))
    return thing


def optimizer_of(model, tx=None):
    return nnx.Optimizer(model, tx or optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def trainer(mesh, rules=RULES, tx=None):
    model = spread(MLP(), mesh, rules)
    return model, optimizer_of(model, tx)


def on(mesh, number, axis="data"):
    return [put(mesh, P(axis), array) for array in batch(number)]


def places(*things):
    return {f"{n}.{k}": (a.sharding, a.committed) for n, t in enumerate(things) for k, a in arrays(t).items()}


def assert_all_close(got, want, tol=1e-5):
    found, expected = arrays(got), arrays(want)
    assert list(found) == list(expected)
    for name, array in found.items():
        np.testing.assert_allclose(raw(array), raw(expected[name]), rtol=tol, atol=tol, err_msg=name)


@functools.cache
def one_device(steps, make=None):
    """The same training by Flax on one device: losses, model, optimizer."""
    model = MLP()
    optimizer = optimizer_of(model, make and make())
    step = nnx.jit(train)
    return [float(step(model, optimizer, *batch(n))) for n in range(steps)], model, optimizer


# ---------------------------------------------------------------- however it is called


def of_numpy(step):
    return lambda model, optimizer, x, y: step(model, optimizer, np.asarray(x), np.asarray(y))


def ahead(model, optimizer, x, y, donate=False):
    return lm.jit(train, donate_state=donate).lower(model, optimizer, x, y).compile()


def specs(*arrays):
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in arrays]


WAYS = {
    "plain": lambda *_: lm.jit(train),
    "donated": lambda *_: lm.jit(train, donate_state=True),
    "deciding": lambda *_: lm.jit(deciding),
    "deciding first": lambda *_: lm.jit(deciding_first),
    "check": lambda *_: lm.jit(train, check=True),
    "ahead": ahead,
    "ahead, donated": lambda *args: ahead(*args, donate=True),
    "ahead, of specs": lambda model, optimizer, *xy: ahead(model, optimizer, *specs(*xy)),
    "inside another": lambda *_: lm.jit(lambda *args: lm.jit(train)(*args)),
    "numpy batch": lambda *_: of_numpy(lm.jit(train)),
}


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


def test_explain_says_that_a_model_has_come_to_a_mesh():
    mesh, model = mesh_of(data=4, model=2), nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0))
    call = lm.jit(lambda model, x: model(x))
    call(model, batch(0)[0])
    call(spread(model, mesh, []), batch(0)[0])
    assert str(lm.explain()).splitlines()[1:] == ["  model.kernel: f32[8,4] -> f32[8,4] on a mesh of data=4, model=2"]
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    call(spread(model, explicit, [("kernel", P(None, "model"))]), put(explicit, P(), batch(0)[0]))
    assert "-> f32[8,4] P(None, 'model') on a mesh of data=4, model=2" in str(lm.explain())


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


def test_what_is_compiled_ahead_refuses_other_places():
    mesh = mesh_of(data=4, model=2)
    model, optimizer = trainer(mesh)
    compiled = lm.lower(train, model, optimizer, *on(mesh, 0)).compile()
    compiled(model, optimizer, *on(mesh, 0))
    with pytest.raises(ValueError, match="shardings that disagree"):
        compiled(model, optimizer, *on(mesh, 1, "model"))
    assert_all_close(model, one_device(1)[1])


# ---------------------------------------------------------------- what is written


class Various(nnx.Module):
    """Arrays in all places where a module can have some, each lying in a way of its own."""

    def __init__(self, mesh):
        ones = functools.partial(jnp.ones, (8, 4))
        self.pair = nnx.data((put(mesh, P("data"), ones()), put(mesh, P(None, "model"), ones())))
        self.items = nnx.List([put(mesh, P("model"), ones()), put(mesh, P(), ones())])
        self.tree = nnx.Variable({"a": put(mesh, P("data", "model"), ones()), "b": put(mesh, P("data"), jnp.ones(8))})
        self.raw = put(mesh, P("model", "data"), ones())
        self.tagged = nnx.Variable(put(mesh, P(("data", "model")), ones()), tag=0)
        self.keys = nnx.Variable(put(mesh, P("data"), jax.random.split(jax.random.key(0), 8)))
        self.steps = 0

    def held(self):
        tree = self.tree.get_value()
        return [*self.pair, *self.items, tree["a"], tree["b"], self.raw, self.tagged.get_value(), self.keys.get_value()]

    def __call__(self, x):
        """Change every value; of some, more than the value."""
        g = (x[:, :4] * x[:1, :1]).sum(1, keepdims=True)
        self.pair = (self.pair[0] + g, self.pair[1] - g)
        self.items[0], self.items[1] = self.items[0] * g, self.items[1] + g
        tree = self.tree.get_value()
        self.tree.set_value({"a": tree["a"] + g, "b": tree["b"] + g[:, 0]})
        self.raw = self.raw + g
        self.tagged.set_value(self.tagged[...] + g)
        self.tagged.set_metadata(tag=1)
        self.keys.set_value(jax.vmap(lambda key: jax.random.fold_in(key, 1))(self.keys[...]))
        self.steps = 1
        return g


@pytest.mark.parametrize("donate", [False, True], ids=["", "donated"])
def test_all_kinds_of_places_and_changes(donate):
    mesh = mesh_of(data=4, model=2)
    model, want, step = Various(mesh), Various(mesh_of(data=1, model=1)), lm.jit(Various.__call__, donate_state=donate)
    before = [a.sharding for a in model.held()]
    for number in range(3):
        x = jnp.asarray(batch(number)[0])
        step(model, put(mesh, P("data"), x))
        want(x)
        assert [a.sharding for a in model.held()] == before
        for got, expected in zip(model.held(), want.held(), strict=True):
            np.testing.assert_allclose(raw(got), raw(expected), rtol=1e-4, atol=1e-4)


def test_a_value_of_another_shape_is_left_to_xla():
    mesh = mesh_of(data=4, model=2)
    cache = nnx.Cache(put(mesh, P("data"), jnp.ones((4, 4))))
    weight = nnx.Param(put(mesh, P("model"), jnp.ones((4, 4))))

    @lm.jit
    def step(cache, weight, x):
        cache.set_value(jnp.concatenate([cache[...], x[:1, :4]]))
        weight.set_value(weight[...] * 2)

    want = [np.ones((4, 4), np.float32)]
    for number in range(3):
        step(cache, weight, put(mesh, P("data"), batch(number)[0]))
        want.append(batch(number)[0][:1, :4])
    np.testing.assert_array_equal(cache.get_value(), np.concatenate(want))
    assert_placed(weight.get_value(), mesh, P("model"))
    np.testing.assert_array_equal(weight.get_value(), np.full((4, 4), 8))


def test_with_explicit_axes_the_type_says_where_a_value_goes():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    kept, moved, unread = (nnx.Variable(put(mesh, P("data"), jnp.ones((8, 4)))) for _ in range(3))

    @lm.jit
    def step(kept, moved, unread):
        unread[...] * kept[...]  # what nobody wants
        kept.set_value(kept[...] + 1)
        moved.set_value(jax.sharding.reshard(moved[...] + 1, P("data", "model")))

    with jax.set_mesh(mesh):
        for _ in range(3):
            step(kept, moved, unread)
        found = lm.jit(lambda v: v[...] * 2).eval_shape(kept)
    assert_placed(kept.get_value(), mesh, P("data"))
    assert_placed(moved.get_value(), mesh, P("data", "model"))
    np.testing.assert_array_equal(moved.get_value(), np.full((8, 4), 4))
    assert found.sharding.spec == P("data", None)


def test_memory_of_the_host_stays_that():
    mesh = mesh_of(data=4, model=2)
    there = NamedSharding(mesh, P("model"), memory_kind="pinned_host")
    offloaded = nnx.Variable(jax.device_put(jnp.ones((8, 4)), there))
    weight = nnx.Variable(put(mesh, P("model"), jnp.ones((8, 4))))

    @lm.jit
    def step(offloaded, weight):
        weight.set_value(weight[...] + jax.device_put(offloaded[...], jax.memory.Space.Device))
        offloaded.set_value(jax.device_put(weight[...], jax.memory.Space.Host))

    for _ in range(2):
        step(offloaded, weight)
    assert offloaded.get_value().sharding == there
    assert_placed(weight.get_value(), mesh, P("model"))
    np.testing.assert_array_equal(weight.get_value(), np.full((8, 4), 4))


OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-2),
    "accumulated": lambda: optax.MultiSteps(optax.sgd(0.1), 2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "averaged": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "factored": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "masked": lambda: optax.masked(optax.lion(1e-2), lambda p: jax.tree.map(lambda a: a.ndim > 1, p)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_whose_state_is_made_inside(name):
    mesh = mesh_of(data=4, model=2)
    model = spread(MLP(), mesh, RULES)
    optimizer, step = lm.LazyOptimizer(model, OPTIMIZERS[name](), wrt=nnx.Param), lm.jit(train, donate_state=True)
    before = places(model)
    losses, want, want_optimizer = one_device(STEPS, OPTIMIZERS[name])
    held = []
    for number in range(STEPS):
        assert step(model, optimizer, *on(mesh, number)) == pytest.approx(losses[number], rel=1e-4)
        state = {name: a for name, a in arrays(optimizer).items() if isinstance(a, jax.Array)}
        held.append({name: a.sharding for name, a in state.items()})
        assert all(isinstance(s, NamedSharding) and s.mesh == mesh for s in held[-1].values())
    assert places(model) == before
    assert held[0] == held[-1]
    assert_all_close(model, want, 1e-4)
    for got, expected in zip(*(jax.tree.leaves(nnx.state(o)) for o in (optimizer, want_optimizer)), strict=True):
        np.testing.assert_allclose(raw(got), raw(expected), rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- programs


def test_an_update_with_gradients_in_place_is_each_devices_own_business():
    mesh = mesh_of(data=4, model=2)
    model, optimizer = trainer(mesh, tx=optax.adamw(1e-2))
    grads = jax.tree.map(lambda p: 0.5 * p, nnx.state(model, nnx.Param))
    lowered = lm.lower(lambda model, optimizer, grads: optimizer.update(model, grads), model, optimizer, grads)
    assert re.findall("all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all", lowered.hlo) == []


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
    assert step._fast.plan._launch._ready.written  # it knows the new state without looking at it
    assert_all_close(model, one_device(5)[1])


class Noisy(nnx.Module):
    """Random keys and a table that nobody has placed, beside a kernel that is on a mesh."""

    def __init__(self):
        self.fc, self.drop = nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        self.table = nnx.Variable(jnp.arange(16.0))

    def __call__(self, x):
        return self.drop(self.fc(x)) + self.table[...][None]


def test_small_arrays_that_nobody_has_placed_are_copied_once():
    mesh, model, want = mesh_of(data=4, model=2), Noisy(), Noisy()
    spread(model.fc, mesh, [("kernel", P(None, "model"))])
    call = lm.jit(lambda model, x: model(x))

    def same(number):
        x = batch(number)[0]
        np.testing.assert_allclose(call(model, put(mesh, P("data"), x)), want(x), rtol=1e-5, atol=1e-5)
        return call._fast.plan._launch._ready

    for number in range(6):
        ready = same(number)
    assert len(ready.copies) == 2  # the key and the table
    assert type(model.table.get_value().sharding) is SingleDeviceSharding
    copied = weakref.ref(ready.copies[1][2])
    for new in (jnp.arange(16.0) * 3, put(mesh, P(), jnp.arange(16.0) * 4), jnp.arange(16.0) * 5):
        for each in (model, want):
            each.table.set_value(new * 1)
        for number in range(6):
            ready = same(number)
        assert copied() is None
    assert len(ready.copies) == 2
    model.table.get_value().delete()
    with pytest.raises(RuntimeError, match="deleted"):
        call(model, put(mesh, P("data"), batch(0)[0]))


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
    assert math.isclose(optimizer.step.get_value(), 2)
