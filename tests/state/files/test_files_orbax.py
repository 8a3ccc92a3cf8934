"""Orbax folders: what the installed Orbax writes is read bit for bit; folders that are damaged are refused by name."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_files import assert_same, refusal, values
from flax import nnx

import lazymods as lm
from lazymods.state.files import stored
from lazymods.state.files.opening import open_checkpoint
from lazymods.state.files.orbax import is_orbax

KERNEL = np.arange(12, dtype=np.float32).reshape(3, 4)


def standard(path: Path, tree: Any) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def pytree(path: Path, tree: Any, **options: Any) -> Path:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, tree)
    return path


WRITERS: dict[str, Callable[[Path, Any], Path]] = {
    "standard": standard,
    "pytree": pytree,
    "files": lambda path, tree: pytree(path, tree, use_ocdbt=False),
    "zarr3": lambda path, tree: pytree(path, tree, use_zarr3=True),
}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Any:
    """Reading logs nothing above what Orbax logs while it writes."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    yield
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("writer", WRITERS)
def test_trees(tmp_path: Path, writer: str) -> None:
    tree = {
        "fc": {"kernel": jnp.asarray(KERNEL), "bias": np.ones(4, np.float16)},
        "blocks": [{"scale": jnp.ones(2, jnp.bfloat16)}, {"scale": jnp.zeros((), jnp.int8)}],
        "empty": {},
        "nothing": None,
        "pair": (np.asarray([True, False]),),
    }
    path = WRITERS[writer](tmp_path / "m", tree)
    assert is_orbax(path)
    want = {
        "blocks.0.scale": np.ones(2, ml_dtypes.bfloat16),
        "blocks.1.scale": np.zeros((), np.int8),
        "fc.bias": np.ones(4, np.float16),
        "fc.kernel": KERNEL,
        "pair.0": np.asarray([True, False]),
    }
    got = values(path)
    assert_same(dict(sorted(got.items())), want)


@pytest.mark.parametrize("writer", WRITERS)
def test_paths_are_followed_as_the_system_does(tmp_path: Path, writer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """tensorstore takes no ``..`` in a path; what follows a link is beside what the link leads to."""
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "link").symlink_to("deep/er")
    WRITERS[writer](tmp_path / "deep" / "m", {"x": KERNEL})
    WRITERS[writer](tmp_path / "m", {"x": KERNEL + 1})
    monkeypatch.chdir(tmp_path / "deep" / "er")
    for path in ("../m", "..//./m/", "../../link/../m", str(tmp_path / "link" / ".." / "m")):
        assert_same(values(Path(path)), {"x": KERNEL})


KINDS = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "uint64", "complex64")


@pytest.mark.parametrize(  # zarr3 has no 8-bit floats
    "writer, kind", [(w, k) for w in WRITERS for k in KINDS if not (w == "zarr3" and k.startswith("float8"))]
)
def test_dtypes(tmp_path: Path, writer: str, kind: str) -> None:
    value = np.arange(6).astype(getattr(ml_dtypes, kind, None) or kind).reshape(2, 3)
    assert_same(values(WRITERS[writer](tmp_path / "m", {"x": value})), {"x": value})


def test_a_state_of_nnx(tmp_path: Path) -> None:
    class Scale(nnx.Module):
        def __init__(self) -> None:
            self.value = nnx.Param(jnp.ones(2))

    linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    state = nnx.state(nnx.Dict(fc=linear, scale=Scale()))
    want = {
        "fc.bias": np.zeros(4, ml_dtypes.bfloat16),
        "fc.kernel": np.asarray(linear.kernel[...]),
        "scale.value": np.ones(2, np.float32),
    }
    assert_same(values(standard(tmp_path / "state", state)), want)
    assert_same(values(standard(tmp_path / "dict", nnx.to_pure_dict(state))), want)
    whole = values(standard(tmp_path / "whole", {"model": state, "step": 3}))
    assert_same(whole, {f"model.{name}": value for name, value in want.items()} | {"step": np.asarray(3)})


