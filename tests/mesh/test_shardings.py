"""Where a parameter goes: by rules, by its metadata, or a copy on each device; and what does not fit."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding
from on_mesh import P, mesh_of

import lazymods as lm
from lazymods._shardings import Named, find_shardings, mesh_for

POD = AbstractMesh((4, 2), ("data", "model"))


def kernel(name="fc.kernel", shape=(8, 4), **metadata):
    return Named(name, shape, jnp.dtype(jnp.float32), metadata)


def specs(*parameters, rules=None, mesh=POD):
    found = find_shardings(parameters, mesh, rules)
    assert all(isinstance(s, NamedSharding) and s.mesh == mesh for s in found.values())
    return {name: s.spec for name, s in found.items()}


def test_without_rules_and_metadata_a_copy_is_on_each_device():
    assert specs(kernel(), kernel("fc.bias", (4,))) == {"fc.kernel": P(), "fc.bias": P()}


@pytest.mark.parametrize(
    ("rules", "spec"),
    [
        ([("kernel", P("data")), ("fc", P("model"))], P("data")),
        ([("fc", P("model")), ("kernel", P("data"))], P("model")),
        ([("^kernel", P("data")), (r"c\.k", P(None, "model"))], P(None, "model")),
        ([(re.compile("KERNEL", re.IGNORECASE), P("data"))], P("data")),
        ((("other", P("data")),), P()),
        ([], P()),
        ([["kernel$", P(("data", "model"))]], P(("data", "model"))),
        (lambda *told: P(None, "model") if told == ("fc.kernel", (8, 4), jnp.float32) else P(), P(None, "model")),
        (lambda name, shape, dtype: None, P()),
    ],
)
def test_rules(rules, spec):
    assert specs(kernel(), rules=rules) == {"fc.kernel": spec}


@pytest.mark.parametrize(
    "metadata",
    [
        {"out_sharding": (None, "model")},
        {"out_sharding": P(None, "model")},
        {"out_sharding": ("in", "mlp"), "sharding_rules": (("in", None), ("mlp", "model"))},
        {"out_sharding": NamedSharding(AbstractMesh((1, 2), ("other", "model")), P(None, "model"))},
    ],
)
def test_metadata(metadata):
    assert specs(kernel(**metadata)) == {"fc.kernel": P(None, "model")}
    assert specs(kernel(**metadata), rules=[("kernel", P("data"))]) == {"fc.kernel": P("data")}
    assert specs(kernel(**metadata), rules=[("kernel", P())]) == {"fc.kernel": P()}


def test_logical_names_of_the_context():
    with nnx.logical_axis_rules((("embed", "data"), ("mlp", None))):
        assert specs(kernel(out_sharding=("embed", "mlp"))) == {"fc.kernel": P("data", None)}


def test_all_that_does_not_fit_is_told_at_once():
    rules = [
        ("a", P("pipe", "tensor")), ("b", P("data", "model", None)), ("c", P("data")), ("d", P(("data", "model"))),
        ("e", P("model", "model")),
    ]  # fmt: skip
    parameters = [kernel("a"), kernel("b"), kernel("c", (6, 4)), kernel("d", (4, 8)), kernel("e"), kernel("good")]
    with pytest.raises(lm.LazyError) as error:
        find_shardings(parameters, POD, rules)
    text = str(error.value)
    for part in (
        "the mesh has no axis 'pipe'", "the mesh has no axis 'tensor'", "the spec has 3 axes, the parameter 2",
        "6 is not divisible by 4", "4 is not divisible by 8", "the axis 'model' is named 2 times",
    ):  # fmt: skip
        assert part in text, part
    assert "good" not in text


def test_which_mesh():
    mesh, other = mesh_of(data=4, model=2), mesh_of(d=8)
    assert mesh_for(None, None) is None
    assert mesh_for(mesh, None) is mesh
    with jax.set_mesh(other):
        assert mesh_for(None, []) == other
        assert mesh_for(mesh, None) is mesh
        assert mesh_for(None, None, device=jax.devices()[1]) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None, [("kernel", P())]), "rules without a mesh"),
        ((POD, None, "a device"), "both mesh= and device="),
        (("cpu", None), "a str"),
    ],
)
def test_arguments_that_do_not_go_together(arguments, words):
    with pytest.raises(lm.LazyError, match=words):
        mesh_for(*arguments)


@pytest.mark.parametrize(
    "rules", ["kernel", {"kernel": P()}, [("kernel", "data")], [(P(), "kernel")], [("kernel", P(), 1)], [("(", P())]]
)
def test_what_is_no_rule(rules):
    with pytest.raises(lm.LazyError):
        specs(kernel(), rules=rules)


def test_a_function_that_gives_no_spec():
    with pytest.raises(lm.LazyError, match=r"fc\.kernel"):
        specs(kernel(), rules=lambda name, shape, dtype: "data")
