"""A transformer over several GPUs of one host, beside plain Flax: planned, created, trained, saved, loaded.

Each row is a process of its own, so that its memory is its own. The rows of ``processes`` have one for each GPU, joined
by ``jax.distributed``. Bytes are those of one device as its allocator counts them, and the peak resident memory
of the host. The model has lazy layers in ``lm.Stack``; Flax's has the same blocks under ``nnx.vmap`` and ``nnx.scan``,
with sharding metadata, created by one compiled function with ``out_shardings``. On a CPU with virtual devices all of it
runs as well, without the bytes: ``XLA_FLAGS=--xla_force_host_platform_device_count=2 ... --small``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SIZES = {"layers": 36, "width": 2560, "heads": 20, "vocabulary": 51200, "batch": 4, "length": 128}
SMALL = {"layers": 3, "width": 64, "heads": 4, "vocabulary": 512, "batch": 4, "length": 16}
FILES = 8  # of the safetensors folder


RULES = [
    (r"\b(q|k|v|up)\.kernel", (None, None, "model")),  # with the axis of the layers in front
    (r"\b(o|down)\.kernel", (None, "model", None)),
    (r"embed|head", (None, "model")),
]


def lazy_model(sizes: argparse.Namespace) -> Any:
    """Build the transformer with lazy layers."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import lazymods as lm

    dtypes = {"param_dtype": jnp.bfloat16, "dtype": jnp.bfloat16}

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm1, self.norm2 = lm.LazyRMSNorm(**dtypes, rngs=rngs), lm.LazyRMSNorm(**dtypes, rngs=rngs)
            d = sizes.width
            self.q, self.k, self.v, self.o, self.up, self.down = (
                lm.LazyLinear(features, use_bias=False, **dtypes, rngs=rngs) for features in (d, d, d, d, 4 * d, d)
            )

        def __call__(self, x: jax.Array) -> jax.Array:
            return call_block(self, x, sizes.heads)

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = lm.LazyEmbed(sizes.vocabulary, sizes.width, **dtypes, rngs=rngs)
            self.blocks = lm.Stack(Block, sizes.layers, rngs=rngs)
            self.norm = lm.LazyRMSNorm(**dtypes, rngs=rngs)
            self.head = lm.LazyLinear(sizes.vocabulary, use_bias=False, **dtypes, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            return self.head(self.norm(self.blocks(self.embed(tokens))))

    return Model(nnx.Rngs(0))


def flax_model(sizes: argparse.Namespace) -> Any:
    """Build the same of plain Flax, with metadata that say where its parameters go."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    dtypes = {"param_dtype": jnp.bfloat16, "dtype": jnp.bfloat16}
    lecun = nnx.initializers.lecun_normal()
    embedding = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)

    def on_axes(init: Any, *names: str | None) -> Any:
        return nnx.with_metadata(init, out_sharding=names, eager_sharding=False)

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            d, options = sizes.width, {"use_bias": False, **dtypes, "rngs": rngs}
            columns, rows = on_axes(lecun, None, "model"), on_axes(lecun, "model", None)
            self.norm1, self.norm2 = nnx.RMSNorm(d, **dtypes, rngs=rngs), nnx.RMSNorm(d, **dtypes, rngs=rngs)
            self.q, self.k, self.v = (nnx.Linear(d, d, kernel_init=columns, **options) for _ in range(3))
            self.o = nnx.Linear(d, d, kernel_init=rows, **options)
            self.up = nnx.Linear(d, 4 * d, kernel_init=columns, **options)
            self.down = nnx.Linear(4 * d, d, kernel_init=rows, **options)

        def __call__(self, x: jax.Array) -> jax.Array:
            return call_block(self, x, sizes.heads)

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            d, columns = sizes.width, on_axes(lecun, None, "model")
            init = on_axes(embedding, None, "model")
            self.embed = nnx.Embed(sizes.vocabulary, d, embedding_init=init, **dtypes, rngs=rngs)
            build = nnx.vmap(Block, transform_metadata={nnx.PARTITION_NAME: None})
            self.blocks = nnx.split_rngs(splits=sizes.layers)(build)(rngs)
            self.norm = nnx.RMSNorm(d, **dtypes, rngs=rngs)
            self.head = nnx.Linear(d, sizes.vocabulary, use_bias=False, kernel_init=columns, **dtypes, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            axes = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry, "transform_metadata": {nnx.PARTITION_NAME: None}}
            x = nnx.scan(lambda x, block: block(x), **axes)(self.embed(tokens), self.blocks)
            return self.head(self.norm(x))

    return Model(nnx.Rngs(0))


def call_block(block: Any, x: Any, heads: int) -> Any:
    """Call one block of either model."""
    import jax

    h = block.norm1(x)
    q, k, v = (f(h).reshape(*h.shape[:2], heads, -1) for f in (block.q, block.k, block.v))
    x = x + block.o(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
    return x + block.down(jax.nn.gelu(block.up(block.norm2(x))))


def train(model: Any, optimizer: Any, tokens: Any) -> Any:
    """Take one step on the next token."""
    import jax.numpy as jnp
    import optax
    from flax import nnx

    def loss_of(model: Any) -> Any:
        logits = model(tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


class Row:
    """What one process has measured."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    @contextmanager
    def timed(self, name: str, *results: Callable[[], Any]) -> Iterator[None]:
        """Time a part, up to where its results are there, and note what is in memory after it."""
        import jax

        start = time.perf_counter()
        yield
        jax.block_until_ready([result() for result in results])
        seconds = time.perf_counter() - start
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        self.found[name] = {
            "seconds": round(seconds, 3),
            "in use": max(s.get("bytes_in_use", 0) for s in stats),
            "peak": max(s.get("peak_bytes_in_use", 0) for s in stats),
            "host peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        }


def mesh_and_tokens(sizes: argparse.Namespace, count: int) -> tuple[Any, Any]:
    """Return a mesh of so many devices, and tokens that each of them has."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:count]), ("model",))
    tokens = np.random.default_rng(0).integers(0, sizes.vocabulary, (sizes.batch, sizes.length), dtype=np.int32)
    return mesh, jax.make_array_from_callback(tokens.shape, NamedSharding(mesh, PartitionSpec()), lambda i: tokens[i])


def rules() -> Any:
    """Return the rules of the lazy model."""
    from jax.sharding import PartitionSpec

    return [(pattern, PartitionSpec(*axes)) for pattern, axes in RULES]


def digests(model: Any) -> dict[str, int]:
    """Return a number for the bits of each parameter and their places, computed where they are."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    @jax.jit
    def digest(x: Any) -> Any:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
        for axis in range(x.ndim):
            bits = bits * (2 * jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) + 1)
        return bits.sum()

    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): int(digest(value.get_raw_value())) for path, value in flat}


