"""Open many damaged checkpoints: each must be read, or be refused by name.

    python tests/fuzz/fuzz_checkpoints.py --cases 10000 --seed 0

Runs under a limit of memory and of time a case. Prints every fault with its seed and number; a crash of the
interpreter names the last case. Exits with 1 if there was any.
"""

import argparse
import faulthandler
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.checkpoint_mutations import good_ones, outcome_of, write_case

MEMORY = 3 << 30  # above what the imports take: the largest file has a few kilobytes
SECONDS = 20


class TooLong(BaseException):
    """A case took longer than ``SECONDS``; no Exception, so that no reader takes it for a fault of the file."""


def stop(signum: int, frame: object) -> None:
    raise TooLong


def limit_memory() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run one case, and keep its file")
    parser.add_argument("--formats", help="a part of the formats' names, such as orbax")
    arguments = parser.parse_args()
    faulthandler.enable()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Duplicate name", UserWarning)  # of zipfile, which writes the cases
    logging.getLogger("absl").setLevel(logging.ERROR)  # of Orbax, which writes the good folders
    signal.signal(signal.SIGALRM, stop)
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    (folder / "good").mkdir()
    good = good_ones(folder / "good")
    if arguments.formats:
        good = {kind: tree for kind, tree in good.items() if arguments.formats in kind}
    for kind in good:
        print(f"{kind}: {sum(map(len, good[kind].values())):,} bytes")
    numbers = range(arguments.cases) if arguments.only is None else [arguments.only]
    last = folder / "last"
    outcomes: Counter[tuple[str, str]] = Counter()
    faults = 0
    limit_memory()
    for number in numbers:
        kind, path = write_case(arguments.seed, number, good, folder)
        last.write_text(f"{number} {kind}")
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            outcomes[kind, outcome_of(path)] += 1
        except (Exception, TooLong):
            faults += 1
            print(f"FAULT seed {arguments.seed} number {number} {kind}\n{traceback.format_exc()}", flush=True)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if arguments.only is None:
            shutil.rmtree(folder / f"case-{number}")
        if number % 1000 == 999:
            print(f"{number + 1} cases", flush=True)
    for kind in good:
        print(f"  {kind}: {outcomes[kind, 'refused']} refused, {outcomes[kind, 'read']} read")
    refused = sum(n for (_, outcome), n in outcomes.items() if outcome == "refused")
    read = sum(n for (_, outcome), n in outcomes.items() if outcome == "read")
    print(f"{len(numbers)} files: {refused} refused, {read} read, {faults} faults")
    if arguments.only is None:
        shutil.rmtree(folder)
    else:
        print(folder)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
