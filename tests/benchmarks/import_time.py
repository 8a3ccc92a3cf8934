"""What ``import lazymods`` costs beside ``import flax.nnx``, which it needs: fresh interpreters, taken in turns.

"after flax.nnx" is lazymods' own part, timed in an interpreter that has imported flax.nnx already; noise hits it less.
The byte code is cached in a temporary folder, as an installation caches it.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

CASES = {
    "flax.nnx": ("", "flax.nnx"),
    "lazymods": ("", "lazymods"),
    "lazymods after flax.nnx": ("import flax.nnx", "lazymods"),
}


def installed(cache: str | os.PathLike[str]) -> dict[str, str]:
    """Return the environment of programs whose byte code is in a folder, as an installation has it."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPYCACHEPREFIX": str(cache)}


def seconds(before: str, module: str, environment: dict[str, str]) -> float:
    """Import a module in a fresh interpreter."""
    code = f"{before}\nimport time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", code]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def main(rounds: int) -> None:
    """Print the medians and the ratios."""
    times: dict[str, list[float]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as cache:
        environment = installed(cache) | {"JAX_PLATFORMS": "cpu"}
        seconds("", "lazymods", environment)  # writes the byte code
        for _ in range(rounds):
            for case, (before, module) in CASES.items():
                times[case].append(seconds(before, module, environment))
    medians = {case: statistics.median(found) for case, found in times.items()}
    flax, whole, own = medians.values()
    for case, median in medians.items():
        print(f"{case:24}{median * 1e3:8.1f} ms, the best {min(times[case]) * 1e3:.1f} ms")
    print(f"lazymods / flax.nnx: {whole / flax:.3f}; (flax.nnx + its own part) / flax.nnx: {(flax + own) / flax:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="interpreters of each kind")
    main(parser.parse_args().rounds)
