"""docs/benchmarks.md is what tests/benchmarks/report.py writes, and every script is a part of it."""

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from helpers import import_file

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "benchmarks"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return import_file(FOLDER / "report.py")


def test_every_script_is_a_part(report: Any) -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")}
    assert {part.script for part in report.PARTS} == scripts - {"report", "several_gpus"}  # that one needs two GPUs


def test_the_page_is_written_by_it(report: Any) -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert text.startswith(report.HEAD)
    titles = [part.title for part in report.PARTS]
    shown = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert shown == [title for title in titles if title in shown]


def test_a_part_that_is_not_run_stays(report: Any, tmp_path: Path) -> None:
    on = {"device": "a device", "python": "3", "versions": {"jax": "1"}}
    parts = [report.section(part, "  row 1\n", on, "") for part in report.PARTS[:2]]
    page = tmp_path / "benchmarks.md"
    page.write_text(report.HEAD + "\n".join(parts))
    kept = report.sections_of(page)
    assert list(kept) == [part.title for part in report.PARTS[:2]]
    assert report.HEAD + "\n".join(kept.values()) == page.read_text()
    assert "```text\n  row 1\n```" in kept[report.PARTS[0].title] and "a device; Python 3, jax 1." in parts[0]


def test_the_picture_has_a_bar_for_each_library(report: Any) -> None:
    phases = dict.fromkeys(report.PHASES, 1.0)
    rows = {
        "lazymods": {"phases": phases},
        "flax.nnx": {"phases": {p: 2.0 for p in phases}},
        "keras": {"missing": "no"},
    }
    root = ET.fromstring(report.drawn({"gpt2": rows}))
    name = "{http://www.w3.org/2000/svg}"
    bars = [float(r.attrib["width"]) for r in root.iter(f"{name}rect") if r.attrib["height"] == "18"]
    assert sum(bars[:5]) * 2 == pytest.approx(sum(bars[5:]), rel=0.01) and len(bars) == 10
    texts = [text.text for text in root.iter(f"{name}text")]
    assert texts[-6:] == ["lazymods", "5.0 s", "flax.nnx", "10.0 s", "keras", "no"]
