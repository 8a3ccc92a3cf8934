"""``load`` on a mesh: values of numpy and of one device, in the places that the rules say, from every format."""

import functools
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from on_mesh import P, arrays, assert_placed, assert_same_on_mesh, by_pairs, mesh_of
from safetensors.numpy import save_file

import lazymods as lm

RULES = [("kernel", P(None, "data")), ("bias", P("model"))]
FORMATS = ["model.safetensors", "model.npz", "packed.npz", "turned.npz", "wide.npz", "wide_orbax", "orbax"]


class Net(nnx.Module):
    """8 to 32 to 16 features."""

    def __init__(self, seed: int = 0, *, lazy: bool = True) -> None:
        rngs = nnx.Rngs(seed)
        self.fc1 = lm.LazyLinear(32, rngs=rngs) if lazy else nnx.Linear(8, 32, rngs=rngs)
        self.fc2 = lm.LazyLinear(16, rngs=rngs) if lazy else nnx.Linear(32, 16, rngs=rngs)


SOURCE = 5  # the seed of the model in the files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model in every format."""
    out = tmp_path_factory.mktemp("files")
    write_all(out, Net(SOURCE, lazy=False))
    return out


def write_all(out: Path, model: nnx.Module) -> None:
    import orbax.checkpoint as ocp

    for name in ("model.safetensors", "model.npz", "orbax"):
        lm.save(model, out / name)
    values: dict[str, Any] = {name: np.asarray(array) for name, array in arrays(model).items()}
    np.savez_compressed(out / "packed.npz", **values)
    turned: dict[str, Any] = {n: np.asfortranarray(v).astype(">f4") for n, v in values.items()}
    np.savez(out / "turned.npz", **turned)
    wide: dict[str, Any] = {name: v.astype(np.float64) for name, v in values.items()}  # which JAX has no arrays of
    np.savez(out / "wide.npz", **wide)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(out.resolve() / "wide_orbax", wide)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["own", "bfloat16"])
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "ready"])
@pytest.mark.parametrize("name", FORMATS)
def test_values_and_places(name: str, lazy: bool, dtype: Any, folder: Path) -> None:
    mesh, model, want = mesh_of(data=4, model=2), Net(1, lazy=lazy), Net(SOURCE, lazy=False)
    result = lm.load(model, folder / name, mesh=mesh, rules=RULES, dtype=dtype)
    assert not any(result)
    if dtype is not None:
        for _, v in nnx.to_flat_state(nnx.state(want)):
            v.set_value(jnp.asarray(np.asarray(v.get_value()).astype(dtype)))
    assert_same_on_mesh(model, want, mesh, by_pairs(RULES))


@pytest.mark.parametrize("devices", [[3], [5, 2], [7, 6, 5, 4]], ids=str)
def test_a_mesh_of_some_devices_in_any_order(devices: list[int], folder: Path) -> None:
    mesh = jax.sharding.Mesh(np.array([jax.devices()[i] for i in devices]), ("x",))
    for name in ("model.safetensors", "orbax"):
        model, rules = Net(), [("kernel", P(None, "x"))]
        lm.load(model, folder / name, mesh=mesh, rules=rules)
        assert_same_on_mesh(model, Net(SOURCE, lazy=False), mesh, by_pairs(rules))


@pytest.mark.parametrize("name", ["model.safetensors", "model.npz", "orbax"])
def test_without_a_mesh_arrays_stay_where_the_model_has_them(name: str, folder: Path) -> None:
    mesh, model = mesh_of(data=4, model=2), Net(1)
    lm.load(model, folder / "packed.npz", mesh=mesh, rules=RULES)
    for _, v in nnx.to_flat_state(nnx.state(model)):
        v.set_value(v.get_value() * 0)
    lm.load(model, folder / name)
    assert_same_on_mesh(model, Net(SOURCE, lazy=False), mesh, by_pairs(RULES))


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
def test_the_mesh_that_is_set(kind: Any, folder: Path) -> None:
    mesh, want = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind)), Net(SOURCE, lazy=False)
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    ruled, free, layer = Net(), Net(), lm.LazyLinear(32, kernel_init=init, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh):
        lm.load(ruled, folder / "model.safetensors", rules=RULES)
        lm.load(free, folder / "orbax")
        lm.load(layer, folder / "model.npz", rename=lambda n: n.removeprefix("fc1.") if n.startswith("fc1") else None)
        lm.load(ruled, folder / "model.npz")  # which stays
    assert_same_on_mesh(ruled, want, mesh, by_pairs(RULES))
    assert_same_on_mesh(free, want, mesh, lambda *_: P())
    assert_placed(layer.kernel.get_value(), mesh, P(None, "model"))
    assert_placed(arrays(layer)["bias"], mesh, P())


