"""README.md lists every row and report once, and the tests that it names exist."""

import re
from pathlib import Path

HERE = Path(__file__).parent
REPORTS = {
    "a": [1, 2, 4, 5, 6, 7, 8, 11, 12, 13, 14, 15, 17, 18, 19, 20, 22, 23, 24, 26, 27, 28, 29, 31, 33, 34, 35],
    "b": [36, 37, 38, 39, 40, 41, 42, 43, 45, 47, 48, 49, 51, 52, 54, 56, 57, 58, 59, 60, 61, 63, 65, 67, 69],
    "c": [70, 72, 73, 75, 76, 77, 78, 80, 82, 83, 85, 87],
    "d": [88, 89, 91, 93, 96, 97, 98, 101, 102, 103, 106, 108, 110, 111, 112, 113, 115, 117],
}


def lines() -> dict[str, tuple[str, list[str]]]:
    """Number, scenario and tests of each line of the tables."""
    found = re.findall(r"^\| ([abcd]?\d+) \| (.+) \| (.+) \|$", (HERE / "README.md").read_text(), re.MULTILINE)
    assert len({number for number, _, _ in found}) == len(found)
    return {number: (scenario, [] if tests == "-" else tests.split(", ")) for number, scenario, tests in found}


def test_every_row_and_report_is_listed() -> None:
    wanted = [str(n) for n in range(1, 208)] + [f"{group}{n}" for group, numbers in REPORTS.items() for n in numbers]
    assert list(lines()) == wanted


def test_the_tests_exist_and_what_is_not_tested_says_why() -> None:
    defined = {
        f"{path.stem.removeprefix('test_')}::{name}"
        for path in HERE.glob("test_*.py")
        for name in re.findall(r"^def test_(\w+)", path.read_text(), re.MULTILINE)
    }
    for number, (scenario, tests) in lines().items():
        assert set(tests) <= defined, number
        assert tests or re.match(r"(PyTorch's own tool|Later|Differs): .+\.$", scenario), number


def test_every_test_is_listed() -> None:
    listed = {test for _, tests in lines().values() for test in tests}
    for path in HERE.glob("test_*.py"):
        if path != Path(__file__):
            names = re.findall(r"^def test_(\w+)", path.read_text(), re.MULTILINE)
            assert {f"{path.stem.removeprefix('test_')}::{name}" for name in names} <= listed, path.name
