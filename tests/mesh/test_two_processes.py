"""Two processes of ``jax.distributed``, two devices each: every one makes the same calls and gets its own parts."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
from flax import nnx
from on_mesh import arrays

PROGRAM = """
import json, sys
import jax, numpy as np, optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec as P
import lazymods as lm

rank, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank, initialization_timeout=60)
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
orthogonal = nnx.initializers.orthogonal()
model = nnx.Sequential(
    lm.LazyLinear(16, rngs=nnx.Rngs(0)), lm.LazyLinear(8, kernel_init=orthogonal, rngs=nnx.Rngs(1)),
    nnx.Linear(8, 4, rngs=nnx.Rngs(2)),
)
rules = [("0.kernel", P(None, ("data", "model"))), ("1.kernel", P("model", "data")), ("2.kernel", P("data"))]
try:
    lm.materialize(model, jax.ShapeDtypeStruct((2, 6), "float32"), mesh=mesh, rules=[("kernel", P("rows"))])
except lm.LazyError as error:
    told = str(error)
lm.materialize(model, jax.ShapeDtypeStruct((2, 6), "float32"), mesh=mesh, rules=rules)
optimizer = lm.LazyOptimizer(model, optax.adam(1e-3), wrt=nnx.Param)
out = {}
for prefix, of in (("", model), ("optimizer.", optimizer)):
    for path, variable in nnx.to_flat_state(nnx.state(of)):
        array = variable.get_value()
        for shard in array.addressable_shards:
            ends = [s.indices(n)[:2] for s, n in zip(shard.index, array.shape)]
            out[json.dumps([prefix + ".".join(map(str, path)), ends, array.shape])] = np.asarray(shard.data)
np.savez(f"{folder}/{rank}.npz", **out)
with open(f"{folder}/{rank}.txt", "w") as file:
    file.write(told)
jax.distributed.shutdown()
"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.slow
def test_each_process_has_its_parts(tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    port = str(free_port())
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), port, str(tmp_path)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for child in children:
            output, _ = child.communicate(timeout=120)
            assert child.returncode == 0, output[-3000:]
    finally:
        for child in children:
            child.kill()
            child.wait()
    want = nnx.Sequential(
        nnx.Linear(6, 16, rngs=nnx.Rngs(0)),
        nnx.Linear(16, 8, kernel_init=nnx.initializers.orthogonal(), rngs=nnx.Rngs(1)),
        nnx.Linear(8, 4, rngs=nnx.Rngs(2)),
    )
    values = {name: np.asarray(array) for name, array in arrays(want).items()}
    covered = {name: np.zeros(value.shape, int) for name, value in values.items()}
    for rank in range(2):
        parts = [(*json.loads(key), part) for key, part in np.load(tmp_path / f"{rank}.npz").items()]
        shapes = {(name, str(ends)): part.shape for name, ends, _, part in parts}
        for name, ends, _, part in parts:
            index = tuple(slice(*e) for e in ends)
            if not name.startswith("optimizer."):
                assert part.tobytes() == values[name][index].tobytes(), name
                assert part.size < values[name].size or "bias" in name
                covered[name][index] += 1
            elif part.ndim:  # zeros, cut as the parameter is
                parameter = name.partition("u.")[2]
                assert part.shape == shapes[parameter, str(ends)]
                assert not part.any()
    assert all((count == count.flat[0]).all() and count.flat[0] for count in covered.values())
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert first == second
    assert all(f"layers.{i}.kernel" in first for i in range(3))
