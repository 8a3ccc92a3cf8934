"""``save`` of models over several devices: the same files, one parameter at a time, and what is done to them after."""

import gc
import hashlib
import os
import socket
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from on_mesh import P, arrays, assert_same_on_mesh, by_pairs, mesh_of
from safetensors.numpy import load_file

import lazymods as lm
from lazymods._spread import on_host

RULES = [("kernel", P(None, "data")), ("embedding", P(("data", "model")))]


def model_of(seed: int) -> nnx.Dict:
    rngs = nnx.Rngs(seed)
    embed = nnx.Embed(64, 8, param_dtype=jnp.bfloat16, rngs=rngs)
    return nnx.Dict(embed=embed, fc=nnx.Linear(8, 32, rngs=rngs), scale=nnx.Param(jnp.asarray(seed * 0.5)))


def on_mesh(tmp_path: Path, seed: int = 3) -> tuple[nnx.Dict, nnx.Dict, Any]:
    """The model over eight devices, the same on one, and the mesh."""
    mesh, one, spread = mesh_of(data=4, model=2), model_of(seed), model_of(0)
    lm.save(one, tmp_path / "one.npz")
    lm.load(spread, tmp_path / "one.npz", mesh=mesh, rules=RULES)
    assert_same_on_mesh(spread, one, mesh, by_pairs(RULES))
    return spread, one, mesh


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_the_file_is_that_of_one_device(suffix: str, tmp_path: Path) -> None:
    spread, one, _ = on_mesh(tmp_path)
    lm.save(spread, tmp_path / f"spread{suffix}")
    lm.save(one, tmp_path / f"whole{suffix}")
    read = load_file if suffix == ".safetensors" else np.load
    got, want = dict(read(tmp_path / f"spread{suffix}")), dict(read(tmp_path / f"whole{suffix}"))
    assert list(got) == list(want)
    assert all(np.asarray(got[n]).tobytes() == np.asarray(want[n]).tobytes() for n in want)
    assert {n: np.asarray(v).shape for n, v in got.items()} == {n: np.asarray(v).shape for n, v in want.items()}


@pytest.mark.slow
def test_what_was_brought_to_the_host_is_not_kept(tmp_path: Path) -> None:
    """As JAX keeps what ``numpy.asarray`` gives; then a save would have all of the model on the host."""
    spread, _, _ = on_mesh(tmp_path)
    for array in arrays(spread).values():
        values = on_host(array)
        np.testing.assert_array_equal(values, array.astype(values.dtype))
        gone = weakref.ref(values)
        del values
        gc.collect()
        assert gone() is None


@pytest.mark.slow
@pytest.mark.parametrize("names", [("a.safetensors", "b"), ("a", "b.npz")], ids=str)
def test_from_one_mesh_to_another(names: tuple[str, str], tmp_path: Path) -> None:
    spread, one, _ = on_mesh(tmp_path)
    other, rules = mesh_of(x=2, y=2, z=2), [("kernel", P("z", ("x", "y"))), ("embedding", P("y"))]
    lm.save(spread, tmp_path / names[0])
    moved = model_of(1)
    lm.load(moved, tmp_path / names[0], mesh=other, rules=rules)
    assert_same_on_mesh(moved, one, other, by_pairs(rules))
    lm.save(moved, tmp_path / names[1])
    back = model_of(2)
    lm.load(back, tmp_path / names[1])
    for name, array in arrays(one).items():
        np.testing.assert_array_equal(arrays(back)[name], array)
        assert len(arrays(back)[name].devices()) == 1


@pytest.mark.slow
def test_a_save_in_the_background_has_the_values_of_its_beginning(tmp_path: Path) -> None:
    spread, one, mesh = on_mesh(tmp_path)
    step = jax.jit(lambda values: jax.tree.map(lambda x: x * 0, values), donate_argnums=0)
    pending = lm.save(spread, tmp_path / "later", wait=False)
    zeros = step({n: a for n, a in arrays(spread).items()})  # which may take the memory
    assert pending is not None
    pending.wait()
    assert all(float(jnp.abs(z.astype(jnp.float32)).sum()) == 0 for z in zeros.values())
    again = model_of(1)
    lm.load(again, tmp_path / "later", mesh=mesh, rules=RULES)
    assert_same_on_mesh(again, one, mesh, by_pairs(RULES))


@pytest.mark.parametrize("spec", [P(), P("data"), P("model")], ids=str)
def test_a_program_that_is_given_the_memory_of_a_file_writes_elsewhere(spec: P, tmp_path: Path) -> None:
    mesh, model = mesh_of(data=4, model=2), nnx.Dict(w=nnx.Param(jnp.zeros((64, 1024))))
    want = np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024)
    lm.save(nnx.Dict(w=nnx.Param(jnp.asarray(want))), tmp_path / "w.safetensors")
    before = hashlib.sha256((tmp_path / "w.safetensors").read_bytes()).digest()
    lm.load(model, tmp_path / "w.safetensors", mesh=mesh, rules=[("w", spec)])
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = model.w.get_value()
    for i in (1, 2, 3):  # copies on several devices may be one piece of memory
        array = add(array)
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, want[shard.index] + i)
    assert hashlib.sha256((tmp_path / "w.safetensors").read_bytes()).digest() == before


def test_threads_that_save_and_load(tmp_path: Path) -> None:
    spread, one, mesh = on_mesh(tmp_path)
    failed: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for name in (f"{i}.safetensors", f"{i}", f"{i}.npz"):
                lm.save(spread, tmp_path / name)
                model = model_of(i)
                lm.load(model, tmp_path / name, mesh=mesh, rules=RULES)
                assert_same_on_mesh(model, one, mesh, by_pairs(RULES))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


ALONE = """
import sys, jax
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", num_processes=2, process_id=0, initialization_timeout=3)
"""


@pytest.mark.slow
def test_a_process_that_is_missing_at_the_start() -> None:
    """JAX itself gives up: there is nothing to wait for afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ALONE, str(port)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0 and "DEADLINE_EXCEEDED" in done.stderr, done.stderr[-2000:]
