"""Random nested models, written twice: without input sizes, and with them. Whatever sizes the first, they are equal.

A model is drawn as a tree of :class:`Part` objects, whose shapes are known. :class:`Model` builds it, lazily or
explicitly, from nested modules, sequences, lists and dicts, with layers that are used twice and parameters that are
shared.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import array, assert_same_bits, assert_same_model, spec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lazymods as lm

Shape = tuple[int, int, int]  # (batch, length, features)
few = settings(max_examples=15, derandomize=True, deadline=None, database=None,
               suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


# ---------------------------------------------------------------- what there is to draw


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of a model.

    Attributes:
        kind: The name of a layer, of a function, or of a container.
        shape: The shape of its input.
        options: Arguments of the layer.
        parts: What a container holds.
    """

    kind: str
    shape: Shape
    options: tuple[tuple[str, Any], ...] = ()
    parts: tuple["Part", ...] = ()


def wide(lazy: Any, explicit: Any) -> Callable[..., Any]:
    """A layer whose explicit twin takes the number of input features first."""

    def make(width: int | None, rngs: nnx.Rngs, **options: Any) -> Any:
        return lazy(**options, rngs=rngs) if width is None else explicit(width, **options, rngs=rngs)

    return make


def recurrent(width: int | None, rngs: nnx.Rngs, hidden_features: int) -> Any:
    if width is None:
        return nnx.RNN(lm.LazyGRUCell(hidden_features, rngs=rngs))
    return nnx.RNN(nnx.GRUCell(width, hidden_features, rngs=rngs))


def attention(width: int | None, rngs: nnx.Rngs, **options: Any) -> Any:
    if width is None:
        return lm.LazyMultiHeadAttention(**options, decode=False, rngs=rngs)
    return nnx.MultiHeadAttention(in_features=width, **options, decode=False, rngs=rngs)


def einsum(width: int | None, rngs: nnx.Rngs, f: int) -> Any:
    if width is None:
        return lm.LazyEinsum("bld,df->blf", sizes={"f": f}, bias_shape=(f,), rngs=rngs)
    return nnx.Einsum("bld,df->blf", (width, f), (f,), rngs=rngs)


def spectral(width: int | None, rngs: nnx.Rngs, out_features: int) -> Any:
    if width is None:
        return lm.LazySpectralNorm(lm.LazyLinear(out_features, rngs=rngs), rngs=rngs)
    return nnx.SpectralNorm(nnx.Linear(width, out_features, rngs=rngs), rngs=rngs)


