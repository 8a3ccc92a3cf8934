"""What a compiled function can reach and change, by the tables of docs/compiling.md, in every form of a function.

Each row is a small program. It is run in plain Python and with its function compiled, and after each step everything is
compared: results, values, types, metadata, the order of attributes and items, and what is shared.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from whole_picture import assert_same, seen

import lazymods as lm

X = jnp.arange(6.0).reshape(2, 3) / 10
Wrap = Callable[..., Any]
Program = Callable[[Wrap], Iterator[Any]]
REACHED: dict[str, Program] = {}
CHANGED: dict[str, Program] = {}


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    """Let numbers and arrays of all types meet, as users have it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def reached(name: str) -> Callable[[Program], Program]:
    return lambda program: REACHED.setdefault(name, program)


def changed(name: str) -> Callable[[Program], Program]:
    return lambda program: CHANGED.setdefault(name, program)


class Net(nnx.Module):
    first: Any

    def __init__(self, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.noise = nnx.Dropout(0.5, rngs=rngs)
        self.scale: Any = 2
        self.table: Any = nnx.Dict({"b": nnx.Param(jnp.ones(3)), "a": nnx.Param(jnp.zeros(3))})

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.noise(self.norm(self.first(x))) * self.scale
        for number, value in enumerate(self.table.values()):
            x = x + (number + 1) * value[...]
        return x


class OtherNoise(nnx.Dropout):
    pass


# ---------------------------------------------------------------- what is reached


@reached("arrays, by shape and dtype")
def arrays(wrap: Wrap) -> Iterator[Any]:
    f = wrap(lambda x: x * 2 + x.shape[0])
    for x in (X, X[:1], X.astype(jnp.bfloat16), jnp.arange(3), np.ones(2, np.int8), X):
        yield f(x)


@reached("Python numbers and numpy scalars")
def numbers(wrap: Wrap) -> Iterator[Any]:
    f = wrap(lambda x, rate: x * rate)
    for rate in (1, 2, 0.5, True, 2, np.float32(3), np.int8(4), 0.25, 1j):
        yield f(X, rate)


@reached("keys, typed and raw")
def keys(wrap: Wrap) -> Iterator[Any]:
    f = wrap(lambda key, x: x + jax.random.normal(key, x.shape))
    for key in (jax.random.key(0), jax.random.key(1), jax.random.PRNGKey(0), jax.random.key(0, impl="rbg")):
        yield f(key, X)


class Pair(NamedTuple):
    left: Any
    right: Any


@struct.dataclass
class Batch:
    image: Any
    name: str = struct.field(pytree_node=False, default="a")


@reached("containers of them: dicts, lists, tuples, named tuples, registered dataclasses")
def containers(wrap: Wrap) -> Iterator[Any]:
    f = wrap(lambda d, p, b: (d["x"] * d["n"] + p.left[0] - p.right["k"], b.image * (2 if b.name == "a" else 3)))
    for number in (1, 2, 3.0):
        for name in "ab":
            yield f({"x": X, "n": number}, Pair([X], {"k": number}), Batch(X, name))


@reached("static arguments, by type and value")
def static(wrap: Wrap) -> Iterator[Any]:
    f = wrap(lambda x, how: x * (2 if how == "double" else how or 5), static_argnames="how")
    for how in ("double", 1, 1.0, True, None, "double"):
        yield f(X, how), f(X, how=how)


@reached("models, optimizers, Variables among the arguments")
def models(wrap: Wrap) -> Iterator[Any]:
    def step(model: Net, optimizer: Any, ema: nnx.Variable[Any], x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        ema[...] = 0.9 * ema[...] + 0.1 * loss
        return loss

    f, model, ema = wrap(step), Net(), nnx.Variable(jnp.zeros(()))
    optimizer = nnx.Optimizer(model, optax.adam(0.1, eps=1.0), wrt=nnx.Param)
    for number in range(3):
        yield f(model, optimizer, ema, X + number), model, optimizer, ema


@reached("what a closure, a default, a partial function or a helper holds")
def closures(wrap: Wrap) -> Iterator[Any]:
    inner, default, given = Net(0), Net(1), Net(2)

    def helper(x: jax.Array) -> jax.Array:
        return inner(x)

    def total(other: Net, x: jax.Array, third: Net = default) -> jax.Array:
        return helper(x) + other(x) + third(x)

    f = wrap(functools.partial(total, given))
    yield f(X), inner, default, given
    for model in (inner, default, given):
        model.first.kernel[...] += 1
        yield f(X), inner, default, given
        model.eval()
        yield f(X), inner, default, given


@reached("functions that transforms made of such functions")
def transforms(wrap: Wrap) -> Iterator[Any]:
    model = Net()
    each = jax.vmap(lambda row: model.first.kernel[...] @ row)
    grad = jax.value_and_grad(lambda x: (model.first(x) ** 2).sum())
    compiled, lifted = lm.jit(lambda x: model(x)), nnx.grad(lambda m, x: (m(x) * model.scale).sum())
    f = wrap(lambda x: (each(x), grad(x), compiled(x), lifted(model.first, x)))
    for scale in (2, 3.0):
        model.scale = scale
        yield f(X), model
        model.first.kernel[...] += 1
        yield f(X), model


MODELS: dict[str, Any] = {}


@reached("globals, and containers that they name")
def of_globals(wrap: Wrap) -> Iterator[Any]:
    f = wrap(lambda x: MODELS["main"](x))
    for seed in range(2):
        MODELS["main"] = Net(seed)
        yield f(X), MODELS
        MODELS["main"].scale = 3
        yield f(X), MODELS
    MODELS.clear()


class Trainer:
    def __init__(self, wrap: Wrap) -> None:
        self.model, self.rate, self.mode, self.history = Net(), 0.5, "fast", [1.0]
        self.step = wrap(self._step)

    def _step(self, x: jax.Array) -> jax.Array:
        y = self.model(x) * self.rate
        return y + self.history[-1] if self.mode == "fast" else y


@reached("plain objects that hold a model, and of their attributes those that are read")
def objects(wrap: Wrap) -> Iterator[Any]:
    trainer = Trainer(wrap)
    for change in (
        lambda: None,
        lambda: setattr(trainer, "rate", 2),
        lambda: setattr(trainer, "rate", 2.0),
        lambda: trainer.history.append(7.0),
        lambda: setattr(trainer, "mode", "slow"),
        lambda: setattr(trainer, "model", Net(1)),
        lambda: setattr(trainer, "unread", object),
    ):
        change()
        yield trainer.step(X), trainer.model, trainer.rate, trainer.history


@reached("attributes of modules, by type and value")
def attributes(wrap: Wrap) -> Iterator[Any]:
    model: Any = Net()
    f = wrap(lambda m: m.first.bias[...] * m.scale + (m.extra if hasattr(m, "extra") else 0))
    model.first.bias[...] = jnp.arange(3)
    for scale in (2, 2.0, True, 1, np.float32(1), 0.0, -0.0, jnp.ones(3)):
        model.scale = nnx.data(scale) if isinstance(scale, jax.Array) else scale
        yield f(model), model
    model.extra = 5
    yield f(model), model
    del model.extra
    yield f(model), model


@reached("classes of modules")
def classes(wrap: Wrap) -> Iterator[Any]:
    class Twice(nnx.Linear):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().__call__(*args, **kwargs)

    f, model = wrap(lambda m, x: m.first(x)), Net()
    for cls in (nnx.Linear, Twice, nnx.Linear):
        model.first.__class__ = cls
        yield f(model, X), model


@reached("metadata of Variables")
def metadata(wrap: Wrap) -> Iterator[Any]:
    f, model = wrap(lambda m: m.first.bias[...] + m.first.bias.get_metadata().get("shift", 0)), Net()
    for shift in (1, 1.0, True, 2):
        model.first.bias.set_metadata("shift", shift)
        yield f(model), model


@reached("types of Variables")
def types_of_variables(wrap: Wrap) -> Iterator[Any]:
    f, model = wrap(lambda m: sum(jnp.sum(v) for v in jax.tree.leaves(nnx.state(m.first, nnx.Param)))), Net()
    yield f(model), model
    model.first.bias = nnx.BatchStat(jnp.ones(3))
    yield f(model), model


@reached("the order of dicts")
def order(wrap: Wrap) -> Iterator[Any]:
    class Holder(nnx.Module):
        def __init__(self) -> None:
            self.parts = nnx.data({"b": nnx.Param(jnp.ones(2)), "a": nnx.Param(jnp.zeros(2))})

    f, model = wrap(lambda m: sum((n + 1) * v[...] for n, v in enumerate(m.parts.values()))), Holder()
    yield f(model), model
    model.parts["b"] = model.parts.pop("b")
    yield f(model), model


@reached("what is shared")
def sharing(wrap: Wrap) -> Iterator[Any]:
    class Two(nnx.Module):
        def __init__(self) -> None:
            self.a, self.b = nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2))

    def add(m: Two) -> jax.Array:
        m.a[...] += 1
        return m.a[...] * 10 + m.b[...]

    f, model = wrap(add), Two()
    yield f(model), model
    model.b = model.a
    yield f(model), model
    model.b = nnx.Param(jnp.zeros(2))
    yield f(model), model


