"""Random training states of every kind that JAX, optax, Flax and numpy know, and their comparison by type and value."""

import string
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import nnx, struct
from flax.core import FrozenDict

import lazymods as lm

SUFFIXES = (".safetensors", ".npz", "", "state_dict")
DTYPES = (np.float32, np.float64, np.int8, np.int64, np.uint16, np.bool_, ml_dtypes.bfloat16, np.float16, np.complex64)


# a name is the keys that lead to it, and what a file says more about some
KEYS = ("a", "a.b", "a.b.c", "value", "x.value", "impl", "json", "", ".", "a.", "a/b", "..", "a\0", "\ud800", "7", "ä")


class Carry(NamedTuple):
    """A named tuple."""

    h: Any
    c: Any


@struct.dataclass
class Stats:
    """A registered dataclass."""

    mean: Any
    count: Any


class Holder(nnx.Module):
    """A module that holds values in attributes and in Variables."""

    def __init__(self, raw: Any, inside: Any) -> None:
        self.raw = nnx.data(raw)
        self.variable = nnx.Variable(inside)


def array(rng: np.random.Generator) -> Any:
    """Return an array of numpy's or JAX's, at times without axes."""
    shape = tuple(int(n) for n in rng.integers(1, 4, rng.integers(0, 3)))
    if rng.random() < 0.2:  # of weak type
        return jnp.full(shape, (0.5, 3, 1j)[rng.integers(3)]) * int(rng.integers(9))
    made = np.asarray(rng.integers(0, 100, shape)).astype(DTYPES[rng.integers(len(DTYPES))])
    return made if rng.random() < 0.4 else jnp.asarray(made)


def leaf(rng: np.random.Generator) -> Any:
    """Return one value that is no container."""
    kind = rng.integers(10)
    if kind < 4:
        return array(rng)
    if kind == 4:
        key = jax.random.key(int(rng.integers(99)), impl=("threefry2x32", "rbg")[rng.integers(2)])
        return key if rng.random() < 0.5 else jax.random.split(key, 2)
    if kind == 5:
        return DTYPES[rng.integers(len(DTYPES))](rng.integers(0, 100))
    numbers = (True, int(rng.integers(99)), 2**70 + 1, -(2**63), rng.random(), float("inf"), float("nan"), 1 + 2j)
    texts = ("", "ä\n\ud800", b"\x00\xff", "".join(rng.choice(list(string.printable), 5)))
    return (*numbers, *texts, None)[rng.integers(len(numbers) + len(texts) + 1)]


def value(rng: np.random.Generator, depth: int = 3) -> Any:
    """Return a random nested value."""
    kind = rng.integers(14) if depth else 0
    if kind < 4:
        return leaf(rng)
    several = [value(rng, depth - 1) for _ in range(rng.integers(0, 3))]
    makers = (
        lambda: dict(zip("abc", several, strict=False)),
        lambda: several,
        lambda: tuple(several),
        lambda: Carry(value(rng, depth - 1), value(rng, depth - 1)),
        lambda: Stats(value(rng, depth - 1), value(rng, depth - 1)),
        lambda: optax.adam(0.1).init({"w": jnp.ones(2) * rng.random()}),
        lambda: np.random.default_rng(int(rng.integers(99))).bit_generator.state,
        lambda: Holder(value(rng, depth - 1), value(rng, depth - 1)),
        lambda: FrozenDict(zip("abc", several, strict=False)),
        lambda: dict(zip(rng.choice(KEYS, len(several), replace=False).tolist(), several, strict=True)),
    )
    return makers[kind - 4]()


def vars_of(holder: Any) -> dict[str, Any]:
    return {"raw": holder.raw, "variable": holder.variable.get_raw_value()}


def parts_of(stats: Any) -> tuple[Any, ...]:
    return (stats.mean, stats.count)


def blank(x: Any) -> Any:
    """Return a template: the same structure and types with other values."""
    if isinstance(x, Holder):
        return Holder(blank(x.raw), blank(x.variable.get_raw_value()))
    if isinstance(x, (dict, FrozenDict)):
        return type(x)({k: blank(v) for k, v in x.items()})
    if isinstance(x, Stats):
        return Stats(blank(x.mean), blank(x.count))
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*map(blank, x))
    if isinstance(x, (list, tuple)):
        return type(x)(map(blank, x))
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jax.random.key_data(x) + 1, impl=jax.random.key_impl(x))
    if isinstance(x, np.ndarray):
        return np.zeros_like(x)
    if isinstance(x, jax.Array):
        return jnp.full(x.shape, x.dtype.type(0).item()) if x.weak_type else jnp.zeros_like(x)
    return None if x is None else type(x)(0) if isinstance(x, np.generic) else type(x)()


def raw_of(array: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array)


def difference(x: Any, y: Any, path: str = "") -> str:
    """Say where two states differ in type or value, '' if nowhere."""
    if isinstance(x, jax.Array) and isinstance(y, jax.Array) and x.dtype == y.dtype:
        if getattr(x, "weak_type", None) != getattr(y, "weak_type", None):
            return f"{path}: another weak type"
        x, y = raw_of(x), raw_of(y)
    if type(x) is not type(y):
        return f"{path}: {type(x).__name__} came back as {type(y).__name__}"
    if isinstance(x, Holder):
        x, y = [vars_of(h) for h in (x, y)]
    if isinstance(x, Stats):
        x, y = [parts_of(s) for s in (x, y)]
    if isinstance(x, FrozenDict) and jax.tree.structure(x) != jax.tree.structure(y):
        return f"{path}: another structure"
    if isinstance(x, (dict, list, tuple, FrozenDict)):
        if len(x) != len(y) or (isinstance(x, (dict, FrozenDict)) and list(x) != list(y)):
            return f"{path}: other keys"
        keys = list(x) if isinstance(x, (dict, FrozenDict)) else range(len(x))
        return next((d for k in keys if (d := difference(x[k], y[k], f"{path}.{k}"))), "")
    if isinstance(x, (np.ndarray, np.generic)):
        same = x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    else:
        same = x == y or (x != x and y != y)
    return "" if same else f"{path}: {x!r} came back as {y!r}"


def fault(seed: int, number: int, folder: Path) -> tuple[str, bool]:
    """Save and load one state; return what came back otherwise, '' if nothing, and whether the save refused it."""
    rng = np.random.default_rng((seed, number))
    extra = {name: value(rng) for name in "xyz"[: rng.integers(1, 4)]}
    suffix = SUFFIXES[rng.integers(len(SUFFIXES)) if number % 10 == 0 else rng.choice([0, 1, 3])]
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(number))
    fresh = lm.LazyLinear(3, rngs=nnx.Rngs(1)) if rng.random() < 0.5 else nnx.Linear(2, 3, rngs=nnx.Rngs(1))
    state, template = {"model": model, **extra}, {"model": fresh, **blank(extra)}
    if suffix == "state_dict":
        lm.load_state_dict(template, lm.state_dict(state, include_rng=True))
    else:
        try:
            lm.save(state, folder / f"s{number}{suffix}")
        except lm.CheckpointError as error:
            named = any(f": {name}" in str(error) for name in extra)
            return ("" if named else f"refused without a name: {error}"), True
        lm.load(template, folder / f"s{number}{suffix}")
    if not np.array_equal(template["model"].kernel[...], model.kernel[...]):
        return "the model differs", False
    found = difference(extra, {name: template[name] for name in extra})
    return (f"{suffix or 'orbax'} {found}" if found else ""), False
