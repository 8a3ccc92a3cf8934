"""Loading a PyTorch model: GPT-2 as published (124 million parameters) into the model of ``examples/ports``.

The files lie in the page cache. Rows, each in fresh interpreters, taken in turns:
  safetensors     as transformers writes it: tensors begin at any byte, so they are copied
  aligned         the same tensors, each at a multiple of 64 bytes, so they are mapped
  .pt             as torch.save writes it (needs torch, to write it only)
  read            the file into new memory, by as many threads as there are cores: the floor of everything that copies
  open            lm.open of a file of 10,000 small tensors, by tensor: time, and memory on Python's heap
A time is that of a load, with a read of every page of the parameters: the ``first`` one in its process, which imports
what a load needs, and the one ``after`` it, into a new model. Byte code is cached, as in an installation.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from import_time import installed

WIDTH, LAYERS, VOCABULARY, POSITIONS, MANY = 768, 12, 50257, 1024, 10_000

LOAD = """
import gc, json, sys, time
sys.path.insert(0, sys.argv[3])
import jax, numpy as np
from flax import nnx
import lazymods as lm
from gpt2 import GPT2, NAMES
jax.device_put(np.zeros(1, np.float32)).block_until_ready()
times = []
for _ in range(2):
    model = GPT2(json.loads(sys.argv[2]), rngs=nnx.Rngs(0))
    gc.collect()
    start = time.perf_counter()
    lm.load(model, sys.argv[1], rename=NAMES)
    for array in jax.block_until_ready(jax.tree.leaves(nnx.state(model, nnx.Param))):
        np.asarray(array).reshape(-1)[::1024].sum()
    times.append(time.perf_counter() - start)
print(json.dumps(times))
"""
READ = """
import json, mmap, os, sys, time
from concurrent.futures import ThreadPoolExecutor
path, part = sys.argv[1], 8 << 20
start = time.perf_counter()
size = os.path.getsize(path)
view = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE))
with open(path, "rb") as file, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
    list(pool.map(lambda at: os.preadv(file.fileno(), [view[at : at + part]], at), range(0, size, part)))
print(json.dumps([time.perf_counter() - start]))
"""
OPEN = """
import json, sys, time, tracemalloc
import lazymods as lm
lm.open(sys.argv[2])  # imports what an opening needs
start = time.perf_counter()
opened = lm.open(sys.argv[1])
spent = time.perf_counter() - start
del opened
tracemalloc.start()
opened = lm.open(sys.argv[1])
print(json.dumps([spent / len(opened), tracemalloc.get_traced_memory()[0] / len(opened)]))
"""


def run(cache: Path, code: str, *arguments: str) -> Any:
    """Run a program in a fresh interpreter, whose byte code is in a folder, and return what it prints."""
    command = [sys.executable, "-c", code, *arguments]
    environment = installed(cache) | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def gpt2(width: int, layers: int) -> dict[str, Any]:
    """Tensors with the names and shapes of GPT-2's file."""
    import numpy as np

    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (VOCABULARY, width), "wpe.weight": (POSITIONS, width)}
    for i in range(layers):
        linears = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}
        for name, (fan_in, fan_out) in linears.items():
            shapes[f"h.{i}.{name}.weight"] = (fan_in * width, fan_out * width)
            shapes[f"h.{i}.{name}.bias"] = (fan_out * width,)
    norms = [f"h.{i}.ln_{n}" for i in range(layers) for n in (1, 2)]
    shapes |= {f"{norm}.{leaf}": (width,) for norm in [*norms, "ln_f"] for leaf in ("weight", "bias")}
    draw = np.random.default_rng(0)
    return {name: draw.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def written(folder: Path, tensors: dict[str, Any]) -> dict[str, Path]:
    """Write the files of all rows."""
    import numpy as np
    from flax import nnx
    from safetensors.numpy import save_file

    import lazymods as lm

    files = {"safetensors": folder / "stock.safetensors", "aligned": folder / "aligned.safetensors"}
    for note in ("pt", "pt      "):  # one of both has a header after which nothing begins at a multiple of 64
        save_file(tensors, files["safetensors"], metadata={"format": note})
        with open(files["safetensors"], "rb") as file:
            if (8 + int.from_bytes(file.read(8), "little")) % 64:
                break
    named = nnx.Dict()
    for name, array in tensors.items():
        named[name] = nnx.Param(array)
    lm.save(named, files["aligned"])
    if importlib.util.find_spec("torch"):
        import torch

        files[".pt"] = folder / "pytorch_model.pt"
        torch.save({name: torch.from_numpy(array) for name, array in tensors.items()}, files[".pt"])
    small = {f"layers.{i}.weight": np.zeros(4, np.float32) for i in range(MANY)}
    for name, arrays in (("many", small), ("one", {"weight": np.zeros(4, np.float32)})):
        save_file(arrays, folder / f"{name}.safetensors")
        if ".pt" in files:
            import torch

            torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, folder / f"{name}.pt")
    return files


def main() -> None:
    """Print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=LAYERS)
    options = parser.parse_args()
    config = json.dumps({"n_embd": options.width, "n_layer": options.layers, "n_head": options.width // 64 or 1})
    ports = str(Path(__file__).parents[2] / "examples" / "ports")
    with tempfile.TemporaryDirectory() as name:
        folder, cache = Path(name), Path(name, "cache")
        files = written(folder, gpt2(options.width, options.layers))
        run(cache, LOAD, str(files["aligned"]), config, ports)  # writes the byte code
        found: dict[str, list[list[float]]] = {row: [] for row in (*files, "read")}
        for _ in range(options.rounds):
            for row, path in files.items():
                found[row].append(run(cache, LOAD, str(path), config, ports))
            found["read"].append(run(cache, READ, str(files["safetensors"])))
        print(f"{files['safetensors'].stat().st_size / 2**20:.0f} MiB, minima of {options.rounds}")
        best = {row: [min(column) for column in zip(*times, strict=True)] for row, times in found.items()}
        floor = best.pop("read")[0]
        for row, (first, after) in best.items():
            against = first / best["safetensors"][0]
            print(
                f"  {row:12} first {1e3 * first:6.1f} ms, {first / floor:4.2f} x read, {against:4.2f} x safetensors   "
                f"after {1e3 * after:6.1f} ms, {after / floor:4.2f} x read"
            )
        print(f"  read               {1e3 * floor:6.1f} ms")
        if ".pt" not in files:
            print("  .pt          torch is not installed")
        for suffix in (".safetensors", ".pt") if ".pt" in files else (".safetensors",):
            paths = str(folder / f"many{suffix}"), str(folder / f"one{suffix}")
            opened = [run(cache, OPEN, *paths) for _ in range(3)]
            spent, memory = (min(values) for values in zip(*opened, strict=True))
            print(f"  open {suffix:12}  {1e6 * spent:6.1f} us, {memory:.0f} bytes a tensor")


if __name__ == "__main__":
    main()