@reached("modes and random state")
def modes(wrap: Wrap) -> Iterator[Any]:
    f, model = wrap(lambda m, x: m(x)), Net()
    for mode in ("train", "train", "eval", "train"):
        getattr(model, mode)()
        yield f(model, X), model
    nnx.reseed(model, dropout=7)
    yield f(model, X), model


@reached("the settings of JAX")
def settings(wrap: Wrap) -> Iterator[Any]:
    f = wrap(lambda x: jnp.asarray(x).astype(float) / 3)
    for x64 in (False, True, False):
        with jax.enable_x64(x64):
            yield f(np.arange(3))


# ---------------------------------------------------------------- what is changed


def changes(name: str) -> Callable[[Callable[[Any], Any]], Any]:
    """Make a program of what a function does to a :class:`Net`: three calls, the second with what the first left."""

    def add(function: Callable[[Any], Any]) -> Any:
        def program(wrap: Wrap) -> Iterator[Any]:
            model, other = Net(), Net(1)
            f = wrap(function)
            for m in (model, model, other, model):
                yield f(m), model, other

        return CHANGED.setdefault(name, program)

    return add


@changes("values")
def values(m: Any) -> Any:
    m.first.kernel[...] *= 2
    m.first.bias.set_value(m.first.bias[...].astype(jnp.bfloat16))
    return m.norm(X)