def test_an_abstract_model(folder: Path) -> None:
    mesh, model = mesh_of(data=4, model=2), nnx.eval_shape(lambda: Net(lazy=False))
    lm.load(model, folder / "orbax", mesh=mesh, rules=RULES)
    assert_same_on_mesh(model, Net(SOURCE, lazy=False), mesh, by_pairs(RULES))


def test_layouts_of_pytorch(tmp_path: Path) -> None:
    draw = np.random.default_rng(0).standard_normal

    class ConvNet(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.conv, self.norm = lm.LazyConv(16, (3, 3), rngs=rngs), lm.LazyBatchNorm(rngs=rngs)
            self.attend = lm.LazyMultiHeadAttention(4, qkv_features=16, decode=False, rngs=rngs)

    shapes = {
        **{"conv.weight": (16, 8, 3, 3), "conv.bias": (16,), "norm.weight": (16,), "norm.bias": (16,)},
        **{"norm.running_mean": (16,), "norm.running_var": (16,), "attend.in_proj_weight": (48, 16)},
        **{"attend.in_proj_bias": (48,), "attend.out_proj.weight": (16, 16), "attend.out_proj.bias": (16,)},
    }
    values: dict[str, Any] = {name: draw(shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(values, tmp_path / "t.safetensors")
    np.savez_compressed(tmp_path / "t.npz", **values)
    rules = [("conv.kernel", P(None, None, "data", "model")), ("query.kernel", P("data", "model"))]
    for name in ("t.safetensors", "t.npz"):
        mesh, model = mesh_of(data=4, model=2), ConvNet()
        lm.load(model, tmp_path / name, layout="torch", mesh=mesh, rules=rules)
        found = arrays(model)
        for path, array in found.items():
            assert_placed(array, mesh, by_pairs(rules)(path), path)
        np.testing.assert_array_equal(found["conv.kernel"], values["conv.weight"].transpose(2, 3, 1, 0))
        query = values["attend.in_proj_weight"][:16].reshape(4, 4, 16)
        np.testing.assert_array_equal(found["attend.query.kernel"], query.transpose(2, 0, 1))
        np.testing.assert_array_equal(found["norm.var"], values["norm.running_var"])


# ---------------------------------------------------------------- names and places


@pytest.mark.slow
def test_a_tie_has_its_first_name(tmp_path: Path) -> None:
    def tied(seed: int) -> nnx.Dict:
        a, b = nnx.Linear(8, 8, rngs=nnx.Rngs(seed)), nnx.Linear(8, 8, rngs=nnx.Rngs(seed))
        b.kernel = a.kernel
        return nnx.Dict(a=a, b=b)

    want, mesh = tied(1), mesh_of(data=4, model=2)
    lm.save(want, tmp_path / "tied")
    kernel, zeros = np.asarray(want.a.kernel.get_value()), np.zeros(8, np.float32)
    save_file({"b.kernel": kernel, "a.bias": zeros, "b.bias": zeros}, tmp_path / "second_name.safetensors")
    for name in ("tied", "second_name.safetensors"):
        model = tied(2)
        lm.load(model, tmp_path / name, mesh=mesh, rules=[(r"^a\.kernel", P("data")), (r"^b\.kernel", P("model"))])
        assert model.a.kernel is model.b.kernel
        assert_placed(model.a.kernel.get_value(), mesh, P("data"))
        np.testing.assert_array_equal(model.a.kernel.get_value(), kernel)


class Others(nnx.Module):
    """What a module holds that is no parameter."""

    def __init__(self, k: int) -> None:
        self.buffer, self.raw = np.full(4, k * 1.0), jnp.full((8,), k * 2.0)
        self.pair = nnx.data((jnp.full((8, 2), k * 3.0), jnp.full(4, k)))
        self.inside = nnx.Param((jnp.full(8, k * 1.0), jnp.full(4, k * 1.0)))
        self.flags, self.count = nnx.Param(jnp.array([k > 1] * 8)), nnx.BatchStat(jnp.full(8, k, jnp.int32))
        self.weak, self.complex = nnx.Param(jnp.asarray(k * 0.5)), nnx.Param(jnp.full(8, k * 1j))
        self.rngs = nnx.Rngs(k)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["o.safetensors", "o.npz", "o"])
def test_arrays_of_all_kinds(name: str, tmp_path: Path) -> None:
    mesh, model, want = mesh_of(data=4, model=2), Others(1), Others(2)
    lm.save(want, tmp_path / name)
    buffer = model.buffer
    rules = [("raw|inside.0|flags|count|complex", P("data")), ("pair.0", P("data", "model"))]
    lm.load(model, tmp_path / name, mesh=mesh, rules=rules)
    assert model.buffer is buffer and buffer.tolist() == [2.0] * 4
    inside = model.inside.get_value()
    for array in (model.raw, inside[0], model.flags.get_value(), model.count.get_value(), model.complex.get_value()):
        assert_placed(array, mesh, P("data"))
    assert_placed(model.pair[0], mesh, P("data", "model"))
    for array in (model.pair[1], inside[1], model.weak.get_value()):
        assert_placed(array, mesh, P())
    got, expected = lm.state_dict(model), lm.state_dict(want)
    assert list(got) == list(expected)
    for path, value in expected.items():
        np.testing.assert_array_equal(got[path], value, path)
    assert model.weak.get_value().weak_type == want.weak.get_value().weak_type
    assert len(model.rngs.default.key.get_value().devices()) == 1  # random state stays


def test_what_the_file_lacks_goes_to_its_place_too(tmp_path: Path) -> None:
    mesh, kernel = mesh_of(data=4, model=2), np.arange(256, dtype=np.float32).reshape(8, 32)
    save_file({"fc1.kernel": kernel}, tmp_path / "part.safetensors")
    ready, lazy = Net(1, lazy=False), Net(1)
    before = np.asarray(ready.fc2.kernel.get_value())
    for model in (ready, lazy):
        lm.load(model, tmp_path / "part.safetensors", mesh=mesh, rules=RULES, strict=False)
        assert_placed(model.fc1.kernel.get_value(), mesh, P(None, "data"))
        assert_placed(arrays(model.fc1)["bias"], mesh, P("model"))
        np.testing.assert_array_equal(model.fc1.kernel.get_value(), kernel)
    assert_placed(ready.fc2.kernel.get_value(), mesh, P(None, "data"))
    np.testing.assert_array_equal(ready.fc2.kernel.get_value(), before)
    assert type(lazy.fc1) is nnx.Linear and lm.is_lazy(lazy.fc2)


@pytest.mark.parametrize("name", FORMATS)
def test_a_hook_gets_whole_arrays(name: str, folder: Path) -> None:
    mesh, model, want = mesh_of(data=4, model=2), Net(), Net(SOURCE, lazy=False)
    kinds = set()

    def double(module: Any, entries: dict[str, Any], *_: Any) -> None:
        kinds.update(map(type, entries.values()))
        entries["fc1.kernel"] = entries["fc1.kernel"] * 2

    lm.register_load_state_dict_pre_hook(model, double)
    lm.load(model, folder / name, mesh=mesh, rules=RULES)
    want.fc1.kernel.set_value(want.fc1.kernel.get_value() * 2)
    assert_same_on_mesh(model, want, mesh, by_pairs(RULES))
    assert kinds == {np.ndarray}


# ---------------------------------------------------------------- training states

TX = {
    "adam": optax.adam(1e-2),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "steps": optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
}


def training_state(seed: int, tx: Any, *, lazy: bool) -> dict[str, Any]:
    model = Net(seed, lazy=lazy)
    optimizer = (lm.LazyOptimizer if lazy else nnx.Optimizer)(model, tx, wrt=nnx.Param)
    return {"model": model, "optimizer": optimizer, "step": seed}


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "ready"])
@pytest.mark.parametrize("name", ["state", "state.safetensors", "state.npz"])
@pytest.mark.parametrize("tx", TX)
def test_an_optimizers_state_goes_where_its_parameter_goes(tx: str, name: str, lazy: bool, tmp_path: Path) -> None:
    mesh, run = mesh_of(data=4, model=2), training_state(4, TX[tx], lazy=False)
    again = training_state(1, TX[tx], lazy=lazy)
    for i, (_, v) in enumerate(nnx.to_flat_state(nnx.state(run["optimizer"]))):
        v.set_value(jnp.asarray(np.arange(v.get_value().size).reshape(v.get_value().shape) + i, v.get_value().dtype))
    lm.save(run, tmp_path / name)
    rules = [(rf"^{p}" if p == "fc1.kernel" else p, s) for p, s in [("fc1.kernel", P("model", "data")), *RULES]]
    lm.load(again, tmp_path / name, mesh=mesh, rules=rules)
    assert again["step"] == 4 and type(again["optimizer"]) is nnx.Optimizer
    assert_same_on_mesh(again["model"], run["model"], mesh, by_pairs(rules))
    shapes = {path: array.shape for path, array in arrays(run["model"]).items()}

    def spec_of(path: str, shape: tuple[int, ...]) -> P:
        parameter = ".".join(path.split(".")[-2:])
        return by_pairs(rules)(parameter) if shapes.get(parameter) == shape else P()

    assert_same_on_mesh(again["optimizer"], run["optimizer"], mesh, spec_of)


