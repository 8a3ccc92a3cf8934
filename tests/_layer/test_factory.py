"""``lm.lazy`` on classes that lazymods has never seen: each becomes what its own constructor would have made."""

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import ON_CPU, array, assert_same_array, assert_same_bits, assert_same_model, raw, spec

import lazymods as lm


def width(config: Mapping[str, Any], x: Any, **_: Any) -> dict[str, int]:
    return {"n": x.shape[-1]}


def squash(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


class Draws(nnx.Module):
    """Draws its values itself, without initializers, and in an order of its own."""

    def __init__(self, n: int, m: int = 2, *, rngs: nnx.Rngs):
        self.late = nnx.Param(0.1 * jax.random.normal(rngs.params(), (n, m)))
        self.noise = nnx.Variable(jax.random.uniform(rngs.noise(), (n,), minval=-1.0, maxval=1.0))
        key = jax.random.split(rngs.params(), 3)[1]
        self.tail = nnx.Param(jax.random.truncated_normal(key, -2.0, 2.0, (m,)) * jnp.sqrt(jnp.float32(n)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x * jnp.broadcast_to(self.noise[...], x.shape)) @ self.late[...]


class KeepsRngs(nnx.Module):
    """Keeps the rngs that it was given, a stream of them, and a fork."""

    def __init__(self, n: int, *, rngs: nnx.Rngs):
        self.fc = nnx.Linear(n, 3, rngs=rngs)
        self.rngs = rngs
        self.own = rngs.dropout.fork()
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.fc(x)) + jax.random.normal(self.rngs.noise(), (x.shape[0], 3))


class Nested(nnx.Module):
    """Submodules in every container, and containers in containers."""

    def __init__(self, n: int, depth: int = 2, *, rngs: nnx.Rngs):
        self.blocks = nnx.List([nnx.Linear(n, n, rngs=rngs) for _ in range(depth)])
        self.heads: Any = nnx.Dict(a=nnx.Linear(n, 2, rngs=rngs), b=nnx.Dict(c=nnx.LayerNorm(n, rngs=rngs)))
        self.seq = nnx.Sequential(nnx.Linear(n, n + 1, rngs=rngs), squash)
        self.names = ["left", {"right": n}]

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return jnp.concatenate([self.heads.a(self.heads.b.c(x)), self.seq(x)], -1)


class RawArrays(nnx.Module):
    """Holds arrays without Variables, constants of its size, and lists of them."""

    def __init__(self, n: int, *, rngs: nnx.Rngs):
        self.table = nnx.data(jax.random.normal(rngs.params(), (n,)))
        self.position = nnx.data(jnp.arange(n, dtype=jnp.float32) / n)
        self.pair = nnx.data([jnp.ones(n), jnp.zeros((2, n))])
        self.fixed = nnx.data(jnp.eye(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jnp.broadcast_to(self.table + self.position + self.pair[0], x.shape)


class Shares(nnx.Module):
    """One submodule under two names, one parameter in two submodules."""

    def __init__(self, n: int, *, rngs: nnx.Rngs):
        self.a = nnx.Linear(n, n, rngs=rngs)
        self.b = self.a
        self.c = nnx.Linear(n, n, rngs=rngs)
        self.c.kernel = self.a.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.c(self.b(self.a(x)))


class Squares(nnx.Module):
    """Sizes that are no affine function of the argument."""

    def __init__(self, n: int, *, rngs: nnx.Rngs):
        self.w = nnx.Param(nnx.initializers.normal()(rngs.params(), (n * n, n // 2 + 1), jnp.float32))
        self.m = n * n

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], -1) @ self.w[...]


class Branches(nnx.Module):
    """What it holds depends on how large it is."""

    def __init__(self, n: int, *, rngs: nnx.Rngs):
        self.wide = n > 8
        if n > 8:
            self.down = nnx.Linear(n, 8, rngs=rngs)
        self.fc = nnx.Linear(min(n, 8), 3, use_bias=n % 2 == 0, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(self.down(x) if self.wide else x)


class Stacks(nnx.Module):
    """Layers stacked by nnx.vmap, from keys that the constructor splits."""

    def __init__(self, n: int, *, rngs: nnx.Rngs):
        self.layers = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: nnx.Linear(n, n, rngs=rngs)))(rngs)
        keys = rngs.noise.split(3).key.get_value()
        self.noise = nnx.Variable(jax.vmap(lambda key: jax.random.normal(key, (n,)))(keys))

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.scan(lambda m, x: m(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


class Ranks(nnx.Module):
    """A parameter whose number of axes depends on its size."""

    def __init__(self, n: int, *, rngs: nnx.Rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (n,) if n < 10 else (n, 2)))
        self.b = nnx.Param(jnp.zeros(n))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jnp.broadcast_to(self.b[...], x.shape) + self.w[...].sum()


@nnx.dataclass
class Record(nnx.Module):
    """A dataclass whose fields are its constructor."""

    n: int
    scale: float = 2.0
    w: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.w = nnx.Param(jnp.full((self.n,), self.scale))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jnp.broadcast_to(self.w[...], x.shape)


class NoPytree(nnx.Module, pytree=False):
    """Not a JAX pytree."""

    def __init__(self, n: int, *, rngs: nnx.Rngs):
        self.fc = nnx.Linear(n, 3, rngs=rngs)
        self.n = n

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x)


class KeywordOnly(nnx.Module):
    """Required arguments by keyword, one inferred in the middle of those that are not."""

    def __init__(self, first: int, n: int, /, last: int = 5, *, gain: float, rngs: nnx.Rngs):
        self.w = nnx.Param(nnx.initializers.normal()(rngs.params(), (n, first + last), jnp.float32))
        self.gain = gain

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.gain * x @ self.w[...]


class NoRngs(nnx.Module):
    """Takes no rngs at all."""

    def __init__(self, n: int):
        self.w = nnx.Param(jnp.linspace(0.0, 1.0, n))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jnp.broadcast_to(self.w[...], x.shape)


class Stats(nnx.Module):
    """Statistics, a counter and a cache beside the parameters."""

    def __init__(self, n: int, *, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(n, rngs=rngs)
        self.seen = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.last = nnx.Cache(jnp.zeros((n,), jnp.bfloat16))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x)


class TwoSizes(nnx.Module):
    """Two arguments to infer, one a tuple."""

    def __init__(self, n: int, shape: tuple[int, int], *, rngs: nnx.Rngs):
        self.a = nnx.Linear(n, 2, rngs=rngs)
        self.w = nnx.Param(nnx.initializers.normal()(rngs.params(), (*shape, n + shape[0]), jnp.float32))

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return self.a(x).sum() + self.w[...].sum() + y.sum()


def two_sizes(config: Mapping[str, Any], x: Any, y: Any) -> dict[str, Any]:
    return {"n": x.shape[-1], "shape": y.shape}


class Third(NamedTuple):
    """A third-party class, how it is inferred, its other arguments, and the inputs of its first call."""

    cls: type
    infer: Callable[..., dict[str, Any]]
    given: dict[str, Any]
    inferred: dict[str, Any]
    inputs: tuple[Any, ...]
    takes_rngs: bool = True

    def lazy(self) -> Any:
        return lm.lazy(self.cls, infer=self.infer)(**self.given, **self._rngs())

    def explicit(self, seed: int = 0, **inferred: Any) -> Any:
        return self.cls(**self.given, **self.inferred, **inferred, **self._rngs(seed))

    def _rngs(self, seed: int = 0) -> dict[str, Any]:
        return {"rngs": nnx.Rngs(seed, noise=7, dropout=8)} if self.takes_rngs else {}


X = array(4, 6)
THIRD = {
    "draws": Third(Draws, width, {"m": 3}, {"n": 6}, (X,)),
    "keeps-rngs": Third(KeepsRngs, width, {}, {"n": 6}, (X,)),
    "nested": Third(Nested, width, {"depth": 3}, {"n": 6}, (X,)),
    "raw-arrays": Third(RawArrays, width, {}, {"n": 6}, (X,)),
    "shares": Third(Shares, width, {}, {"n": 6}, (X,)),
    "squares": Third(Squares, width, {}, {"n": 6}, (X,)),
    "branches-small": Third(Branches, width, {}, {"n": 6}, (X,)),
    "branches-odd": Third(Branches, width, {}, {"n": 5}, (array(4, 5),)),
    "branches-wide": Third(Branches, width, {}, {"n": 11}, (array(4, 11),)),
    "stacks": Third(Stacks, width, {}, {"n": 6}, (X,)),
    "ranks-one": Third(Ranks, width, {}, {"n": 6}, (X,)),
    "ranks-two": Third(Ranks, width, {}, {"n": 11}, (array(4, 11),)),
    "dataclass": Third(Record, width, {"scale": 3.0}, {"n": 6}, (X,), takes_rngs=False),
    "no-pytree": Third(NoPytree, width, {}, {"n": 6}, (X,)),
    "no-rngs": Third(NoRngs, width, {}, {"n": 6}, (X,), takes_rngs=False),
    "stats": Third(Stats, width, {}, {"n": 6}, (X,)),
    "two-sizes": Third(TwoSizes, two_sizes, {}, {"n": 6, "shape": (2, 3)}, (X, array(2, 3))),
}


def assert_same(got: Any, want: Any) -> None:
    """The same model, raw arrays and attributes included."""
    assert_same_model(got, want)
    assert lm.uninitialized_paths(got) == [] and not lm.is_lazy(got)
    a, b = (lm.state_dict(m, include_rng=True) for m in (got, want))
    assert list(a) == list(b)
    for name in a:
        assert raw(a[name]).tobytes() == raw(b[name]).tobytes(), name


WAYS: dict[str, Callable[..., Any]] = {
    "call": lambda m, *x: m(*x),
    "materialize": lambda m, *x: lm.materialize(m, *jax.tree.map(lambda a: spec(*a.shape), x)) and m(*x),
    "nnx.jit": lambda m, *x: nnx.jit(lambda m, *x: m(*x))(m, *x),
    "vmap": lambda m, *x: jax.vmap(lambda _: m(*x))(jnp.zeros(1))[0],
}
# Their forward changes rngs or statistics, or hands itself to an nnx transform: no closure of a JAX transform.
MUTATES = ("keeps-rngs", "stats", "stacks")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", THIRD)
def test_becomes_what_the_constructor_makes(name: str, way: Callable[..., Any]) -> None:
    third = THIRD[name]
    if way is WAYS["vmap"] and name in MUTATES:
        with pytest.raises(Exception, match="trace"):
            way(third.explicit(), *third.inputs)
        return
    lazy, want = third.lazy(), third.explicit()
    got, expected = way(lazy, *third.inputs), want(*third.inputs)
    if way is WAYS["call"]:
        assert_same_bits(got, expected)
        assert_same(lazy, want)
    else:
        rounding = 1e-5 if ON_CPU else 1e-3  # an accelerator's matrix units round to tf32
        np.testing.assert_allclose(got, expected, rtol=rounding, atol=rounding / 10)
        assert type(lazy) is type(want) and nnx.graphdef(lazy) == nnx.graphdef(want)
        fresh, params = (dict(nnx.to_flat_state(nnx.state(m, nnx.Param))) for m in (want, lazy))
        for path in fresh:
            assert_same_array(raw(params[path]), raw(fresh[path]), path)


@pytest.mark.slow
@pytest.mark.parametrize("copier", [copy.deepcopy, nnx.clone, lambda m: nnx.merge(*nnx.split(m), copy=True),
                                    lambda m: pickle.loads(pickle.dumps(m))],
                         ids=["deepcopy", "clone", "split-merge", "pickle"])
@pytest.mark.parametrize("third", THIRD.values(), ids=THIRD)
def test_copies(third: Third, copier: Callable[[Any], Any]) -> None:
    lazy, want = third.lazy(), third.explicit()
    twin = copier(lazy)
    before = lm.uninitialized_paths(lazy)
    assert sorted(lm.uninitialized_paths(twin)) == sorted(before)
    assert_same_bits(twin(*third.inputs), want(*third.inputs))
    assert_same_model(twin, want)
    assert lm.is_lazy(lazy) and lm.uninitialized_paths(lazy) == before


# `squares` and `branches` have sizes that do not follow from the shapes of their entries by a formula
LOADS = [name for name in THIRD if name not in ("squares", "branches-small", "branches-odd", "branches-wide")]


@pytest.mark.parametrize("name", LOADS)
def test_a_load_reads_the_sizes_back(name: str) -> None:
    third = THIRD[name]
    lazy, want = third.lazy(), third.explicit(seed=5 if third.takes_rngs else 0)
    lm.load_state_dict(lazy, lm.state_dict(want, include_rng=True))
    assert_same(lazy, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["squares", "branches-small", "branches-odd", "branches-wide"])
def test_a_load_whose_sizes_do_not_follow_is_finished_by_the_first_call(name: str) -> None:
    third = THIRD[name]
    lazy, want = third.lazy(), third.explicit(seed=5)
    lm.load_state_dict(lazy, lm.state_dict(want, include_rng=True), strict=False)
    lazy(*third.inputs)
    loaded, whole = lm.state_dict(lazy), lm.state_dict(want)
    assert list(loaded) == list(whole)
    for key in ("w", "fc.kernel"):
        if key in whole:
            assert raw(loaded[key]).tobytes() == raw(whole[key]).tobytes()
    assert type(lazy) is type(want) and nnx.graphdef(lazy) == nnx.graphdef(want)


def test_only_unknown_axes_are_unknown() -> None:
    shapes = {name: v.pending.shape for name, v in lm.state_dict(THIRD["nested"].lazy()).items()}
    assert shapes["blocks.0.kernel"] == (None, None) and shapes["heads.a.kernel"] == (None, 2)
    assert shapes["heads.a.bias"] == (2,) and shapes["seq.layers.0.bias"] == (None,)
    squares = THIRD["squares"].lazy()
    assert squares.w.shape == (None, None)


def test_no_size_is_known_by_chance() -> None:
    """The probes themselves must not show: every static attribute that depends on a size is pending."""
    lazy = THIRD["nested"].lazy()
    for holder, name in ((lazy, "names"), (lazy.blocks[0], "in_features"), (lazy.heads.b.c, "num_features")):
        assert name not in vars(holder)


@pytest.mark.slow
def test_rngs_are_drawn_where_the_constructor_draws() -> None:
    for third in THIRD.values():
        if third.takes_rngs:
            lazily, plainly = (nnx.Rngs(0, noise=7, dropout=8) for _ in range(2))
            lm.lazy(third.cls, infer=third.infer)(**third.given, rngs=lazily)
            third.cls(**third.given, **third.inferred, rngs=plainly)
            if third.cls is not Branches:  # how often it draws depends on the size
                assert_same_bits(nnx.state(lazily), nnx.state(plainly))


def test_the_rngs_that_are_kept_are_those_that_were_given() -> None:
    rngs = nnx.Rngs(0, noise=7, dropout=8)
    layer = lm.lazy(KeepsRngs, infer=width)(rngs=rngs)
    assert layer.rngs is rngs and layer.drop.rngs is not rngs.dropout
    layer(X)
    assert layer.rngs is rngs


# ---------------------------------------------------------------- arguments


@pytest.mark.slow
def test_keyword_only_and_positional_only() -> None:
    layer = lm.lazy(Draws, infer=width)(m=3, rngs=nnx.Rngs(0, noise=7))
    layer(X)
    assert_same_model(layer, Draws(6, 3, rngs=nnx.Rngs(0, noise=7)))


def test_positional_only_arguments_of_the_class() -> None:
    layer = lm.lazy(KeywordOnly, infer=width)(first=2, gain=3.0, rngs=nnx.Rngs(0))
    x = array(4, 6)
    want = KeywordOnly(2, 6, gain=3.0, rngs=nnx.Rngs(0))
    assert_same_bits(layer(x), want(x))
    assert_same_model(layer, want)


def test_everything_given_infers_nothing() -> None:
    seen: list[dict[str, Any]] = []

    def nothing(config: Mapping[str, Any], x: Any) -> dict[str, int]:
        seen.append(dict(config))
        return {}

    layer = lm.lazy(nnx.Linear, infer=nothing)(in_features=6, out_features=3, rngs=nnx.Rngs(0))
    assert layer.kernel.shape == (6, 3)
    layer(X)
    assert_same_model(layer, nnx.Linear(6, 3, rngs=nnx.Rngs(0)))
    assert seen[0]["in_features"] == 6 and seen[0]["out_features"] == 3


def test_infer_sees_arguments_defaults_and_specs() -> None:
    seen: list[Any] = []

    def infer(config: Mapping[str, Any], x: Any, *rest: Any, **named: Any) -> dict[str, int]:
        seen.append((config["m"], "n" in config, x, rest, named))
        with pytest.raises(TypeError):
            config["m"] = 9  # type: ignore[index]
        return {"n": x.shape[-1]}

    class Takes(Draws):
        def __call__(self, x: jax.Array, *rest: Any, **named: Any) -> jax.Array:
            return super().__call__(x)

    lm.lazy(Takes, infer=infer)(rngs=nnx.Rngs(0))(X, {"a": np.ones(2, np.float32)}, train=True, y=X)
    ((m, has_n, x, rest, named),) = seen
    assert (m, has_n, x) == (2, False, spec(4, 6))
    assert rest == ({"a": spec(2)},) and named == {"train": True, "y": spec(4, 6)}


def test_signature_and_docstring() -> None:
    lazy = lm.lazy(Draws, infer=width)
    parameters = inspect.signature(lazy).parameters
    assert list(parameters) == ["n", "m", "rngs"]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())
    assert parameters["m"].default == 2 and repr(parameters["n"].default) == "<inferred>"
    assert parameters["rngs"].default is inspect.Parameter.empty
    assert lazy.__name__ == "LazyDraws" and lazy.__module__ == __name__
    assert "Draws" in (lazy.__doc__ or "") and issubclass(lazy, Draws) and issubclass(lazy, lm.LazyModuleMixin)


def test_sizes_as_numpy_integers() -> None:
    lazy = lm.lazy(nnx.Linear, infer=lambda config, x: {"in_features": np.int64(x.shape[-1])})
    layer = lazy(out_features=3, rngs=nnx.Rngs(0))
    layer(X)
    assert type(layer.in_features) is int
    assert_same_model(layer, nnx.Linear(6, 3, rngs=nnx.Rngs(0)))


def test_a_stream_instead_of_rngs() -> None:
    class Streamed(nnx.Module):
        def __init__(self, n: int, *, rngs: nnx.RngStream):
            self.w = nnx.Param(jax.random.normal(rngs(), (n, 2)) + jax.random.normal(rngs(), (n, 1)).repeat(2, 1))
            self.rngs = rngs

        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ self.w[...]

    layer, want = lm.lazy(Streamed, infer=width)(rngs=nnx.Rngs(0).params), Streamed(6, rngs=nnx.Rngs(0).params)
    assert_same_bits(layer(X), want(X))
    assert_same_model(layer, want)


def test_another_key_implementation() -> None:
    make = lambda: nnx.Rngs(jax.random.key(0, impl="rbg"))  # noqa: E731
    layer, want = lm.LazyLinear(3, rngs=make()), nnx.Linear(6, 3, rngs=make())
    twin = pickle.loads(pickle.dumps(layer))
    for one in (layer, twin):
        one(X)
        assert_same_model(one, want)


def test_an_argument_that_is_an_array() -> None:
    class Shifted(nnx.Module):
        def __init__(self, n: int, shift: Any, *, rngs: nnx.Rngs):
            self.fc = nnx.Linear(n, 3, rngs=rngs)
            self.shift = nnx.Variable(jnp.asarray(shift, jnp.float32))

        def __call__(self, x: jax.Array) -> jax.Array:
            y = self.fc(x)
            return y + jnp.broadcast_to(self.shift[...], y.shape)

    shift = np.array([1.0, 2.0, 3.0], np.float32)
    layer, want = lm.lazy(Shifted, infer=width)(shift=shift, rngs=nnx.Rngs(0)), Shifted(6, shift, rngs=nnx.Rngs(0))
    assert_same_bits(layer(X), want(X))
    assert_same_model(layer, want)
    assert_same_bits(layer.shift.get_value(), jnp.array(shift))