@changes("attributes: new, other, gone")
def set_attributes(m: Any) -> Any:
    m.scale = m.scale + 1 if isinstance(m.scale, int) and m.scale < 3 else float(m.scale)
    if hasattr(m, "flag"):
        del m.flag
    else:
        m.flag = "on"
    return m.first.bias[...] * m.scale


@changes("new parameters and modules, and removed ones")
def modules(m: Any) -> Any:
    if hasattr(m, "more"):
        del m.more
    else:
        m.more = nnx.Linear(3, 2, rngs=nnx.Rngs(5))
        m.total = nnx.Variable(m.first.bias.sum())
    return m.total[...]


@changes("other modules in the place of old ones, and in another's")
def swaps(m: Any) -> Any:
    m.second = m.first
    m.first = nnx.Linear(3, 3, rngs=nnx.Rngs(3))
    m.table["b"], m.table["a"] = m.table["a"], m.table["b"]
    return m.first(X) + m.second(X)


@changes("what is shared")
def shares(m: Any) -> Any:
    m.first.bias = m.norm.bias
    m.first.bias[...] += 1
    return m.norm.bias[...]


@changes("metadata")
def sets_metadata(m: Any) -> Any:
    count = m.first.bias.get_metadata().get("count", 0)
    m.first.bias.set_metadata("count", 1.0 if count == 1 else count + 1)
    return m.first.bias[...] + count