def differences(model: Any, alone: Any) -> list[float]:
    """Return the largest difference of each parameter of two models, one of them on one device."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    pairs = zip(*(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (model, alone)), strict=True)
    difference = jax.jit(lambda a, b: jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max())
    return [float(difference(a, jax.device_put(b, a.sharding))) for a, b in pairs]


def steps(row: Row, run: Callable[..., Any], model: Any, optimizer: Any, tokens: Any) -> None:
    """Take a first step, a second, for which some compile again, and five more."""
    losses: list[Any] = []
    for name in ("first step", "second step"):
        with row.timed(name, lambda: losses[-1]):
            losses.append(run(model, optimizer, tokens))
    with row.timed("five steps", lambda: losses[-1]):
        losses.extend(run(model, optimizer, tokens) for _ in range(5))
    row.found["losses"] = [round(float(loss), 4) for loss in losses]


def lazymods_row(sizes: argparse.Namespace, count: int, folder: Path) -> Row:
    """Plan, create, compare, train and save with lazymods."""
    import jax
    import optax
    from flax import nnx
    from jax.sharding import AbstractMesh

    import lazymods as lm

    row, (mesh, tokens) = Row(), mesh_and_tokens(sizes, count)
    spec = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype)
    with row.timed("plan"):
        abstract = AbstractMesh((count,), ("model",))
        plan = lm.infer_shapes(lazy_model(sizes), spec, mesh=abstract, rules=rules(), optimizer=optax.adam(1e-4))
    row.found["planned"] = {
        "parameters": plan.total_parameters,
        "bytes": plan.total_bytes_per_device,
        "optimizer": plan.total_optimizer_bytes_per_device,
        "gradients": plan.total_gradient_bytes_per_device,
    }
    model = lazy_model(sizes)
    with row.timed("create", lambda: nnx.state(model, nnx.Param)):
        lm.materialize(model, spec, mesh=mesh, rules=rules())
    (folder / f"{count}.json").write_text(json.dumps(digests(model)))
    if count > 1 and jax.process_count() == 1:
        alone = lazy_model(sizes)
        lm.materialize(alone, spec, device=jax.devices()[0])
        apart = differences(model, alone)
        row.found["largest difference to one"] = f"{max(apart)}, in {sum(map(bool, apart))} of {len(apart)} parameters"
        del alone
    optimizer = lm.LazyOptimizer(model, optax.adam(1e-4), wrt=nnx.Param)
    steps(row, lm.jit(train, donate_state=True), model, optimizer, tokens)
    whole = {"model": model, "optimizer": optimizer}
    with row.timed("save"):
        lm.save(whole, folder / f"state{count}")
    (folder / f"trained{count}.json").write_text(json.dumps(digests(model)))
    if count > 1 and jax.process_count() == 1:
        with row.timed("save safetensors"):
            write_folder(model, folder / "safetensors")
    return row


def write_folder(model: Any, folder: Path) -> None:
    """Write a folder as others write it: several files, and an index."""
    from safetensors.flax import save_file

    import lazymods as lm

    folder.mkdir()
    entries, index = lm.state_dict(model), {}
    for number in range(FILES):
        names = [name for i, name in enumerate(entries) if i % FILES == number]
        file = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        save_file({name: entries[name] for name in names}, folder / file)
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def load_row(sizes: argparse.Namespace, count: int, folder: Path) -> Row:
    """Restore what the other number of devices has saved, and load the safetensors folder."""
    import optax
    from flax import nnx

    import lazymods as lm

    row, (mesh, tokens) = Row(), mesh_and_tokens(sizes, count)
    model = lazy_model(sizes)
    with row.timed("load safetensors", lambda: nnx.state(model)):
        lm.load(model, folder / "safetensors", mesh=mesh, rules=rules())
    [other] = [int(path.name[5:]) for path in folder.glob("state*") if path.name != f"state{count}"]
    saved = json.loads((folder / f"trained{max(count, other)}.json").read_text())
    row.found["the bits of safetensors"] = digests(model) == saved
    model = lazy_model(sizes)
    optimizer = lm.LazyOptimizer(model, optax.adam(1e-4), wrt=nnx.Param)
    with row.timed(f"load state{other}", lambda: nnx.state((model, optimizer))):
        lm.load({"model": model, "optimizer": optimizer}, folder / f"state{other}", mesh=mesh, rules=rules())
    saved = json.loads((folder / f"trained{other}.json").read_text())
    row.found[f"the bits of state{other}"] = digests(model) == saved
    row.found["the next loss"] = round(float(lm.jit(train, donate_state=True)(model, optimizer, tokens)), 4)
    return row


def flax_state(sizes: argparse.Namespace, mesh: Any) -> tuple[Any, Callable[[], Any], Any]:
    """Return the graph of model and optimizer, what makes their state, and where that goes."""
    import jax
    import optax
    from flax import nnx
    from jax.sharding import NamedSharding

    graphs: list[Any] = []

    def create() -> Any:
        model = flax_model(sizes)
        graph, state = nnx.split((model, nnx.Optimizer(model, optax.adam(1e-4), wrt=nnx.Param)))
        graphs.append(graph)
        return state

    specs = nnx.get_partition_spec(jax.eval_shape(create))
    return graphs[0], create, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def flax_row(sizes: argparse.Namespace, count: int, folder: Path) -> Row:
    """Create, train and save with Flax and Orbax alone."""
    import jax
    import orbax.checkpoint as ocp
    from flax import nnx

    row, (mesh, tokens) = Row(), mesh_and_tokens(sizes, count)
    with row.timed("create", lambda: nnx.state((model, optimizer))):
        graph, create, shardings = flax_state(sizes, mesh)
        model, optimizer = nnx.merge(graph, jax.jit(create, out_shardings=shardings)())
    steps(row, nnx.jit(train, donate_argnums=(0, 1)), model, optimizer, tokens)
    with row.timed("save"), ocp.StandardCheckpointer() as saver:
        saver.save(folder / f"flax{count}", nnx.to_pure_dict(nnx.state((model, optimizer))))
    return row


def flax_load_row(sizes: argparse.Namespace, count: int, folder: Path) -> Row:
    """Restore what the other number of devices has saved, with Orbax alone."""
    import jax
    import orbax.checkpoint as ocp
    from flax import nnx

    row, (mesh, _) = Row(), mesh_and_tokens(sizes, count)
    [other] = [path.name for path in folder.glob("flax*") if path.name != f"flax{count}"]
    with row.timed(f"restore {other}", lambda: restored):
        _, create, shardings = flax_state(sizes, mesh)
        state = nnx.to_pure_dict(jax.eval_shape(create))
        places = nnx.to_pure_dict(shardings)
        wanted = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, places)
        with ocp.StandardCheckpointer() as saver:
            restored = saver.restore(folder / other, wanted)
    return row


ROWS = {"lazymods": lazymods_row, "load": load_row, "flax": flax_row, "flax_load": flax_load_row}
PARTS = {  # rows: on all devices or on one, in a process for each or in one
    "lazymods": [("lazymods", True, False), ("lazymods", False, False), ("load", False, False), ("load", True, False)],
    "flax": [("flax", True, False), ("flax", False, False), ("flax_load", False, False), ("flax_load", True, False)],
    "processes": [("lazymods", True, True)],
    "flax_processes": [("flax", True, True)],
}


def child(options: argparse.Namespace) -> None:
    """Measure one row in this process."""
    import jax

    if options.processes > 1:
        place = {"num_processes": options.processes, "process_id": options.process}
        is_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
        on_gpu: dict[str, Any] = {} if is_cpu else {"local_device_ids": [options.process]}
        jax.distributed.initialize(f"127.0.0.1:{options.port}", **place, **on_gpu)
    row = ROWS[options.row](options, options.devices, Path(options.folder))
    print(json.dumps(row.found), flush=True)


def measure(name: str, count: int, folder: Path, sizes: dict[str, int], processes: int = 1) -> None:
    """Measure one row in processes of its own, and print it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--row", name, "--devices", count, "--folder", folder, "--processes", processes, "--port", port]
    words += [word for key, value in sizes.items() for word in (f"--{key}", value)]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if processes > 1:
        environment["XLA_FLAGS"] = ""
    command = [sys.executable, __file__, *map(str, words)]
    start, children = time.perf_counter(), []
    for i in range(processes):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        children.append(subprocess.Popen([*command, "--process", str(i)], env=environment, **pipes))
    for i, process in enumerate(children):
        out, errors = process.communicate(timeout=500)
        seconds = time.perf_counter() - start
        print(f"{name}, {count} devices, process {i} of {processes}, {seconds:.0f} s in all", flush=True)
        lines = json.loads(out.splitlines()[-1]) if process.returncode == 0 else {"failed": errors[-3000:]}
        for key, value in lines.items():
            shown = [f"{k} {v:,}" for k, v in value.items()] if isinstance(value, dict) else [value]
            print(f"    {key:28}", *shown, flush=True)


def main() -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small model, to try this program")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--row", choices=list(ROWS), help=argparse.SUPPRESS)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--folder", help="where checkpoints are written (default: a temporary folder)")
    for name in ("processes", "process", "port"):
        parser.add_argument(f"--{name}", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        child(options)
        return
    sizes = SMALL if options.small else {name: getattr(options, name) for name in SIZES}
    folder, many = Path(tempfile.mkdtemp(dir=options.folder)), options.devices
    try:
        for part in options.parts:
            own = folder / part
            own.mkdir()
            for name, on_many, processes in PARTS[part]:
                measure(name, many if on_many else 1, own, sizes, many if processes else 1)
            shutil.rmtree(own)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
