"""One of several processes: does jobs by name, and writes what they return, and the shards that it holds."""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

import lazymods as lm

P = PartitionSpec
RULES = [("fc1.kernel", P(None, "data")), ("fc2.kernel", P(("data", "model"))), ("fc1.bias", P("model"))]
JOBS: dict[str, Any] = {}


class MLP(nnx.Module):
    """Two layers: 8 to 32 to 16 features."""

    def __init__(self, seed: int, *, lazy: bool = True) -> None:
        rngs = nnx.Rngs(seed)
        self.fc1 = lm.LazyLinear(32, rngs=rngs) if lazy else nnx.Linear(8, 32, rngs=rngs)
        self.fc2 = lm.LazyLinear(16, rngs=rngs) if lazy else nnx.Linear(32, 16, rngs=rngs)


def job(function: Any) -> Any:
    """Let a function be asked for by its name."""
    JOBS[function.__name__] = function
    return function


def all_devices() -> Mesh:
    """A row for each process."""
    return Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("data", "model"))


def write_shards(folder: Path, tag: str, model: Any) -> None:
    """Write what this process holds of each array: ``{'name|begins and ends': values}``."""
    out = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.RngState))):
        array = variable.get_raw_value()
        for shard in array.addressable_shards:
            ends = [s.indices(n)[:2] for s, n in zip(shard.index, array.shape, strict=True)]
            out[json.dumps([".".join(map(str, path)), ends, shard.device.id])] = np.asarray(shard.data)
    np.savez(folder / f"{tag}-{jax.process_index()}.npz", **out)


@job
def files(folder: Path) -> Any:
    """Load each format, save all of it with Orbax, now and in the background, and load that on another mesh."""
    mesh = all_devices()
    for name in ("model.safetensors", "model.npz", "orbax"):
        model = MLP(1)
        lm.load(model, folder / name, mesh=mesh, rules=RULES)
        write_shards(folder, name.partition(".")[0] + name.partition(".")[2], model)
    lm.save(model, folder / "saved")
    # in each process, as soon as the save returns
    seen: list[Any] = [sorted(p.name for p in folder.iterdir() if "saved" in p.name)]
    lm.save(model, folder / "saved")
    pending = lm.save(model, folder / "later", wait=False)
    assert pending is not None
    pending.wait()
    seen.append([(folder / name).is_dir() for name in ("saved", "later")])
    other = Mesh(np.array(jax.devices()[::-1]), ("all",))
    for name in ("saved", "later"):
        again = MLP(2)
        lm.load(again, folder / name, mesh=other, rules=[("kernel", P("all"))])
        write_shards(folder, f"{name}_again", again)
    return seen


@job
def refused(folder: Path) -> Any:
    """A file of one host, of what several hold."""
    model, told = MLP(1), []
    lm.load(model, folder / "model.safetensors", mesh=all_devices(), rules=RULES)
    for suffix in (".safetensors", ".npz"):
        try:
            lm.save(model, folder / f"refused{suffix}")
        except lm.CheckpointError as error:
            told.append(str(error))
    return told


@job
def state(folder: Path) -> Any:
    """A training state, with what each process has for itself: numbers, random keys, counts."""
    mesh = all_devices()

    def fresh(seed: int) -> dict[str, Any]:
        model = MLP(seed)
        optimizer = lm.LazyOptimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        return {"model": model, "optimizer": optimizer, "rngs": nnx.Rngs(seed), "step": 0, "name": ""}

    first = fresh(1)
    lm.load(first["model"], folder / "model.safetensors", mesh=mesh, rules=RULES)
    first["optimizer"].make_state(first["model"])
    first |= {"rngs": nnx.Rngs(dropout=7), "step": 3, "name": "run"}
    lm.save(first, folder / "state")
    again = fresh(2) | {"rngs": nnx.Rngs(dropout=0)}
    lm.load(again, folder / "state", mesh=mesh, rules=RULES)
    write_shards(folder, "state", again["model"])
    placed = {
        ".".join(map(str, p)): str(v.get_raw_value().sharding.spec)
        for p, v in nnx.to_flat_state(nnx.state(again["optimizer"]))
    }
    data = [jax.random.key_data(r["rngs"].dropout.key.get_value()).tolist() for r in (first, again)]
    return [again["step"], again["name"], data[0] == data[1], placed]


@job
def unplaceable(folder: Path) -> Any:
    """A save whose folder the first process cannot put in its place."""
    from lazymods.state.files import replacing

    model = MLP(1)
    lm.load(model, folder / "model.safetensors", mesh=all_devices(), rules=RULES)
    lm.save(model, folder / "kept")
    ordinary, told = replacing.Room.put_in_place, []

    def fail(self: Any, check: Any) -> None:
        raise OSError(28, "No space left on device")

    for _ in range(2):
        replacing.Room.put_in_place = fail
        try:
            lm.save(model, folder / "kept")
        except lm.CheckpointError as error:
            told.append(error.problems[0].got)
        replacing.Room.put_in_place = ordinary
    lm.save(model, folder / "kept")
    again = MLP(2)
    lm.load(again, folder / "kept", mesh=all_devices(), rules=RULES)
    write_shards(folder, "kept", again)
    return told


@job
def absent(folder: Path) -> Any:
    """A save that the last process has no part in."""
    from lazymods.state import orbax_saving

    orbax_saving.MISSING_AFTER = 2.0
    model = MLP(1)
    lm.load(model, folder / "model.safetensors", mesh=all_devices(), rules=RULES)
    told = ""
    if jax.process_index() < jax.process_count() - 1:
        try:
            lm.save(model, folder / "absent")
        except lm.LazyError as error:
            told = str(error)
    multihost_utils.sync_global_devices("told")
    return [told, (folder / "absent").exists()]


def main() -> None:
    """Do what the arguments say: a folder, the process's number, how many there are, a port, and jobs."""
    folder, rank, count, port, *names = sys.argv[1:]
    jax.distributed.initialize(
        f"127.0.0.1:{port}", num_processes=int(count), process_id=int(rank), local_device_ids=[0, 1]
    )
    results = {}
    for name in names:
        try:
            results[name] = JOBS[name](Path(folder))
        except Exception as error:
            traceback.print_exc()
            results[name] = f"{type(error).__name__}: {error}"
    Path(folder, f"result-{rank}.json").write_text(json.dumps(results))
    sys.stdout.flush()
    jax.distributed.shutdown()  # waits for the others
    os._exit(0)


if __name__ == "__main__":
    main()
