"""A few of the many damaged files that tests/fuzz/fuzz_checkpoints.py makes."""

import logging
import tracemalloc
from pathlib import Path

import pytest
from fuzz.checkpoint_mutations import good_ones, outcome_of, write_case

CASES = 300
PEAK = 64 << 20  # the largest of the files has a few kilobytes


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory):
    try:
        import torch  # noqa: F401 - whether it is there
    except ImportError:
        has_torch = False
    else:
        has_torch = True
    logging.getLogger("absl").setLevel(logging.ERROR)
    return good_ones(tmp_path_factory.mktemp("good"), torch=has_torch)


def test_good_files_are_read(tmp_path: Path, good) -> None:
    for kind, tree in good.items():
        folder = tmp_path / kind
        for name, raw in tree.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(raw)
        assert outcome_of(folder if len(tree) > 1 else folder / next(iter(tree))) == "read", kind


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Duplicate name")  # of zipfile, which writes the cases
def test_damaged_files_are_read_or_refused(tmp_path: Path, good) -> None:
    outcomes = []
    tracemalloc.start()
    try:
        for number in range(CASES):
            kind, path = write_case(7, number, good, tmp_path)
            tracemalloc.reset_peak()
            try:
                outcomes.append(outcome_of(path))
            except Exception as error:
                raise AssertionError(f"seed 7, case {number}, {kind}") from error
            assert tracemalloc.get_traced_memory()[1] < PEAK, f"seed 7, case {number}, {kind}"
    finally:
        tracemalloc.stop()
    assert outcomes.count("refused") > CASES // 2
    assert outcomes.count("read") > 10
