"""Kill saves of every format while they overwrite, with a reader beside: always the old or the new, whole.

    python tests/fuzz/kill_saves.py --kills 200

Every killed process saves two models, or training states, in turn to one path, as fast as it can. Another process loads
from the path all the time. After each kill the path must hold one of the two, whole; at the end one more save must have
removed what the killed ones have left.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHILD = """
import os, select, sys
import jax.numpy as jnp, lazymods as lm, optax, orbax.checkpoint
from flax import nnx

def made(value):
    model = nnx.Dict(a=nnx.Param(jnp.full((257, 129), value)), b=nnx.Param(jnp.full(5, value)))
    if not sys.argv[2].endswith("state"):
        return model
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    return {"model": model, "optimizer": optimizer, "step": int(value)}

def found(state):
    module = state if isinstance(state, nnx.Pytree) else state["model"]
    values = {float(v) for leaf in (module.a, module.b) for v in (leaf[...].min(), leaf[...].max())}
    return values if isinstance(state, nnx.Pytree) else values | {float(state["step"])}

path, what = sys.argv[1], sys.argv[3]
if what == "save":  # imports take seconds, so each save that is to be killed is a fork of this process
    for line in sys.stdin:
        child = os.fork()
        if not child:
            break
        os.waitpid(child, 0)
        print("gone", flush=True)
    else:
        sys.exit()
states = [made(1.0), made(2.0)]
if what == "save once":
    lm.save(states[0], path)
    sys.exit()
target = made(0.0)
print("ready", os.getpid(), flush=True)
while what == "save":
    for state in states:
        lm.save(state, path)
count = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    lm.load(target, path)
    assert found(target) in ({1.0}, {2.0}), found(target)
    count += 1
print(count, flush=True)
"""

KINDS = (".safetensors", ".npz", "", ".safetensors state", ".npz state", " state")


def start(path: Path, kind: str, what: str) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "JAX_PLATFORMS": "cpu"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", CHILD, str(path), kind, what], env=env, text=True, **pipes)


def run(command: subprocess.Popen[str], line: str = "") -> str:
    """Let a process end, and return what it wrote; raise if it failed."""
    out, errors = command.communicate(line)
    assert command.returncode == 0, errors[-3000:]
    return out


def said_to(command: subprocess.Popen[str], line: str) -> None:
    assert command.stdin is not None
    command.stdin.write(f"{line}\n")
    command.stdin.flush()


def said(command: subprocess.Popen[str], word: str) -> str:
    """Return what a process says after a word, in its next line."""
    assert command.stdout is not None
    line = command.stdout.readline()
    assert line.startswith(word), line + command.communicate()[1][-3000:]
    return line.removeprefix(word)


def kill_saves(folder: Path, kind: str, kills: int, seed: int) -> int:
    """Kill that many saves of a kind; return how many times the path was read meanwhile.

    Raises:
        AssertionError: If anything but the old or the new was found, or something was left at the end.
    """
    chance = random.Random(f"{seed}:{kind}")
    path = folder / f"checkpoint{kind.split(' ')[0]}"
    run(start(path, kind, "save once"))
    reader, saver = start(path, kind, "read"), start(path, kind, "save")
    try:
        said(reader, "ready")
        for _ in range(kills):
            said_to(saver, "save")
            victim = int(said(saver, "ready"))
            time.sleep(chance.uniform(0.0, 0.15))
            os.kill(victim, signal.SIGKILL)
            said(saver, "gone")
            assert path.exists(), "neither the old nor the new"
            assert reader.poll() is None, reader.communicate()[1][-3000:]
    finally:
        run(saver)
        reads = int(run(reader, "\n").split()[-1])
    run(start(path, kind, "save once"))
    assert os.listdir(folder) == [path.name], os.listdir(folder)
    return reads


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="of all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for i, kind in enumerate(KINDS):
        kills = options.kills // len(KINDS) + (i < options.kills % len(KINDS))
        with tempfile.TemporaryDirectory() as folder:
            reads = kill_saves(Path(folder), kind, kills, options.seed)
        print(f"{kind.strip() or 'folder':20} {kills} kills, {reads} reads beside: the old or the new", flush=True)


if __name__ == "__main__":
    main()
