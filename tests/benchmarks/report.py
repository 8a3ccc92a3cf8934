"""Runs the benchmarks and writes docs/benchmarks.md, with a picture of the time to the first training step.

    pip install -e ".[bench]"
    python tests/benchmarks/report.py

Every figure that README and docs show is on that page. ``--only`` runs some of the benchmarks, and keeps the other
parts of the page as they are. ``--quick`` is for trying this program: it takes small models and few rounds, and writes
to the folder of ``--out``. Run it on a machine that does nothing else.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from first_step import MODELS, PHASES

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs"


@dataclass(frozen=True)
class Benchmark:
    """A part of the page: the output of a script of this folder."""

    script: str
    title: str
    quick: str  # arguments
    gpu: bool = False  # runs on a GPU only


PARTS = [
    Benchmark("first_step", "Time to the first training step", "--quick --rounds 1"),
    Benchmark("import_time", "Import", "--rounds 1"),
    Benchmark("construct", "Making a model", "--rounds 1 --models mlp"),
    Benchmark("cold_start", "Cold starts", "--rounds 1 --widths 20"),
    Benchmark("first_call", "First calls under nnx.jit", "--rounds 1 --calls 5 --models mlp"),
    Benchmark("call_overhead", "Overhead of a call", "--rounds 1 --calls 5 --models mlp10"),
    Benchmark("load", "Loading a checkpoint", "--rounds 1 --width 64"),
    Benchmark("ports", "Loading a PyTorch model", "--rounds 1 --width 64 --layers 1"),
    Benchmark("lazy_tensors", "Lazy tensors", "--rounds 1 --steps 1"),
    Benchmark("stack", "Depth", "--rounds 1 --depths 2 4 --width 32 --calls 2"),
    Benchmark("saved_tensors", "Saved tensors", "--layers 2 --width 32 --batch 2 --length 16 --repeats 1"),
    Benchmark("backward_hooks", "Backward hooks", "--rounds 1 --steps 2 --width 32"),
    Benchmark("mesh", "Making a model on a mesh", "--rounds 1 --layers 2 --width 64"),
    Benchmark("mesh_load", "Loading on a mesh", "--rounds 1 --layers 2 --width 64"),
    Benchmark("mesh_calls", "Overhead of a call on a mesh", "--rounds 1 --calls 2 --models mlp10"),
    Benchmark("dispatch", "Operators", "--rounds 1 --calls 2 --tokens 512", gpu=True),
]

# Run in a process of its own: JAX takes the memory of a GPU when it starts.
MACHINE = """
import json, os, platform
from importlib.metadata import version, PackageNotFoundError
import jax

def model():
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()

names = {}
for name in ("lazymods", "jax", "flax", "optax", "numpy", "equinox", "keras"):
    try:
        names[name] = version(name)
    except PackageNotFoundError:
        names[name] = "not installed"
device = jax.devices()[0]
cpu = f"{model()}, {len(os.sched_getaffinity(0))} cores"
print(json.dumps({
    "python": platform.python_version(), "versions": names, "gpu": device.platform == "gpu",
    "device": f"{device.device_kind}; {cpu}" if device.platform != "cpu" else cpu,
}))
"""

HEAD = """# Benchmarks

`python tests/benchmarks/report.py` writes this page, and runs everything for it. Each part is about one script of
`tests/benchmarks`: what it measures, and what it printed. No other page shows a time.