def test_numbers_are_arrays_without_axes(tmp_path: Path) -> None:
    got = values(pytree(tmp_path / "m", {"i": 3, "f": 0.5, "b": True, "n": np.float32(2)}))
    assert_same(
        dict(sorted(got.items())),
        {"b": np.asarray(True), "f": np.asarray(0.5), "i": np.asarray(3), "n": np.asarray(2, np.float32)},
    )


def test_sharded_arrays(tmp_path: Path) -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    value = jax.device_put(np.arange(8.0, dtype=np.float32), sharding)
    assert_same(values(standard(tmp_path / "m", {"x": value})), {"x": np.arange(8, dtype=np.float32)})


def test_a_step_of_a_manager(tmp_path: Path) -> None:
    save, one = ocp.args, ocp.args.StandardSave({"x": KERNEL})
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(5, args=one)
        manager.wait_until_finished()
    with ocp.CheckpointManager(tmp_path / "items") as manager:
        manager.save(6, args=save.Composite(a=one, b=save.JsonSave({"lr": 1})))
        manager.save(7, args=save.Composite(a=one, c=save.StandardSave({"y": KERNEL})))
        manager.wait_until_finished()
    assert_same(values(tmp_path / "run" / "5"), {"x": KERNEL})
    assert_same(values(tmp_path / "items" / "6"), {"x": KERNEL})
    refusal(tmp_path / "items" / "7", "several items: a, c")
    refusal(tmp_path / "run", "a folder without a checkpoint, which holds 5")


def test_aliases(tmp_path: Path) -> None:
    def write(name: str, text: bytes) -> Path:
        return standard(tmp_path / name, {"x": KERNEL, "__aliases__": np.frombuffer(text, np.uint8)})

    checkpoint = open_checkpoint(write("good", b'{"y": "x"}'))
    assert (list(checkpoint.tensors), checkpoint.aliases) == (["x"], {"y": "x"})
    refusal(write("absent", b'{"y": "z"}'), "another name for z")
    refusal(write("taken", b'{"x": "x"}'), "another name for x")
    refusal(write("broken", b"{"), "__aliases__", "no JSON")
    refusal(write("list", b"[]"), "__aliases__")
    refusal(standard(tmp_path / "floats", {"x": KERNEL, "__aliases__": np.zeros(2)}), "__aliases__")


def test_shapes_are_known_before_values_are_read(tmp_path: Path) -> None:
    path = WRITERS["files"](tmp_path / "m", {"x": KERNEL})
    (path / "x" / "0.0").unlink()
    tensor = open_checkpoint(path).tensors["x"]
    assert (tensor.shape, tensor.dtype, tensor.nbytes) == ((3, 4), np.float32, 48)
    refusal(path, "m: x\n")


def test_texts_are_refused_by_name(tmp_path: Path) -> None:
    refusal(pytree(tmp_path / "m", {"x": KERNEL, "a": {"note": "text"}}), "m: a.note\n", "a string")


# ---------------------------------------------------------------- damaged folders


def edit(path: Path, change: Callable[[Any], Any]) -> Path:
    file = path / "_METADATA"
    body = json.loads(file.read_text())
    changed = change(body)
    body = body if changed is None else changed
    file.write_text(body if isinstance(body, str) else json.dumps(body))
    return path


