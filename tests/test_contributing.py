"""The map in CONTRIBUTING.md shows what is there, by the storeys of the contract of imports in pyproject.toml."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAP = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where things are")[2].partition("\n## ")[0]
LIBRARY, _, BESIDE = MAP.partition("Beside it:")


def shown(text: str) -> list[str]:
    """What the lines of a list are about: the files and folders at their beginning."""
    starts = re.findall(r"^    ((?:[\w/]+(?:/|\.py)(?:, )?)+)", text, re.MULTILINE)
    return [name for start in starts for name in start.split(", ")]


def test_the_library_is_shown_by_its_storeys():
    with open(ROOT / "pyproject.toml", "rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    storey = {name: i for i, names in enumerate(reversed(layers)) for name in names.split(" | ")}
    names = [name for name in shown(LIBRARY) if "/" not in name.rstrip("/")]
    assert sorted(names) == sorted(f"{n}/" if (ROOT / "lazymods" / n).is_dir() else f"{n}.py" for n in storey)
    storeys = [storey[name.removesuffix(".py").rstrip("/")] for name in names]
    assert storeys == sorted(storeys)


def test_all_that_is_shown_is_there():
    assert len(shown(LIBRARY)) > 15 and len(shown(BESIDE)) > 3
    assert [name for name in shown(LIBRARY) if not (ROOT / "lazymods" / name).exists()] == []
    assert [name for name in shown(BESIDE) if not (ROOT / name).exists()] == []
