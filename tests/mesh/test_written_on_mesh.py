"""What a function of lm.jit writes on a mesh: all kinds of values and places, and what an optimizer makes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import raw
from jax.sharding import AxisType, NamedSharding
from on_mesh import P, arrays, assert_placed, mesh_of
from steps_on_mesh import MLP, RULES, STEPS, assert_all_close, batch, on, one_device, places, put, spread, train

import lazymods as lm

pytestmark = pytest.mark.usefixtures("standard_promotion")


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


@pytest.mark.slow
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


@pytest.mark.slow
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
        _ = unread[...] * kept[...]  # what nobody wants
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


@pytest.mark.slow
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