def test_an_optimizer_beside_its_model_in_a_module_and_alone(tmp_path: Path) -> None:
    class Trainer(nnx.Module):
        def __init__(self, seed: int) -> None:
            self.net = Net(seed, lazy=False)
            self.optimizer = nnx.Optimizer(self.net, optax.adam(1e-2), wrt=nnx.Param)

    mesh, want, got = mesh_of(data=4, model=2), Trainer(3), Trainer(1)
    lm.save(want, tmp_path / "t.npz")
    lm.load(got, tmp_path / "t.npz", mesh=mesh, rules=[(r"^net\.fc1\.kernel", P(None, "data"))])
    assert_placed(got.net.fc1.kernel.get_value(), mesh, P(None, "data"))
    assert_placed(got.optimizer.opt_state[0].mu.fc1.kernel.get_value(), mesh, P(None, "data"))
    assert_placed(got.optimizer.opt_state[0].mu.fc2.kernel.get_value(), mesh, P())
    lm.save(want.optimizer, tmp_path / "o.npz")
    lm.load(got.optimizer, tmp_path / "o.npz", mesh=mesh, rules=[(r"^fc1\.kernel", P("data"))])
    assert_placed(got.optimizer.opt_state[0].nu.fc1.kernel.get_value(), mesh, P("data"))


