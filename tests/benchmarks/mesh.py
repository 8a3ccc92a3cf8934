"""A model over the eight virtual devices of one host, beside the same on one device.

``materialize``: from a lazy model to the last array that is there, in fresh interpreters, taken in turns. "one device"
has no mesh; "rows", "columns" and "both" say how the kernels are split. Compilations are those of JAX's own count,
the peak is that of resident memory over the model's bytes (Linux).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

CODE = """
import json, sys, time
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec as P
import lazymods as lm

how, layers, width = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.device_put(np.zeros(1, np.float32)).block_until_ready()
specs = {"rows": P(("a", "b", "c")), "columns": P(None, ("a", "b", "c")), "both": P(("a", "b"), "c")}
on_mesh = {}
if how != "one device":
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
    on_mesh = {"mesh": mesh, "rules": [("kernel", specs[how])]}
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compiled.append(event) if event == "/jax/core/compile/backend_compile_duration" else None
)

def memory(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) << 10

model = nnx.Sequential(*(lm.LazyLinear(width + 8 * i, rngs=nnx.Rngs(i)) for i in range(layers)))
open("/proc/self/clear_refs", "w").write("5")
before = memory("VmRSS")
start = time.perf_counter()
report = lm.materialize(model, jax.ShapeDtypeStruct((1, width), jnp.float32), **on_mesh)
jax.block_until_ready(jax.tree.leaves(nnx.state(model, nnx.Param)))
seconds = time.perf_counter() - start
peak = (memory("VmHWM") - before) / report.total_bytes
total = sum(float(np.abs(np.asarray(s.data)[0]).sum()) for a in jax.tree.leaves(nnx.state(model, nnx.Param))
            for s in a.addressable_shards if s.replica_id == 0 and s.index[0].start in (None, 0))
print(json.dumps([seconds, len(compiled), peak, total, report.total_bytes]))
"""
WAYS = ("one device", "rows", "columns", "both")


def run(how: str, layers: int, width: int) -> list[float]:
    """Run one way in a fresh interpreter."""
    flags = "--xla_force_host_platform_device_count=8"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-c", CODE, how, str(layers), str(width)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=4096)
    options = parser.parse_args()
    runs = {how: [] for how in WAYS}
    for _ in range(options.rounds):
        for how in WAYS:
            runs[how].append(run(how, options.layers, options.width))
    base = statistics.median(r[0] for r in runs["one device"])
    print(f"materialize, {runs['rows'][0][4] / 2**30:.2f} GiB\n{'':12} seconds  ratio  compiled  peak")
    for how, rows in runs.items():
        seconds, compiled, peak = (statistics.median(r[i] for r in rows) for i in range(3))
        print(f"{how:12} {seconds:7.2f} {seconds / base:6.2f} {compiled:9.0f} {peak:5.2f}")
        assert abs(rows[0][3] / runs["one device"][0][3] - 1) < 1e-6, "other values"


if __name__ == "__main__":
    main()