LAYERS: dict[str, Callable[..., Any]] = {
    "linear": wide(lm.LazyLinear, nnx.Linear),
    "general": wide(lm.LazyLinearGeneral, nnx.LinearGeneral),
    "einsum": einsum,
    "conv": wide(lm.LazyConv, nnx.Conv),
    "transpose": wide(lm.LazyConvTranspose, nnx.ConvTranspose),
    "batch": wide(lm.LazyBatchNorm, nnx.BatchNorm),
    "layer": wide(lm.LazyLayerNorm, nnx.LayerNorm),
    "rms": wide(lm.LazyRMSNorm, nnx.RMSNorm),
    "group": wide(lm.LazyGroupNorm, nnx.GroupNorm),
    "instance": wide(lm.LazyInstanceNorm, nnx.InstanceNorm),
    "lora": wide(lm.LazyLoRALinear, nnx.LoRALinear),
    "attention": attention,
    "recurrent": recurrent,
    "spectral": spectral,
}
WIDTH_OF = {"recurrent": "hidden_features", "einsum": "f"}
KEEP_WIDTH = ("batch", "layer", "rms", "group", "instance", "attention")
FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "halve": lambda x: x * 0.5,
    "swap": lambda x: jnp.swapaxes(x, 1, 2),
    "unfold": lambda x: jnp.reshape(x, (x.shape[0], x.shape[1] * 2, x.shape[2] // 2)),
    "join": lambda x: jnp.concatenate([x, x], axis=-1),
}


def out_shape(part: Part) -> Shape:
    """The shape of a part's output."""
    batch, length, width = part.shape
    options = dict(part.options)
    if part.kind == "swap":
        return batch, width, length
    if part.kind == "unfold":
        return batch, length * 2, width // 2
    if part.kind == "join":
        return batch, length, width * 2
    if part.parts:
        return out_shape(part.parts[-1]) if part.kind in ("chain", "list", "dict") else part.shape
    if part.kind in LAYERS and part.kind not in KEEP_WIDTH:
        return batch, length, options[WIDTH_OF.get(part.kind, "out_features")]
    return part.shape


@st.composite
def layers(draw: Any, shape: Shape, width: int | None = None) -> Part:
    """A layer; of as many output features as asked for."""
    kinds = [k for k in LAYERS if width is None or k not in KEEP_WIDTH]
    kind = draw(st.sampled_from(kinds))
    options: dict[str, Any] = {}
    if kind not in KEEP_WIDTH:
        options[WIDTH_OF.get(kind, "out_features")] = draw(st.sampled_from([2, 4])) if width is None else width
    if kind in ("conv", "transpose"):
        options["kernel_size"] = (draw(st.sampled_from([1, 3])),)
    if kind in ("linear", "conv", "layer", "lora"):
        options["use_bias"] = draw(st.booleans())
    if kind == "batch":
        options["use_running_average"] = draw(st.booleans())
    if kind == "group":
        options["num_groups"] = 1 if shape[-1] % 2 else draw(st.sampled_from([1, 2]))
    if kind == "attention":
        options["num_heads"] = 1 if shape[-1] % 2 else draw(st.sampled_from([1, 2]))
    if kind == "lora":
        options["lora_rank"] = 2
    return Part(kind, shape, tuple(options.items()))


@st.composite
def chains(draw: Any, shape: Shape, depth: int) -> Part:
    """Parts one after the other, in some container."""
    parts: list[Part] = []
    for _ in range(draw(st.integers(1, 3))):
        kinds = ["layer", "layer", "function", "twice", "tied"] + ["chain", "residual"] * (depth > 0)
        kind = draw(st.sampled_from(kinds))
        if kind == "layer":
            part = draw(layers(shape))
        elif kind == "function":
            names = [n for n in FUNCTIONS if n not in ("unfold", "join")]
            names += ["unfold"] * (shape[2] % 2 == 0 and shape[1] <= 4) + ["join"] * (shape[2] <= 4)
            part = Part(draw(st.sampled_from(names)), shape)
        elif kind == "twice":  # one layer, used two times
            part = Part("twice", shape, parts=(draw(layers(shape, width=shape[-1])),))
        elif kind == "tied":  # two layers, one kernel
            part = Part("tied", shape, parts=(Part("linear", shape, (("out_features", shape[-1]),)),) * 2)
        elif kind == "residual":
            inner = draw(chains(shape, depth - 1))
            back = Part("linear", out_shape(inner), (("out_features", shape[-1]),))
            part = Part("residual", shape, parts=(inner, back)) if out_shape(inner)[:2] == shape[:2] else inner
        else:
            part = draw(chains(shape, depth - 1))
        parts.append(part)
        shape = out_shape(part)
    return Part(draw(st.sampled_from(["chain", "list", "dict"])), parts[0].shape, parts=tuple(parts))


models = st.sampled_from([(2, 3, 4), (2, 4, 2), (2, 2, 3)]).flatmap(lambda shape: chains(shape, 2))


# ---------------------------------------------------------------- the models


class Model(nnx.Module):
    """A part with what it holds, built lazily or explicitly; both in the same order, from the same rngs."""

    def __init__(self, part: Part, *, lazy: bool, rngs: nnx.Rngs) -> None:
        self.kind = part.kind
        self.inner: Any
        made = [build(p, lazy=lazy, rngs=rngs) for p in part.parts]
        if part.kind == "chain":
            self.inner = nnx.Sequential(*made)
        elif part.kind == "dict":
            self.inner = nnx.Dict({f"part_{i}": m for i, m in enumerate(made) if isinstance(m, nnx.Module)})
            self.order = [f"part_{i}" if isinstance(m, nnx.Module) else m for i, m in enumerate(made)]
        elif part.kind == "tied":
            first, second = made
            second.kernel = first.kernel
            self.first, self.second = first, second
        elif part.kind == "residual":
            self.inner, self.back = made
        else:
            self.inner = nnx.List(made)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.kind == "chain":
            return self.inner(x)
        if self.kind == "tied":
            return self.second(self.first(x))
        if self.kind == "residual":
            return x + self.back(self.inner(x))
        if self.kind == "twice":
            return self.inner[0](self.inner[0](x))
        steps = [self.inner[s] if isinstance(s, str) else s for s in self.order] if self.kind == "dict" else self.inner
        for step in steps:
            x = step(x)
        return x


def build(part: Part, *, lazy: bool, rngs: nnx.Rngs) -> Any:
    """Make a part."""
    if part.parts:
        return Model(part, lazy=lazy, rngs=rngs)
    if part.kind in FUNCTIONS:
        return FUNCTIONS[part.kind]
    return LAYERS[part.kind](None if lazy else part.shape[-1], rngs, **dict(part.options))


def twins(part: Part) -> tuple[Any, Any]:
    """The model in its two spellings."""
    return tuple(build(part, lazy=lazy, rngs=nnx.Rngs(0)) for lazy in (True, False))  # type: ignore[return-value]


def leaves(part: Part, model: Any) -> list[tuple[Part, Any]]:
    """Every layer with its part, in definition order; one that is shared once."""
    if part.kind in FUNCTIONS:
        return []
    if not part.parts:
        return [(part, model)]
    if part.kind == "tied":
        held = [model.first, model.second]
    elif part.kind == "residual":
        held = [model.inner, model.back]
    elif part.kind == "dict":
        held = [model.inner[s] if isinstance(s, str) else s for s in model.order]
    else:
        held = list(model.inner.layers if part.kind == "chain" else model.inner)
    return [leaf for p, m in zip(part.parts, held, strict=True) for leaf in leaves(p, m)]


# ---------------------------------------------------------------- the laws


@pytest.mark.slow
@few
@given(models)
def test_first_call_equals_explicit(part: Part) -> None:
    lazy, want = twins(part)
    for seed in (0, 1):
        x = array(*part.shape, seed=seed)
        assert_same_bits(lazy(x), want(x))
        assert_same_model(lazy, want)


@pytest.mark.slow
@few
@given(models)
def test_infer_shapes_then_materialize_equals_explicit(part: Part) -> None:
    lazy, want = twins(part)
    before = repr(lazy), nnx.graphdef(lazy), lm.uninitialized_paths(lazy)
    report = lm.infer_shapes(lazy, spec(*part.shape))
    assert (repr(lazy), nnx.graphdef(lazy), lm.uninitialized_paths(lazy)) == before
    assert report.output == spec(*out_shape(part))
    assert report.total_parameters == sum(v.size for v in jax.tree.leaves(what_files_hold(want)))
    assert not lm.materialize(lazy, spec(*part.shape)).unreached
    assert_same_model(lazy, want)
    assert_same_bits(lazy(array(*part.shape)), want(array(*part.shape)))


@pytest.mark.slow
@few
@given(models)
def test_load_equals_explicit(part: Part) -> None:
    lazy, want = twins(part)
    nnx.update(want, other_values(what_files_hold(want)))
    assert lm.load_state_dict(lazy, lm.state_dict(want)).unexpected == []
    lm.materialize(lazy, spec(*part.shape))  # layers that a file has nothing for
    assert_same_model(lazy, want)
    assert_same_bits(lazy(array(*part.shape)), want(array(*part.shape)))


def what_files_hold(model: Any) -> Any:
    """Parameters, statistics and raw arrays, without random state; what is shared once."""
    return nnx.state(model, nnx.Not(nnx.RngState))


def other_values(state: Any) -> Any:
    """Numbers that no initializer makes."""
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda a: jnp.asarray(rng.uniform(0.5, 1.5, a.shape), a.dtype), state)


