"""``lm.materialize`` on a mesh: the values of Flax's explicit twin on one device, in parts, all or nothing."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_unchanged, contents, spec
from jax.sharding import AbstractMesh, NamedSharding
from on_mesh import P, arrays, assert_placed, assert_same_on_mesh, by_pairs, live_bytes, mesh_of

import lazymods as lm
from lazymods._initial import fill

RULES = [("kernel", P("data", "model")), ("bias", P("model"))]
X = spec(2, 8)

pytestmark = pytest.mark.usefixtures("standard_promotion")


def grid():
    return mesh_of(data=4, model=2)


def tanh(key, shape, dtype=jnp.float32):
    return jnp.tanh(jax.random.normal(key, shape, dtype))


def of_numpy(key, shape, dtype=jnp.float32):
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def of_another_dtype(key, shape, dtype=jnp.float32):
    return jax.random.normal(key, shape, jnp.bfloat16)


def affine(key, shape, dtype=jnp.float32):
    return jax.random.normal(key, shape, dtype) * 0.02 + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("init", "whole"),
    [
        (affine, False), (nnx.initializers.orthogonal(), True), (tanh, True), (of_numpy, True),
        (of_another_dtype, True), (nnx.initializers.constant(0.5), False), (nnx.initializers.he_uniform(), False),
    ],
)  # fmt: skip
def test_initializers_in_parts_and_whole(init, whole):
    mesh = grid()
    model, want = (make(kernel_init=init, rngs=nnx.Rngs(0)) for make in (lazy_linear, linear))
    plan = lm.infer_shapes(model, X, mesh=mesh, rules=RULES)
    report = lm.materialize(model, X, mesh=mesh, rules=RULES)
    assert_same_on_mesh(model, want, mesh, by_pairs(RULES))
    assert report.rows[0].parameters[0].made_whole is whole
    assert ("made whole" in report._repr_html_()) is whole
    assert plan.rows[0].parameters[0].made_whole is (whole and init not in (tanh, of_numpy, of_another_dtype))
    assert "made whole" not in lm.infer_shapes(lazy_linear(kernel_init=init, rngs=nnx.Rngs(0)), X)._repr_html_()


class Several(nnx.Module):
    def __init__(self, make, inits):
        self.layers = nnx.List([make(kernel_init=init, rngs=nnx.Rngs(i)) for i, init in enumerate(inits)])

    def __call__(self, x):
        return [layer(x) for layer in self.layers]


@pytest.mark.slow
def test_what_a_gpu_makes_whole_is_spread_by_xla(monkeypatch):
    """Under one jit, to rounding; a CPU stands for the GPU here."""
    spread = []

    def may_be_spread(run, place):
        spread.append(place)
        return True

    monkeypatch.setattr(fill, "_may_be_spread", may_be_spread)
    inits, mesh = [nnx.initializers.orthogonal(), tanh, of_another_dtype], grid()
    model, want = Several(lazy_linear, inits), Several(linear, inits)
    lm.materialize(model, X, mesh=mesh, rules=RULES)
    assert [place.spec for place in spread] == [P("data", "model")] * 3
    for name, array in arrays(model).items():
        twin = arrays(want)[name]
        assert_placed(array, mesh, by_pairs(RULES)(name), name)
        assert array.dtype == twin.dtype
        np.testing.assert_allclose(array.astype(np.float32), twin.astype(np.float32), rtol=1e-5, atol=1e-6)


def lazy_linear(**options):
    return lm.LazyLinear(16, **options)


def linear(**options):
    return nnx.Linear(8, 16, **options)


class ByHand(lm.LazyModuleMixin, nnx.Module):
    def __init__(self, rngs):
        self.w = lm.UninitializedParameter((None, 16), init=nnx.initializers.normal(), key=rngs.params())
        self.b = lm.UninitializedBuffer(out_sharding=("model",), note="kept")

    def initialize_parameters(self, x):
        self.w.materialize((x.shape[-1], 16))
        self.b.materialize((x.shape[-1],))
        self.inner = lm.LazyLinear(8, rngs=nnx.Rngs(3))

    def __call__(self, x):
        return self.inner(x @ self.w[...])


@pytest.mark.slow
def test_a_layer_written_by_hand_that_makes_others():
    mesh, key = grid(), nnx.Rngs(0).params()
    rules = [("^w", P("data", "model")), ("inner.kernel", P("data"))]
    model = ByHand(nnx.Rngs(0))
    before = contents(model)
    with pytest.raises(lm.LazyError, match=r"inner\.kernel"):
        lm.materialize(model, X, mesh=mesh, rules=[("inner.kernel", P("pipe"))])
    assert_unchanged(model, before)
    lm.materialize(model, X, mesh=mesh, rules=rules)
    want = nnx.Linear(16, 8, rngs=nnx.Rngs(3))
    values = {"w": nnx.initializers.normal()(key, (8, 16), jnp.float32), "b": np.zeros(8, np.float32)}
    values |= {f"inner.{name}": value for name, value in arrays(want).items()}
    places = {"w": P("data", "model"), "b": P("model"), "inner.kernel": P("data")}
    assert arrays(model).keys() == values.keys()
    for name, array in arrays(model).items():
        assert_placed(array, mesh, places.get(name, P()), name)
        np.testing.assert_array_equal(array, values[name])
    metadata = model.b.get_metadata()
    assert (metadata["out_sharding"], metadata["note"], metadata["eager_sharding"]) == (("model",), "kept", True)


@pytest.mark.slow
def test_what_is_ready_moves_and_random_state_stays():
    def make(lazy) -> Any:
        second = lazy_linear(rngs=nnx.Rngs(1)) if lazy else nnx.Linear(16, 16, rngs=nnx.Rngs(1))
        return nnx.Sequential(linear(rngs=nnx.Rngs(0)), second, nnx.Dropout(0.5, rngs=nnx.Rngs(2)))

    mesh, model, want = grid(), make(True), make(False)
    variable, key = model.layers[0].kernel, model.layers[2].rngs.key.get_value()
    lm.materialize(model, X, mesh=mesh, rules=RULES)
    assert_same_on_mesh(model, want, mesh, by_pairs(RULES))
    assert model.layers[0].kernel is variable
    assert model.layers[2].rngs.key.get_value() is key
    before = arrays(model)
    lm.materialize(model, X, mesh=mesh, rules=RULES)
    assert all(array is before[name] for name, array in arrays(model).items())
    other = mesh_of(d=8)
    lm.materialize(model, X, mesh=other, rules=[("kernel", P("d"))])
    assert_same_on_mesh(model, want, other, by_pairs([("kernel", P("d"))]))
    out = nnx.jit(lambda m, x: m.layers[0](x))(model, np.ones((2, 8), np.float32))
    np.testing.assert_allclose(out, want.layers[0](jnp.ones((2, 8))), rtol=1e-5)


class Kinds(nnx.Module):
    """Holds arrays in all ways that a state dict knows."""

    def __init__(self):
        self.layer = lm.LazyLinear(8, rngs=nnx.Rngs(0))
        self.reference = nnx.Param(jnp.arange(8.0), ref=True)
        self.pair = nnx.Variable((jnp.arange(16.0), jnp.ones(3)))
        self.plain = nnx.data(jnp.ones((8, 2)))
        self.of_numpy = nnx.data(np.ones(8))
        self.key = nnx.data(jax.random.key(0))
        self.cache = nnx.Cache(jnp.zeros(4))

    def __call__(self, x):
        return self.layer(x)


def test_whatever_holds_an_array():
    mesh, model = grid(), Kinds()
    of_numpy, key = model.of_numpy, model.key
    rules = [("reference|plain|of_numpy|key", P("data")), (r"pair\.0", P("model")), ("cache", P(None))]
    report = lm.materialize(model, X, mesh=mesh, rules=rules)
    got = lm.state_dict(model)
    want = {"reference": np.arange(8.0), "pair.0": np.arange(16.0), "pair.1": np.ones(3), "plain": np.ones((8, 2))}
    places = {"reference": P("data"), "pair.0": P("model"), "pair.1": P(), "plain": P("data")}
    for name, value in want.items():
        assert_placed(got[name], mesh, places[name], name)
        np.testing.assert_array_equal(got[name], value)
    assert_placed(model.cache.get_value(), mesh, P())
    assert model.of_numpy is of_numpy
    assert model.key is key
    assert {p.name for p in report.rows[0].parameters if p.sharding is None} == {"of_numpy", "key", "pair"}
    model.reference[0] = 5.0
    assert model.reference.get_value()[0] == 5


def test_a_model_without_values_notes_where_they_go():
    model = nnx.eval_shape(lambda: lazy_linear(rngs=nnx.Rngs(0)))
    lm.materialize(model, X, mesh=grid(), rules=RULES)
    for name, array in arrays(model).items():
        assert isinstance(array, jax.ShapeDtypeStruct)
        assert array.sharding == NamedSharding(grid(), by_pairs(RULES)(name))


@pytest.mark.parametrize("jit", [nnx.jit, lm.jit])
def test_a_mesh_inside_a_program_is_refused(jit):
    """It would be lost: there XLA decides where things go."""
    model = nnx.Sequential(lazy_linear(rngs=nnx.Rngs(0)))
    with pytest.raises(lm.ArgumentError, match="which is being traced"):
        jit(lambda m, x: lm.materialize(m, x, mesh=grid(), rules=RULES) and None)(model, np.ones((2, 8), np.float32))
    assert lm.is_lazy(model.layers[0])


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1])
def test_layers_that_vmap_has_stacked(axis):
    def stack(make):
        return nnx.split_rngs(splits=4)(nnx.vmap(make, in_axes=0, out_axes=axis))(nnx.Rngs(0))

    class Scanned(nnx.Module):
        def __init__(self, make):
            self.stack = stack(make)

        def __call__(self, x):
            return nnx.scan(lambda x, m: m(x), in_axes=(nnx.Carry, axis), out_axes=nnx.Carry)(x, self.stack)

    mesh, rules = grid(), [("stack.kernel", P(*[None] * axis, "data"))]
    model = Scanned(lambda rngs: lm.LazyLinear(8, rngs=rngs))
    lm.materialize(model, X, mesh=mesh, rules=rules)
    assert_same_on_mesh(model, Scanned(lambda rngs: nnx.Linear(8, 8, rngs=rngs)), mesh, by_pairs(rules))


CONTEXTS = {
    "rbg keys": lambda: lm.LazyLinear(16, rngs=nnx.Rngs(jax.random.key(0, impl="rbg"))),
    "bfloat16": lambda: lm.LazyLinear(16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)),
    "complex": lambda: lm.LazyLinear(16, param_dtype=jnp.complex64, rngs=nnx.Rngs(0)),
    "int8 mask": lambda: lm.LazyLinear(16, kernel_init=lambda k, s, d: jnp.ones(s, jnp.int8), rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("case", CONTEXTS)
def test_other_keys_and_dtypes(case):
    model = CONTEXTS[case]()
    want = CONTEXTS[case]()
    lm.materialize(want, spec(2, 8))  # on one device: as Flax's own, by the tests of one device
    lm.materialize(model, X, mesh=grid(), rules=RULES)
    assert_same_on_mesh(model, want, grid(), by_pairs(RULES))


@pytest.mark.parametrize("around", ["another mesh", "debug_nans", "jit", "init_backend"])
def test_in_other_contexts(around):
    model, mesh, given = lazy_linear(rngs=nnx.Rngs(0)), grid(), {"mesh": grid(), "rules": RULES}
    if around == "another mesh":
        with jax.set_mesh(mesh_of(d=8)):
            lm.materialize(model, X, **given)
    elif around == "debug_nans":
        with jax.debug_nans(True):
            lm.materialize(model, X, **given)
    elif around == "jit":
        jax.jit(lambda x: lm.materialize(model, x, **given) and None)(np.ones((2, 8), np.float32))
    else:
        lm.materialize(model, X, init_backend="cpu", **given)
    assert_same_on_mesh(model, linear(rngs=nnx.Rngs(0)), mesh, by_pairs(RULES))


@pytest.mark.parametrize(
    "metadata",
    [
        {}, {"out_sharding": ("data", None)}, {"out_sharding": ("data", None), "eager_sharding": False},
        {"out_sharding": ("m", None), "mesh": "other"},
    ],
)  # fmt: skip
def test_the_mesh_of_set_mesh_does_as_flax_does(metadata):
    if "mesh" in metadata:
        metadata = metadata | {"mesh": mesh_of(m=8)}
    with jax.set_mesh(grid()):
        want = linear(kernel_metadata=metadata, rngs=nnx.Rngs(0))
        model = lazy_linear(kernel_metadata=metadata, rngs=nnx.Rngs(0))
        lm.materialize(model, X)
    assert nnx.graphdef(model) == nnx.graphdef(want)
    for name, array in arrays(model).items():
        twin = arrays(want)[name]
        assert array.sharding.is_equivalent_to(twin.sharding, array.ndim), name
        np.testing.assert_array_equal(array, twin)


@pytest.mark.slow
@pytest.mark.parametrize("make", [lazy_linear, lambda rngs: ByHand(rngs)], ids=["layer", "by hand"])
def test_the_mesh_of_set_mesh_gets_parts_that_are_drawn_alone(make, monkeypatch):
    """Also from keys that were made in its context; nothing is computed as a whole by all of its devices."""
    drawn = []
    parts_of = fill.shards.parts_of
    monkeypatch.setattr(fill.shards, "parts_of", lambda i, *where: drawn.append(where[1]) or parts_of(i, *where))
    rules = [(r"^(kernel|w)$", P("data", "model")), ("^b$", P("model")), ("bias|inner", P())]
    with jax.set_mesh(grid()):
        model = make(rngs=nnx.Rngs(0))
        report = lm.materialize(model, X, rules=rules)
    with jax.set_mesh(mesh_of(d=8)):
        other = make(rngs=nnx.Rngs(0))
        jax.jit(lambda x: lm.materialize(other, x, mesh=grid(), rules=rules) and None)(np.ones((2, 8), np.float32))
    assert NamedSharding(grid(), P("data", "model")) in drawn
    assert not any(p.made_whole for row in report.rows for p in row.parameters)
    alone = make(rngs=nnx.Rngs(0))
    if isinstance(alone, ByHand):
        alone.b.set_metadata(out_sharding=None)
    lm.materialize(alone, X)
    for found in (model, other):
        for name, array in arrays(found).items():
            np.testing.assert_array_equal(array, arrays(alone)[name])
            assert_placed(array, grid(), by_pairs(rules)(name), name)


def test_rules_go_before_metadata_for_later():
    with jax.set_mesh(grid()):
        metadata = {"out_sharding": ("data", None), "eager_sharding": False}
        model: Any = nnx.Sequential(lazy_linear(kernel_metadata=metadata, rngs=nnx.Rngs(0)))
        lm.materialize(model, X, rules=[("kernel", P(None, "model"))])
    assert_placed(model.layers[0].kernel.get_value(), grid(), P(None, "model"))


def test_an_initializer_that_asks_for_the_mesh():
    def init(key, shape, dtype=jnp.float32):
        return jax.lax.with_sharding_constraint(jax.random.normal(key, shape, dtype), P("model"))

    with jax.set_mesh(grid()):
        model, want = (make(kernel_init=init, rngs=nnx.Rngs(0)) for make in (lazy_linear, linear))
        lm.materialize(model, X, rules=RULES)
    assert_same_on_mesh(model, want, grid(), by_pairs(RULES))


def test_a_placeholder_is_told_where_it_goes():
    model: Any = nnx.Sequential(lazy_linear(rngs=nnx.Rngs(0)))
    model.layers[0].kernel.set_metadata(out_sharding=("data", None))
    lm.materialize(model, X, mesh=grid())
    assert_placed(model.layers[0].kernel.get_value(), grid(), P("data"))


@pytest.mark.slow
def test_rules_see_a_tie_by_its_first_name_in_the_state_dict():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.body: Any = nnx.Sequential(lm.LazyLinear(8, use_bias=False, rngs=rngs))
            self.again = self.body.layers[0].kernel

        def __call__(self, x):
            return self.body(x)

    model, told = Tied(nnx.Rngs(0)), []
    assert list(lm.state_dict(model)) == ["body.layers.0.kernel", "again"]
    report = lm.materialize(model, X, mesh=grid(), rules=lambda name, *_: told.append(name) or P("data"))
    assert {*told} == {"body.layers.0.kernel"}
    assert_placed(model.again.get_value(), grid(), P("data"))
    assert report.total_bytes_per_device == 8 * 8 * 4 // 4


@pytest.mark.slow
def test_nothing_is_made_that_is_larger_than_a_part():
    before = live_bytes()
    model = lm.LazyLinear(4096, rngs=nnx.Rngs(0))
    lm.materialize(model, spec(1, 1024), mesh=mesh_of(d=8), rules=[("", P("d"))])
    made = [size for name, size in live_bytes().items() if name not in before]
    assert max(made) == 1024 * 4096 * 4 // 8


def test_shapes_add_no_programs():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    for width in (24, 40):
        layers = [lm.LazyLinear(width + 8 * i, rngs=nnx.Rngs(i)) for i in range(6)]
        lm.materialize(nnx.Sequential(*layers), spec(1, width), mesh=grid(), rules=RULES)
        assert len(compiled) <= 6
    model = nnx.Sequential(*(lm.LazyLinear(600 + 8 * i, rngs=nnx.Rngs(i)) for i in range(6)))
    lm.materialize(model, spec(1, 800), mesh=grid(), rules=RULES)  # large ones have programs of their own
    assert len(compiled) <= 12


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rules": RULES}, "rules without a mesh"),
        ({"mesh": AbstractMesh((8,), ("d",))}, "an AbstractMesh"),
        ({"mesh": "a mesh"}, "a str"),
        ({"mesh": "grid", "rules": 5}, r"rules=\n  got:    5\n  needed: a list of"),
        ({"mesh": jax.sharding.Mesh(np.empty(0), ("d",))}, "an empty mesh"),
        ({"mesh": "grid", "device": "first"}, "both mesh= and device="),
    ],
)
def test_arguments_that_are_refused(given, words):
    real = {"grid": grid(), "first": jax.devices()[0]}
    given = {name: real.get(value, value) if isinstance(value, str) else value for name, value in given.items()}
    model = lazy_linear(rngs=nnx.Rngs(0))
    with pytest.raises(lm.LazyError, match=words):
        lm.materialize(model, X, **given)
    assert lm.is_lazy(model)


def test_a_rule_that_raises_leaves_the_model():
    def raising(name: str, shape: tuple[int, ...], dtype: Any) -> P:
        raise ZeroDivisionError

    model = nnx.Sequential(lazy_linear(rngs=nnx.Rngs(0)))
    before = contents(model)
    with pytest.raises(ZeroDivisionError):
        lm.materialize(model, X, mesh=grid(), rules=raising)
    assert_unchanged(model, before)


@pytest.mark.slow
def test_all_splits_of_a_convolution():
    mesh = mesh_of(a=2, b=2, c=2)
    want = nnx.Conv(8, 16, (4, 2), rngs=nnx.Rngs(0))
    splits = [s for s in itertools.product(["a", "b", None], repeat=4) if all(s.count(n) <= 1 for n in "ab")]
    for split in splits:
        model = lm.LazyConv(16, (4, 2), rngs=nnx.Rngs(0))
        lm.materialize(model, spec(1, 6, 6, 8), mesh=mesh, rules=[("kernel", P(*split))])
        assert_same_on_mesh(model, want, mesh, by_pairs([("kernel", P(*split))]))


def test_metadata_of_a_mesh_that_is_not_meant():
    """``mesh=`` wins over the mesh of a sharding in the metadata."""
    metadata = {"out_sharding": NamedSharding(mesh_of(model=2), P(None, "model"))}
    model: Any = nnx.Sequential(lazy_linear(kernel_metadata=metadata, rngs=nnx.Rngs(0)))
    lm.materialize(model, X, mesh=grid())
    assert_placed(model.layers[0].kernel.get_value(), grid(), P(None, "model"))