@changes("types of Variables, and classes")
def sets_types(m: Any) -> Any:
    m.first.bias = nnx.BatchStat(m.first.bias[...] + 1)
    m.noise.__class__ = nnx.Dropout if type(m.noise) is OtherNoise else OtherNoise  # type: ignore[assignment]
    return m.first.bias[...]


@changes("modes and random state")
def sets_modes(m: Any) -> Any:
    y = m(X)
    m.train() if m.norm.use_running_average else m.eval()
    return y


@changed("items of dicts, lists and sets, and their order")
def items(wrap: Wrap) -> Iterator[Any]:
    class Holder(nnx.Module):
        def __init__(self) -> None:
            self.parts = nnx.data({"b": nnx.Param(jnp.ones(2)), "a": nnx.Param(jnp.zeros(2))})
            self.names: Any = nnx.static(["x"])
            self.arrays = nnx.data([jnp.ones(2)])

    def step(m: Holder) -> Any:
        key, value = next(iter(m.parts.items()))
        del m.parts[key]
        m.parts[key] = value
        m.parts.setdefault("c", nnx.Param(value[...] + 1))
        m.names.append(key)
        m.arrays.append(value[...])
        return sum((n + 1) * v[...] for n, v in enumerate(m.parts.values())) + len(m.arrays)

    f, model = wrap(step), Holder()
    for _ in range(4):
        yield f(model), model


@changed("plain objects, and what they hold")
def plain(wrap: Wrap) -> Iterator[Any]:
    class Loop:
        def __init__(self) -> None:
            self.model, self.steps, self.kinds, self.best = Net(), 0, {}, None
            self.step = wrap(self._step)

        def _step(self, x: jax.Array) -> jax.Array:
            self.steps += 1
            self.kinds[f"step{self.steps % 2}"] = self.steps
            self.best = self.model(x).sum()
            return self.best * self.steps

    loop = Loop()
    for _ in range(4):
        yield loop.step(X), loop.model, loop.steps, loop.kinds, loop.best


@changed("nothing, if the function raises")
def raises(wrap: Wrap) -> Iterator[Any]:
    def step(m: Net, shape: Any) -> jax.Array:
        y = m.first(X)
        return jnp.reshape(y, (shape.shape[0],))

    f, model = wrap(step), Net()
    for length in (6, 5, 6):
        try:
            yield f(model, jnp.ones(length)), model
        except TypeError:
            yield "it does not fit", model


# ---------------------------------------------------------------- every form of a function


def decide(function: Any) -> Any:
    """Let Python decide on a value before the function is called, and after."""

    @functools.wraps(function)
    def deciding(*args: Any, **kwargs: Any) -> Any:
        out = None
        for _ in range(2):
            if out is None or arrays_in(out).sum() > 1e6:  # it never is
                out = function(*args, **kwargs) if arrays_in((args, kwargs)).sum() < 1e6 else 0
        return out

    return deciding


def arrays_in(values: Any) -> jax.Array:
    """Return the first array of floats in a tree, or another array."""
    found = [v for v in jax.tree.leaves(values) if isinstance(v, jax.Array) and v.dtype == "float32"]
    return found[0] if found else X


def nested(function: Any, **options: Any) -> Any:
    """Call one compiled function in another."""
    inner = lm.jit(function, **options)

    @functools.wraps(function)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    return lm.jit(outer, **options)


FORMS: dict[str, Wrap] = {
    "plain": lm.jit,
    "deciding": lambda f, **options: lm.jit(decide(f), **options),
    "donated": functools.partial(lm.jit, donate_state=True),
    "nested": nested,
    "lazy": lambda f, **options: lm.lazytensor.lazy()(f),
}
PROGRAMS = {**{f"reached: {k}": p for k, p in REACHED.items()}, **{f"changed: {k}": p for k, p in CHANGED.items()}}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_plain_python(name: str, form: str) -> None:
    plain = [seen(shown) for shown in PROGRAMS[name](lambda function, **options: function)]
    assert len(plain) > 1
    for number, (got, want) in enumerate(zip(map(seen, PROGRAMS[name](FORMS[form])), plain, strict=True)):
        assert_same(got, want, f"step {number}")
