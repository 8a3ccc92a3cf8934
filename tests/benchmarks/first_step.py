"""From a fresh interpreter to the first training step of ResNet-50 and GPT-2, beside other libraries of JAX.

A row has five phases, in seconds. ``import`` includes the start of JAX's backend. ``build`` is the constructor.
``size`` is what is then missing until all parameters and the state of Adam are there. ``compile`` is the first step
less a later one, and ``step`` the shortest of three later ones. ``total`` ends with the first step. Each row is a
process of its own, without a cache of compiled programs. Rows take turns, and each shows its run of the least total.
Byte code is cached, as in an installation. All models have the same number of trained parameters, and the first loss of
lazymods is that of Flax NNX; both are checked. A library that is not installed has a row that says so;
``pip install -e ".[bench]"`` installs all.
"""

import argparse
import importlib
import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

from import_time import installed
from peers import QUICK, Size, batch

MODELS = {"resnet50": "ResNet-50", "gpt2": "GPT-2"}
PEERS = {  # the file in peers/, and the library that it needs
    "lazymods": ("lazy", "lazymods"),
    "lazymods, lm.Stack": ("lazy_stack", "lazymods"),
    "flax.nnx": ("flax_nnx", "flax"),
    "flax.linen": ("linen", "flax"),
    "equinox": ("equinox", "equinox"),
    "keras": ("keras", "keras"),
}
PHASES = ("import", "build", "size", "compile", "step")


def child(peer: str, name: str, size: Size) -> None:
    """Print what one interpreter measures of a library and a model."""
    times = [time.perf_counter()]

    def phase(waited_for: Any = ()) -> None:
        if waited_for != ():
            importlib.import_module("jax").block_until_ready(waited_for)
        times.append(time.perf_counter())

    library = importlib.import_module(f"peers.{PEERS[peer][0]}")
    importlib.import_module("jax").devices()
    phase()
    inputs, labels = batch(name, size)
    times[0] += time.perf_counter() - times[1]  # the data are nobody's work
    times[-1] = time.perf_counter()
    built = library.build(name, size)
    phase()
    trainer = library.finish(built, inputs)
    phase(library.arrays(trainer))
    losses = []
    for _ in range(4):
        losses.append(float(library.step(trainer, inputs, labels)))
        phase(library.arrays(trainer))
    spent = [after - before for before, after in itertools.pairwise(times)]
    step = min(spent[4:])  # noise makes steps longer, never shorter
    phases = dict(zip(PHASES, [*spent[:3], max(0.0, spent[3] - step), step], strict=True))
    print(json.dumps({"phases": phases, "loss": losses[0], "count": library.count(trainer)}))


def measure(peer: str, name: str, quick: bool, environment: dict[str, str]) -> dict[str, Any]:
    """Run one interpreter; return its phases, or the reason why there are none."""
    if importlib.util.find_spec(PEERS[peer][1]) is None:
        return {"missing": "not installed"}
    command = [sys.executable, __file__, "--child", peer, name, *(["--quick"] if quick else [])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{peer}, {name}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def checked(name: str, rows: dict[str, dict[str, Any]]) -> None:
    """See that all trained the same."""
    found = {peer: row for peer, row in rows.items() if "missing" not in row}
    counts = {peer: row["count"] for peer, row in found.items()}
    if len(set(counts.values())) > 1:
        raise SystemExit(f"{name}: other numbers of parameters: {counts}")
    if {"lazymods", "flax.nnx"} <= found.keys():
        ours, flax = found["lazymods"]["loss"], found["flax.nnx"]["loss"]
        if abs(ours - flax) > 1e-4 * flax:
            raise SystemExit(f"{name}: the first loss is {ours} in lazymods, and {flax} in flax.nnx")


def measured(names: list[str], peers: list[str], rounds: int, quick: bool) -> dict[str, dict[str, dict[str, Any]]]:
    """Return, by model and library, the run with the least total."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = installed(cache)
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        for peer in peers:
            measure(peer, names[0], True, environment)  # writes the byte code
        for _ in range(rounds):
            for name in names:
                for peer in peers:
                    if peer != "lazymods, lm.Stack" or name == "gpt2":
                        runs.setdefault((name, peer), []).append(measure(peer, name, quick, environment))
    found: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in names}
    for (name, peer), rows in runs.items():
        found[name][peer] = min(rows, key=lambda row: sum(row.get("phases", {}).values()))
    for name in names:
        checked(name, found[name])
    return found


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="small models, to try this program")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    parser.add_argument("--child", nargs=2, metavar=("LIBRARY", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        peer, name = options.child
        child(peer, name, QUICK if options.quick else Size())
        return
    found = measured(options.models, options.peers, options.rounds, options.quick)
    for name, rows in found.items():
        count = next((f"{row['count']:,}" for row in rows.values() if "count" in row), "?")
        shown = f"{MODELS[name]}{' (small)' if options.quick else ''}, {count} parameters"
        print(f"{shown:44}" + "".join(f"{phase:>9}" for phase in (*PHASES, "total")))
        for peer, row in rows.items():
            if "missing" in row:
                print(f"  {peer:42}  {row['missing']}")
            else:
                values = [*row["phases"].values(), sum(row["phases"].values())]
                print(f"  {peer:42}" + "".join(f"{value:9.2f}" for value in values))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
