"""Loading a checkpoint, from "model not built" to "every parameter there and touched", beside what others do.

The files lie in the page cache. Rows, each in fresh interpreters, taken in turns:
  lm.load, saved by lm.save      aligned: the parameters are the mapped file
  lm.load, stock safetensors     unaligned: one copy
  nnx.eval_shape                 an abstract model, safetensors.flax.load_file and nnx.update
  read                           os.preadv of the file into new memory: the floor of everything that copies
Time from construction on, and the peak of anonymous memory as a multiple of the file (Linux).
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

COMMON = """
import json, sys, time
import jax, numpy as np
from flax import nnx
import lazymods as lm
jax.device_put(np.zeros(1, np.float32)).block_until_ready()
nnx.Rngs(0)  # compiles Flax's own three kernels
path, layers, width, lazy = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] != "nnx"

class Net(nnx.Module):
    def __init__(self, *, rngs):
        make = (lambda: lm.LazyLinear(width, rngs=rngs)) if lazy else (lambda: nnx.Linear(width, width, rngs=rngs))
        self.layers = nnx.List([make() for _ in range(layers)])

def touch(arrays):
    for array in jax.block_until_ready(arrays):
        np.asarray(array).reshape(-1)[::1024].sum()

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) << 10
"""
CODE = {
    "lm.load": """
model = Net(rngs=nnx.Rngs(0))
lm.load(model, path)
touch(jax.tree.leaves(nnx.state(model, nnx.Param)))""",
    "nnx": """
from safetensors.flax import load_file
model = nnx.eval_shape(lambda: Net(rngs=nnx.Rngs(0)))
flat, loaded = nnx.to_flat_state(nnx.state(model, nnx.Param)), load_file(path)
nnx.update(model, nnx.from_flat_state([(p, v.replace(loaded[".".join(map(str, p))])) for p, v in flat]))
touch(jax.tree.leaves(nnx.state(model, nnx.Param)))""",
    "read": """
import mmap, os
size = os.path.getsize(path)
view = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE))
with open(path, "rb") as file:
    done = 0
    while done < size:
        done += os.preadv(file.fileno(), [view[done : done + (8 << 20)]], done)
touch([np.frombuffer(view[: size // 4 * 4], np.float32)])""",
}


def run(code: str, path: Path, layers: int, width: int, kind: str) -> tuple[float, float]:
    """Run one row in a fresh interpreter; return seconds and the growth of anonymous memory."""
    body = "\n".join(f"    {line}" for line in CODE[code].splitlines())
    program = f"{COMMON}\ndef work():\n    global model\n{body}\n    return locals()\n" + (
        "before, start = anonymous(), time.perf_counter()\nkept = work()\n"
        "print(json.dumps([time.perf_counter() - start, anonymous() - before]))"
    )
    command = [sys.executable, "-c", program, str(path), str(layers), str(width), kind]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}
    )
    seconds, memory = done.stdout.strip().strip("[]").split(",")
    return float(seconds), float(memory)


def main(rounds: int, big: int) -> None:
    """Print a table for a file of large tensors and one of 300 small ones."""
    import numpy as np
    from flax import nnx
    from safetensors.numpy import save_file

    import lazymods as lm

    for name, layers, width in (("large tensors", 24, big), ("300 small tensors", 150, 64)):
        with tempfile.TemporaryDirectory() as folder:
            stock, saved = Path(folder, "stock.safetensors"), Path(folder, "saved.safetensors")
            rng = np.random.default_rng(0)
            tensors = {}
            for i in range(layers):
                tensors[f"layers.{i}.kernel"] = rng.standard_normal((width, width), dtype=np.float32)
                tensors[f"layers.{i}.bias"] = rng.standard_normal(width, dtype=np.float32)
            save_file(tensors, stock)
            state = nnx.Dict(layers=nnx.List([lm.LazyLinear(width, rngs=nnx.Rngs(0)) for _ in range(layers)]))
            lm.load(state, stock)
            lm.save(state, saved)
            del tensors, state
            rows = {
                "lm.load, saved by lm.save": ("lm.load", saved, "lazy"),
                "lm.load, stock safetensors": ("lm.load", stock, "lazy"),
                "nnx.eval_shape": ("nnx", stock, "nnx"),
                "read": ("read", stock, "nnx"),
            }
            found: dict[str, list[tuple[float, float]]] = {row: [] for row in rows}
            for _ in range(rounds):
                for row, (code, path, kind) in rows.items():
                    found[row].append(run(code, path, layers, width, kind))
            size = stock.stat().st_size
            print(f"{name}: {size / 2**20:.1f} MiB, minima of {rounds}")
            floor = min(seconds for seconds, _ in found["read"])
            for row, values in found.items():
                seconds = min(s for s, _ in values)
                memory = statistics.median(m for _, m in values) / size
                print(
                    f"  {row:28} {1e3 * seconds:8.1f} ms  {seconds / floor:6.2f} x read  {memory:5.2f} x file in memory"
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=2048, help="of the 24 large layers: 4096 makes 1.5 GiB")
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.width)
