"""What many tests need: inputs, and comparison with Flax's explicit twin bit for bit."""

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

import lazymods as lm


def import_file(path: Path) -> ModuleType:
    """Import an example, which is no part of a package."""
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def spec(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """A shape and dtype without values."""
    return jax.ShapeDtypeStruct(shape, dtype)


def filled(tree: Any, seed: int = 0) -> Any:
    """Random arrays for the specs in a pytree; small whole numbers for integer ones."""
    rng = np.random.default_rng(seed)

    def one(s: Any) -> Any:
        if not isinstance(s, jax.ShapeDtypeStruct):
            return s
        if jnp.issubdtype(s.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, 3, s.shape), s.dtype)
        return jnp.asarray(rng.standard_normal(s.shape), s.dtype)

    return jax.tree.map(one, tree)


def array(*shape: int, dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    """A random array."""
    return filled(spec(*shape, dtype=dtype), seed)


def raw(value: Any) -> np.ndarray:
    """The numpy array behind a Variable, array or random key."""
    value = value.get_raw_value() if isinstance(value, nnx.Variable) else value
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


ON_CPU = jax.default_backend() == "cpu"
"""Bits are promised on the CPU. An accelerator rounds a program otherwise once it is compiled in another context."""


def assert_same_array(a: np.ndarray, b: np.ndarray, what: Any = "") -> None:
    """Equal dtypes, shapes and bits; on an accelerator floats may differ by 1e-5."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape), what
    if ON_CPU or not jnp.issubdtype(a.dtype, jnp.inexact):
        assert a.tobytes() == b.tobytes(), what
    else:
        wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
        np.testing.assert_allclose(a.astype(wide), b.astype(wide), rtol=1e-5, atol=1e-6, err_msg=str(what))


def assert_same_bits(got: Any, want: Any) -> None:
    """Equal dtypes, shapes and bits, leaf by leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_same_array(raw(a), raw(b))


def assert_same_model(got: Any, want: Any) -> None:
    """Same class, same GraphDef, same Variable types, same bits, no tracer left behind."""
    assert not lm.has_uninitialized_params(got)
    assert type(got) is type(want)
    assert nnx.graphdef(got) == nnx.graphdef(want)
    a, b = (dict(nnx.to_flat_state(nnx.state(m))) for m in (got, want))
    assert list(a) == list(b)
    for path in b:
        assert type(a[path]) is type(b[path]), path
        assert_same_array(raw(a[path]), raw(b[path]), path)
    for leaf in jax.tree.leaves(nnx.state(got)):
        assert not isinstance(leaf, Tracer)


def contents(model: Any) -> dict[str, Any]:
    """Every value and placeholder of a model, random state included, and the classes of its parts."""
    values: dict[str, Any] = {}
    for name, value in lm.state_dict(model, include_rng=True).items():
        values[name] = value.pending if lm.is_lazy(value) else raw(value).copy()
    modules = [type(node) for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)]
    return values | {f"class {i}": cls for i, cls in enumerate(modules)}


def assert_unchanged(model: Any, before: dict[str, Any]) -> None:
    """What :func:`contents` gives is still the same."""
    after = contents(model)
    assert list(after) == list(before)
    for name, value in before.items():
        assert np.array_equal(after[name], value) if isinstance(value, np.ndarray) else after[name] == value, name


class MLP(nnx.Module):
    """Two linear layers: without sizes, or with ``d_in``."""

    def __init__(self, d_in: int | None = None, *, hidden: int = 16, out: int = 4, rngs: nnx.Rngs):
        if d_in is None:
            self.fc1 = lm.LazyLinear(hidden, rngs=rngs)
            self.fc2 = lm.LazyLinear(out, rngs=rngs)
        else:
            self.fc1 = nnx.Linear(d_in, hidden, rngs=rngs)
            self.fc2 = nnx.Linear(hidden, out, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(jax.nn.relu(self.fc1(x)))


def lazy_mlp(seed: int = 0, **options: Any) -> MLP:
    """The MLP without sizes."""
    return MLP(rngs=nnx.Rngs(seed), **options)


def plain_mlp(d_in: int = 8, seed: int = 0, **options: Any) -> MLP:
    """Flax's own."""
    return MLP(d_in, rngs=nnx.Rngs(seed), **options)


Make = Callable[[nnx.Rngs], nnx.Module]


def is_pasteable(line: str) -> bool:
    """Whether a line to write is Python or a pip command."""
    try:
        ast.parse("\n".join(part.strip() for part in line.splitlines()))
    except SyntaxError:
        return line.startswith("pip install ")
    return True
