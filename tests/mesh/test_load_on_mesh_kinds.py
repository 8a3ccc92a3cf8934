"""``load`` on a mesh: every dtype, casts that are refused, transforms around it, and what fails half way."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from on_mesh import P, arrays, assert_placed, assert_same_on_mesh, by_pairs, mesh_of

import lazymods as lm
from lazymods.state import sharded_loading

RULES = [("kernel", P(None, "data")), ("bias", P("model"))]
DRAWN = np.random.default_rng(0).standard_normal((8, 4))
VALUES: dict[str, Any] = {
    "bfloat16": DRAWN.astype(ml_dtypes.bfloat16),
    "float8": DRAWN.astype(ml_dtypes.float8_e4m3fn),
    "float16": DRAWN.astype(np.float16),
    "int8": np.arange(32, dtype=np.int8).reshape(8, 4),
    "uint32": np.arange(32, dtype=np.uint32).reshape(8, 4) + 2**31,
    "bool": (np.arange(32) % 3 == 0).reshape(8, 4),
    "complex64": (np.arange(32) * 1j).astype(np.complex64).reshape(8, 4),
    "no_rows": np.zeros((0, 4), np.float32),
    "no_columns": np.zeros((8, 0), np.float32),
    "number": np.float32(3),
}


def parameters(values: dict[str, Any]) -> nnx.Dict:
    return nnx.Dict({name: nnx.Param(jnp.asarray(value)) for name, value in values.items()})


@pytest.mark.parametrize("name", ["d.safetensors", "d.npz", "packed.npz", "d"])
def test_dtypes_and_shapes(name: str, tmp_path: Path) -> None:
    mesh, values = mesh_of(data=4, model=2), dict(VALUES)
    if name == "d":  # Orbax stores nothing without elements
        values = {n: v for n, v in values.items() if v.size}
    if name == "packed.npz":  # numpy has no name for the dtypes of ml_dtypes
        values = {n: v for n, v in values.items() if v.dtype.isbuiltin == 1}
        np.savez_compressed(tmp_path / name, **values)
    else:
        lm.save(parameters(values), tmp_path / name)
    model = parameters({n: np.zeros_like(v) for n, v in values.items()})
    lm.load(model, tmp_path / name, mesh=mesh, rules=[("number", P()), ("", P("data"))])
    for path, array in arrays(model).items():
        assert_placed(array, mesh, P("data") if array.ndim else P(), path)
        assert (array.dtype, np.asarray(array).tobytes()) == (values[path].dtype, values[path].tobytes()), path


@pytest.mark.parametrize("name", ["k.safetensors", "k.npz", "k"])
def test_random_keys_that_are_spread(name: str, tmp_path: Path) -> None:
    def model(seed: int) -> Any:
        return nnx.Dict(keys=nnx.Variable(jax.random.split(jax.random.key(seed), 8)), w=nnx.Param(jnp.full(8, seed)))

    mesh, want, got = mesh_of(data=4, model=2), model(1), model(2)
    place = jax.NamedSharding(mesh, P("data"))
    got["keys"].set_value(jax.device_put(got["keys"].get_value(), place))
    lm.save(want, tmp_path / name)
    lm.load(got, tmp_path / name, mesh=mesh, rules=[("", P("data"))])
    assert got["keys"].get_value().sharding == place
    data = [jax.random.key_data(m["keys"].get_value()) for m in (got, want)]
    np.testing.assert_array_equal(data[0], data[1])


FITTING: dict[str, Any] = {
    "whole": np.arange(32, dtype=np.int64).reshape(8, 4),
    "yes": np.ones(8, np.int32),
    "real": np.arange(8, dtype=np.int16),
}
MISFITS: dict[str, tuple[str, Any]] = {
    "too large": ("whole", np.full((8, 4), 2**40)),
    "half": ("whole", np.full((8, 4), 0.5)),
    "two": ("yes", np.full(8, 2)),
    "imaginary": ("real", np.full(8, 1j)),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "packed"])
@pytest.mark.parametrize("case", ["fits", *MISFITS])
def test_casts(case: str, save: Any, tmp_path: Path) -> None:
    mesh = mesh_of(data=4, model=2)
    model = parameters({"whole": np.zeros((8, 4), np.int32), "yes": np.zeros(8, bool), "real": np.zeros(8, np.float32)})
    before = arrays(model)
    save(tmp_path / "v.npz", **FITTING | dict(MISFITS[case] for _ in range(case in MISFITS)))
    if case == "fits":
        lm.load(model, tmp_path / "v.npz", mesh=mesh, rules=[("", P("data"))])
        assert {n: a.dtype for n, a in arrays(model).items()} == {n: a.dtype for n, a in before.items()}
        assert all(np.array_equal(a, FITTING[n]) for n, a in arrays(model).items())
        return
    with pytest.raises(lm.StateDictError, match=MISFITS[case][0]):
        lm.load(model, tmp_path / "v.npz", mesh=mesh, rules=[("", P("data"))])
    assert all(array is before[name] for name, array in arrays(model).items())


@pytest.fixture
def linear(tmp_path: Path) -> nnx.Linear:
    """A layer that is in two files."""
    layer = nnx.Linear(8, 32, rngs=nnx.Rngs(5))
    lm.save(layer, tmp_path / "l.safetensors")
    lm.save(layer, tmp_path / "l")
    return layer


@pytest.mark.parametrize("name", ["l.safetensors", "l"])
def test_in_a_function_that_is_traced_and_in_a_lazy_block(name: str, linear: nnx.Linear, tmp_path: Path) -> None:
    mesh, x = mesh_of(data=4, model=2), jnp.ones((2, 8))
    traced, recorded = lm.LazyLinear(32, rngs=nnx.Rngs(0)), lm.LazyLinear(32, rngs=nnx.Rngs(0))

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        lm.load(traced, tmp_path / name, mesh=mesh, rules=RULES)
        return traced(x)

    np.testing.assert_allclose(run(x), linear(x), rtol=1e-5)
    with lm.lazytensor.lazy():
        lm.load(recorded, tmp_path / name, mesh=mesh, rules=RULES)
        out = np.asarray(recorded(x))
    np.testing.assert_allclose(out, linear(x), rtol=1e-5)
    for layer in (traced, recorded):
        assert_same_on_mesh(layer, linear, mesh, by_pairs(RULES))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_fails_half_way_leaves_the_model_as_it_was(
    error: type[BaseException], linear: nnx.Linear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, rngs = mesh_of(data=4, model=2), nnx.Rngs(1)
    ready, lazy = nnx.Linear(8, 32, rngs=rngs), lm.LazyLinear(32, rngs=rngs)
    before, made = arrays(ready), sharded_loading.put_together

    def second_fails(shape: tuple[int, ...], *rest: Any) -> Any:
        if len(shape) == 1:
            raise error
        return made(shape, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(sharded_loading, "put_together", second_fails)
        for layer in (ready, lazy):
            with pytest.raises(error):
                lm.load(layer, tmp_path / "l.safetensors", mesh=mesh, rules=RULES)
    assert lm.is_lazy(lazy) and all(array is before[name] for name, array in arrays(ready).items())
    lm.load(lazy, tmp_path / "l.safetensors", mesh=mesh, rules=RULES)
    assert_same_on_mesh(lazy, linear, mesh, by_pairs(RULES))


def test_an_entry_of_another_shape_is_skipped_and_its_place_moved(linear: nnx.Linear, tmp_path: Path) -> None:
    mesh, model = mesh_of(data=4, model=2), nnx.Linear(4, 32, rngs=nnx.Rngs(1))
    kernel = np.asarray(model.kernel.get_value())
    result = lm.load(model, tmp_path / "l", mesh=mesh, rules=RULES, mismatched="skip")
    assert result.mismatched == ["kernel"]
    assert_placed(model.kernel.get_value(), mesh, P(None, "data"))
    np.testing.assert_array_equal(model.kernel.get_value(), kernel)
    np.testing.assert_array_equal(arrays(model)["bias"], arrays(linear)["bias"])


@pytest.mark.slow
def test_biases_of_stacked_cells_in_the_dtype_of_the_file() -> None:
    """A sum of halves is computed in float32, and read when it is known which device holds which part."""
    names = {"weight_ih_l0": (32, 8), "weight_hh_l0": (32, 8), "bias_ih_l0": (32,), "bias_hh_l0": (32,)}
    drawn = np.random.default_rng(0)
    given = {
        f"layers.{i}.{name}": drawn.normal(size=shape).astype(ml_dtypes.bfloat16)
        for i in range(2)
        for name, shape in names.items()
    }
    layers = nnx.vmap(lambda rngs: nnx.RNN(nnx.OptimizedLSTMCell(8, 8, rngs=rngs)))(nnx.Rngs(0).split(2))
    model = nnx.Dict(layers=layers)
    rules = [("bias", P(None, "data"))]
    rename = [lm.rules.Stack(r"layers[.](\d+)[.]", into="layers.")]
    lm.load(model, given, layout="torch", dtype="file", rename=rename, mesh=mesh_of(data=8), rules=rules)
    assert {str(array.dtype) for array in arrays(model).values()} == {"bfloat16"}
    sums = [sum(given[f"layers.{i}.bias_{kind}_l0"].astype(np.float32) for kind in ("ih", "hh")) for i in range(2)]
    cell: Any = model.layers.cell
    bias = cell.dense_h.bias[...]
    np.testing.assert_array_equal(bias, np.stack(sums).astype(ml_dtypes.bfloat16))
    assert_placed(bias, mesh_of(data=8), P(None, "data"), "bias")