"""


def machine() -> dict[str, Any]:
    """Versions and the device."""
    done = subprocess.run([sys.executable, "-c", MACHINE], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def run(part: Benchmark, quick: bool, more: list[str]) -> str:
    """Run a script and return what it prints."""
    arguments = [*(part.quick.split() if quick else []), *more]
    print(f"{part.script} ...", file=sys.stderr, flush=True)
    command = [sys.executable, str(HERE / f"{part.script}.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), str(HERE)])}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{part.script} failed")
    return done.stdout


def about(part: Benchmark) -> str:
    """What the script says that it measures; lines that are set in make a table."""
    found = re.match(r'"""(.*?)"""', (HERE / f"{part.script}.py").read_text(), re.DOTALL)
    assert found
    return re.sub(r"((?:^  .+\n)+)", r"\n```text\n\1```\n\n", found[1], flags=re.MULTILINE).strip()


def section(part: Benchmark, output: str, on: dict[str, Any], picture: str) -> str:
    """The part of the page about one script."""
    versions = ", ".join(f"{name} {version}" for name, version in on["versions"].items())
    lines = [f"## {part.title}", "", about(part), ""]
    if picture:
        lines += [f"![{part.title}]({picture})", ""]
    lines += ["```text", *(line.rstrip() for line in output.rstrip().splitlines()), "```", ""]
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    script = f"`tests/benchmarks/{part.script}.py`"
    lines += [f"{script}, {day}, {on['device']}; Python {on['python']}, {versions}.", ""]
    return "\n".join(lines)


COLORS = dict(zip(PHASES, ("#9e9e9e", "#5c6bc0", "#26a69a", "#ffa726", "#ef5350"), strict=True))


def drawn(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """A picture: for each model and library a bar, from the import to the end of the first step."""
    left, width, height = 170, 560, 22
    parts, y = [], 40
    for i, (phase, color) in enumerate(COLORS.items()):
        x = left + 90 * i
        parts.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 17}" y="21">{phase}</text>')
    for name, rows in found.items():
        parts.append(f'<text x="10" y="{y + 14}" font-weight="bold">{MODELS[name]}</text>')
        y += height
        longest = max([sum(row["phases"].values()) for row in rows.values() if "phases" in row], default=1.0)
        for peer, row in rows.items():
            parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{peer}</text>')
            x = float(left)
            for phase, seconds in row.get("phases", {}).items():
                long = seconds / longest * width
                parts.append(f'<rect x="{x:.1f}" y="{y}" width="{long:.1f}" height="18" fill="{COLORS[phase]}"/>')
                x += long
            total = f"{sum(row['phases'].values()):.1f} s" if "phases" in row else row["missing"]
            parts.append(f'<text x="{x + 6:.1f}" y="{y + 14}">{total}</text>')
            y += height
        y += 12
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 80} {y}" '
    style = 'font-family="sans-serif" font-size="13">\n<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head + style, *parts, "</svg>", ""])


def sections_of(page: Path) -> dict[str, str]:
    """The parts of a page that is there, by title."""
    if not page.exists():
        return {}
    found = re.split(r"^(?=## )", page.read_text(), flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0].removeprefix("## "): part.rstrip("\n") + "\n" for part in found}


def main() -> None:
    """Run the benchmarks and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[part.script for part in PARTS], metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="to try this program; the figures mean nothing")
    parser.add_argument("--out", type=Path, help="the folder to write to (default: docs)")
    options = parser.parse_args()
    if options.quick and options.out is None:
        parser.error("--quick needs --out: its figures are not for the page")
    folder = options.out or DOCS
    folder.mkdir(parents=True, exist_ok=True)
    on = machine()
    sections = sections_of(folder / "benchmarks.md")
    for part in PARTS:
        if (options.only and part.script not in options.only) or (part.gpu and not on["gpu"]):
            continue
        picture, more = "", []
        with tempfile.TemporaryDirectory() as scratch:
            if part.script == "first_step":
                picture, more = "first-step.svg", ["--json", f"{scratch}/figures.json"]
            output = run(part, options.quick, more)
            if picture:
                with open(f"{scratch}/figures.json") as file:
                    (folder / picture).write_text(drawn(json.load(file)))
        sections[part.title] = section(part, output, on, picture)
        ordered = [sections[part.title] for part in PARTS if part.title in sections]
        (folder / "benchmarks.md").write_text(HEAD + "\n".join(ordered))


if __name__ == "__main__":
    main()