def entry(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def edit_entry(body: Any) -> None:
        change(body["tree_metadata"]["('a', 'x')"])

    return edit_entry


def rename(*keys: Any) -> Callable[[Any], Any]:
    return entry(lambda e: e.update(key_metadata=[{"key": key, "key_type": 2} for key in keys]))


BAD = {
    "no JSON": lambda body: "{ not json",
    "empty": lambda body: " ",
    "a list": lambda body: [],
    "deep": lambda body: "[" * 100_000,
    "twice": lambda body: '{"tree_metadata": {}, "tree_metadata": {}}',
    "no tree": lambda body: {"use_ocdbt": True},
    "tree a list": lambda body: body.update(tree_metadata=[]),
    "empty tree": lambda body: body.update(tree_metadata={}),
    "entry a number": lambda body: body["tree_metadata"].update({"('a', 'x')": 3}),
    "no keys": entry(lambda e: e.pop("key_metadata")),
    "keys empty": entry(lambda e: e.update(key_metadata=[])),
    "keys numbers": rename(1, 2),
    "kind a number": entry(lambda e: e["value_metadata"].update(value_type=3)),
    "kind unknown": entry(lambda e: e["value_metadata"].update(value_type="Module")),
    "skip a text": entry(lambda e: e["value_metadata"].update(skip_deserialize="no")),
    "other name": rename("a", "z"),
    "another's name": rename("y"),
    "out of the folder": rename("a/../../secret"),
    "out of the folder by dots": rename("..", "secret"),
    "zarr3": lambda body: body.update(use_zarr3=True),
    "files": lambda body: body.update(use_ocdbt=False),
}


@pytest.mark.parametrize(  # that the folder is one of plain files is no damage of such a folder
    "name, writer", [(n, w) for n in BAD for w in ("standard", "files") if (n, w) != ("files", "files")]
)
def test_damaged_metadata(tmp_path: Path, name: str, writer: str) -> None:
    path = WRITERS[writer](tmp_path / "m", {"a": {"x": KERNEL}, "y": KERNEL})
    refusal(edit(path, BAD[name]))


def test_another_folder_is_not_reached(tmp_path: Path) -> None:
    WRITERS["files"](tmp_path / "secret", {"x": KERNEL})
    path = WRITERS["files"](tmp_path / "m", {"a": {"x": KERNEL}})
    for keys in (("../secret/x",), ("a/../../secret/x",), ("/etc",), ("a\\..\\x",), ("a\0",)):
        refusal(edit(path, rename(*keys)))


@pytest.mark.parametrize("writer", WRITERS)
def test_missing_and_cut_files(tmp_path: Path, writer: str) -> None:
    good = WRITERS[writer](tmp_path / "good", {"a": {"x": KERNEL}})
    needed = 0
    for file in sorted(f for f in good.rglob("*") if f.is_file()):
        for cut in (None, 0, 1, file.stat().st_size // 2):
            path = tmp_path / "m"
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(good, path)
            victim = path / file.relative_to(good)
            if cut is None:
                victim.unlink()
            else:
                victim.write_bytes(victim.read_bytes()[:cut])
            try:
                assert_same(values(path), {"a.x": KERNEL})
            except stored.CheckpointError:
                needed += 1
                refusal(path)
    assert needed >= 8  # the metadata and the values; not what Orbax keeps for itself


def test_a_folder_without_its_metadata(tmp_path: Path) -> None:
    path = standard(tmp_path / "m", {"x": KERNEL})
    (path / "_METADATA").unlink()
    assert refusal(path) == (
        "m\n"
        "  got:    an Orbax folder without its _METADATA\n"
        "  needed: all of what Orbax wrote: the folder is incomplete\n"
        f"  write:  lm.load(model, '{path}')  # a sound copy of the file"
    )


def zarray(path: Path, **changes: Any) -> Path:
    file = path / "a.x" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [3, 5], "chunks": [3, 5]},
        {"shape": [10**9, 10**9]},
        {"shape": [-3, 4]},
        {"chunks": [10**6, 10**6]},
        {"dtype": "|O"},
        {"dtype": "<U4"},
        {"compressor": {"id": "unknown"}},
    ],
    ids=str,
)
def test_arrays_that_lie(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = WRITERS["files"](tmp_path / "m", {"a": {"x": KERNEL}})
    refusal(zarray(path, **changes))


def test_bombs_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = standard(tmp_path / "m", {"x": np.zeros(10**6)})
    assert_same(values(path), {"x": np.zeros(10**6)})
    monkeypatch.setattr(stored, "MAX_UNPACKED_BYTES", 1000)
    refusal(path, "8,000,000 bytes when unpacked")
    lm.save({"x": np.ones(3)}, path)  # which replaces it all the same
    assert_same(values(path), {"x": np.ones(3)})