def name(path: Any) -> str:
    """The name of an entry."""
    return ".".join(name(p) if isinstance(p, tuple) else str(p) for p in path)


def by_call(lazy: Any, want: Any, part: Part, _: st.DataObject) -> None:
    x = array(*part.shape, seed=5)
    assert_same_bits(lazy(x), want(x))


def by_spec(lazy: Any, want: Any, part: Part, _: st.DataObject) -> None:
    lm.materialize(lazy, spec(*part.shape))


def by_load(lazy: Any, want: Any, part: Part, _: st.DataObject) -> None:
    nnx.update(want, other_values(what_files_hold(want)))
    lm.load_state_dict(lazy, lm.state_dict(want))


def by_partial_load(lazy: Any, want: Any, part: Part, data: st.DataObject) -> None:
    """Some entries from a file; the others are initialized, at the sizes that those tell, by the first call."""
    flat = nnx.to_flat_state(other_values(what_files_hold(want)))
    chosen = [(path, v) for path, v in flat if data.draw(st.booleans(), label=name(path))]
    nnx.update(want, nnx.from_flat_state(chosen))
    entries = lm.state_dict(want)
    result = lm.load_state_dict(lazy, {name(p): entries[name(p)] for p, _ in chosen}, strict=False)
    assert result.unexpected == []


WAYS = {"call": by_call, "spec": by_spec, "load": by_load, "partial load": by_partial_load}


@pytest.mark.slow
@few
@given(models, st.data())
def test_layers_sized_in_any_order_and_way_equal_explicit(part: Part, data: st.DataObject) -> None:
    lazy, want = twins(part)
    pairs = list(zip(leaves(part, lazy), leaves(part, want), strict=True))
    for i in data.draw(st.permutations(range(len(pairs))), label="order"):
        (leaf, lazy_layer), (_, layer) = pairs[i]
        way = data.draw(st.sampled_from([*WAYS, "leave"]), label=f"{i} ({leaf.kind})")
        if way != "leave":
            WAYS[way](lazy_layer, layer, leaf, data)
    assert_same_bits(lazy(array(*part.shape)), want(array(*part.shape)))
    assert_same_model(lazy, want)
