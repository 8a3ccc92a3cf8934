"""Loading onto the eight virtual devices of one host, beside a plain load of the same file.

The files lie in the page cache. From a lazy model to the last array that is there and has been touched, in fresh
interpreters, taken in turns; and the peak of resident memory over the file's size, mapped pages and all (Linux).
"one device" has no mesh; the others say how the kernels are split. A file of ``lm.save`` is taken over as it lies
where parts are rows or copies; columns are copied, as is everything of a stock file, whose tensors are not aligned.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CODE = """
import json, sys, time
import jax, numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec as P
import lazymods as lm

how, path, layers, width = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
jax.device_put(np.zeros(1, np.float32)).block_until_ready()
nnx.Rngs(0)  # compiles Flax's own kernels
specs = {"rows": P(("a", "b", "c")), "columns": P(None, ("a", "b", "c")), "both": P(("a", "b"), "c"), "copies": P()}
mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
on_mesh = {} if how == "one device" else {"mesh": mesh, "rules": [("kernel", specs[how])]}

def memory(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) << 10

model = nnx.Sequential(*(lm.LazyLinear(width, rngs=nnx.Rngs(0)) for _ in range(layers)))
open("/proc/self/clear_refs", "w").write("5")
before, start = memory("VmRSS"), time.perf_counter()
lm.load(model, path, **on_mesh)
arrays = jax.block_until_ready(jax.tree.leaves(nnx.state(model, nnx.Param)))
total = sum(float(np.abs(np.asarray(s.data).reshape(-1)[::1024]).sum()) for a in arrays
            for s in a.addressable_shards if s.replica_id == 0)
print(json.dumps([time.perf_counter() - start, memory("VmHWM") - before]))
"""
WAYS = ("one device", "rows", "columns", "both", "copies")


def run(how: str, path: Path, layers: int, width: int) -> list[float]:
    """Run one way in a fresh interpreter."""
    flags = "--xla_force_host_platform_device_count=8"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-c", CODE, how, str(path), str(layers), str(width)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def write(folder: Path, layers: int, width: int) -> dict[str, Path]:
    """Write one model in every format that is read in parts."""
    import numpy as np
    from flax import nnx
    from safetensors.numpy import save_file

    import lazymods as lm

    rng, tensors = np.random.default_rng(0), {}
    for i in range(layers):
        tensors[f"layers.{i}.kernel"] = rng.standard_normal((width, width), dtype=np.float32)
        tensors[f"layers.{i}.bias"] = rng.standard_normal(width, dtype=np.float32)
    save_file(tensors, folder / "stock.safetensors")
    model = nnx.Sequential(*(lm.LazyLinear(width, rngs=nnx.Rngs(0)) for _ in range(layers)))
    lm.load(model, folder / "stock.safetensors")
    for name in ("saved.safetensors", "saved.npz", "orbax"):
        lm.save(model, folder / name)
    return {name: folder / name for name in ("stock.safetensors", "saved.safetensors", "saved.npz", "orbax")}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = write(Path(folder), options.layers, options.width)
        size = files["stock.safetensors"].stat().st_size
        print(f"load, {size / 2**20:.0f} MiB\n{'':30} seconds  ratio  peak")
        for name, path in files.items():
            runs: dict[str, list[list[float]]] = {how: [] for how in WAYS}
            for _ in range(options.rounds):
                for how in WAYS:
                    runs[how].append(run(how, path, options.layers, options.width))
            base = statistics.median(r[0] for r in runs["one device"])
            for how, rows in runs.items():
                seconds, peak = (statistics.median(r[i] for r in rows) for i in range(2))
                print(f"{name:18} {how:11} {seconds:7.3f} {seconds / base:6.2f} {peak / size:5.2f}")


if __name__ == "__main__":
    main()
