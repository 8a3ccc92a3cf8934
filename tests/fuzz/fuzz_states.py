"""Save and load many random training states: each must come back by type and value, or be refused by name.

    python tests/fuzz/fuzz_states.py --states 5000 --seed 0

Prints every difference with its seed and number. Exits with 1 if there was any.
"""

import argparse
import logging
import os
import sys
import tempfile
import traceback
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.random_states import fault


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.getLogger("absl").setLevel(logging.ERROR)
    faults = refused = 0
    for number in range(args.states):
        with tempfile.TemporaryDirectory() as folder:
            try:
                told, was_refused = fault(args.seed, number, Path(folder))
            except Exception:
                told, was_refused = traceback.format_exc(limit=-3), False
        refused += was_refused
        if told:
            faults += 1
            print(f"seed {args.seed}, state {number}: {told}", flush=True)
    print(f"{args.states} states, {refused} refused by name, {faults} differences")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