class Named(nnx.Module):
    """Parameters of one shape, whose names end alike; and a tie that nnx.state has by its other name."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.block = nnx.Dict(proj=nnx.Linear(8, 8, rngs=rngs))
        self.proj = nnx.Linear(8, 8, rngs=rngs)
        self.z = nnx.Linear(8, 8, rngs=rngs)
        self.again = nnx.Linear(8, 8, rngs=rngs)
        self.again.kernel = self.z.kernel


@pytest.mark.parametrize("begin", ["", "net."])
def test_an_optimizers_state_goes_where_the_parameter_of_its_whole_name_goes(begin: str, tmp_path: Path) -> None:
    class Trainer(nnx.Module):
        def __init__(self) -> None:
            self.net = Named()
            self.optimizer = nnx.Optimizer(self.net, optax.adam(1e-2), wrt=nnx.Param)

    def state() -> Any:
        trainer = Trainer()
        return trainer if begin else {"model": trainer.net, "optimizer": trainer.optimizer}

    mesh, got = mesh_of(data=4, model=2), state()
    lm.save(state(), tmp_path / "s.npz")
    places = {"block.proj": P("data"), "proj": P(None, "model"), "z": P("model", "data")}
    lm.load(got, tmp_path / "s.npz", mesh=mesh, rules=[(rf"^{begin}{n}\.kernel", s) for n, s in places.items()])
    net, optimizer = (got.net, got.optimizer) if begin else (got["model"], got["optimizer"])
    for name, spec in places.items():
        path = [*name.split("."), "kernel"]
        for held in (net, optimizer.opt_state[0].mu, optimizer.opt_state[0].nu):
            keys = path if held is net or name != "z" else ["again", "kernel"]
            value = functools.reduce(lambda v, k: v[k] if hasattr(v, "keys") else getattr(v, k), keys, held)
            assert_placed(value.get_value(), mesh, spec, name)


def test_two_models_of_one_state(tmp_path: Path) -> None:
    def state(seed: int) -> dict[str, Any]:
        return {"nets": {"a": Net(seed, lazy=False), "b": Net(seed + 1, lazy=False)}, "ema": {"w": jnp.full(8, seed)}}

    mesh, want, got = mesh_of(data=4, model=2), state(1), state(5)
    lm.save(want, tmp_path / "two")
    rules = [(r"^fc1\.kernel", P("model")), ("^w$", P("data"))]
    lm.load(got, tmp_path / "two", mesh=mesh, rules=rules)
    for key in "ab":
        assert_same_on_mesh(got["nets"][key], want["nets"][key], mesh, by_pairs(rules))
    assert_placed(got["ema"]["w"], mesh, P("data"))


# ---------------------------------------------------------------- nothing by halves


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "ready"])
@pytest.mark.parametrize("name", ["model.safetensors", "model.npz", "packed.npz", "orbax"])
def test_numbers_that_do_not_fit_are_found_in_their_parts(name: str, lazy: bool, tmp_path: Path) -> None:
    source = Net(3, lazy=False)
    source.fc2.kernel.set_value(source.fc2.kernel.get_value().at[31, 15].set(1e30))
    assert source.fc1.bias is not None
    source.fc1.bias.set_value(jnp.full(32, -1e20))
    write_all(tmp_path, source)
    model = Net(1, lazy=lazy)
    before = arrays(model) if not lazy else {}
    with pytest.raises(lm.StateDictError) as error:
        lm.load(model, tmp_path / name, mesh=mesh_of(data=4, model=2), rules=RULES, dtype=jnp.float16)
    text = str(error.value)
    assert text.endswith(
        f"fc1.bias ({'UninitializedParameter' if lazy else 'Param'})\n"
        "  got:    f32[32]\n"
        "  needed: numbers of a size that f16 has\n"
        "  write:  dtype=\"file\"  # each parameter gets the dtype that it has there\n"
        f"fc2.kernel ({'UninitializedParameter' if lazy else 'Param'})\n"
        "  got:    f32[32,16]\n"
        "  needed: numbers of a size that f16 has\n"
        "  write:  dtype=\"file\"  # each parameter gets the dtype that it has there"
    ), text
    assert lm.is_lazy(model.fc1) == lazy and all(a is before[n] for n, a in (arrays(model) if before else {}).items())


def test_booleans_that_are_none_are_found_in_their_parts(tmp_path: Path) -> None:
    model = nnx.Dict(flags=nnx.Param(jnp.zeros(8, bool)))
    save_file({"flags": np.arange(8, dtype=np.uint8)}, tmp_path / "f.safetensors")
    raw = (tmp_path / "f.safetensors").read_bytes()
    (tmp_path / "f.safetensors").write_bytes(raw.replace(b'"U8"', b'"BOOL"').replace(b" ", b"", 2))
    with pytest.raises(lm.CheckpointError, match="bytes other than 0 and 1"):
        lm.load(model, tmp_path / "f.safetensors", mesh=mesh_of(data=8), rules=[("flags", P("data"))])
    assert not model.flags.get_value().any()


@pytest.mark.parametrize(
    "options, told",
    [
        ({"mesh": jax.sharding.AbstractMesh((8,), ("d",))}, "an AbstractMesh, which has no devices"),
        ({"rules": RULES}, "rules without a mesh"),
        ({"mesh": 3}, "a int"),
    ],
    ids=["abstract", "rules", "number"],
)
def test_what_is_no_mesh(options: dict[str, Any], told: str, folder: Path) -> None:
    model = Net()
    with pytest.raises(lm.LazyError, match=told):
        lm.load(model, folder / "model.npz", **options)
    assert lm.is_lazy(model.fc1)


def test_a_folder_that_is_replaced_while_it_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lazymods.state import load as loading

    shutil.copytree(folder / "orbax", tmp_path / "checkpoint")
    shutil.copytree(folder / "orbax", tmp_path / "other")
    plan = loading.make_plan

    def replace(*args: Any, **kwargs: Any) -> Any:
        os.rename(tmp_path / "checkpoint", tmp_path / "old")
        os.rename(tmp_path / "other", tmp_path / "checkpoint")
        return plan(*args, **kwargs)

    monkeypatch.setattr(loading, "make_plan", replace)
    model = Net(1, lazy=False)
    before = arrays(model)
    with pytest.raises(lm.CheckpointError, match="another save has replaced it while it was read"):
        lm.load(model, tmp_path / "checkpoint", mesh=mesh_of(data=4, model=2), rules=RULES)
    assert all(array is before[name] for name, array in arrays(model).items())


@pytest.mark.parametrize("how", ["file", "mesh", "entries"])
def test_a_load_inside_of_a_transform_leaves_values_where_they_are(folder: Path, how: str) -> None:
    mesh, model, want = mesh_of(data=4, model=2), Net(1), Net(SOURCE, lazy=False)
    lm.load(model, folder / "model.npz", mesh=mesh, rules=RULES)
    nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model)))

    @nnx.jit
    def load(model: Net) -> None:
        if how == "entries":
            lm.load_state_dict(model, lm.state_dict(want))
        elif how == "file":
            lm.load(model, folder / "model.npz")
        else:
            lm.load(model, folder / "model.npz", mesh=mesh, rules=RULES)

    load(model)
    assert_same_on_mesh(model, want, mesh, by_pairs(RULES))
