"""The notebooks as they are stored: run from top to bottom, small, and free of what is of one machine.

``python tests/notebooks.py`` runs them; CI does.
"""

import json
import re
from pathlib import Path

import pytest

import lazymods as lm

FOLDER = Path(__file__).parent.parent / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_both_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["digits", "minilm"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_it_was_run_from_top_to_bottom(path: Path) -> None:
    text = path.read_text()
    assert len(text) < 40_000
    assert re.findall(r"/(?:home|root|tmp|Users|work|usr)/|[\w.+-]+@[\w-]+\.\w+", text) == []
    notebook = json.loads(text)
    assert notebook["nbformat"] == 4
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(set(cell["metadata"]) <= {"tags"} for cell in notebook["cells"])
    kinds = {out["output_type"] for cell in code for out in cell["outputs"]}
    assert kinds <= {"stream", "execute_result"}  # no errors, no pictures of progress bars
    assert all(out.get("name", "stdout") == "stdout" for cell in code for out in cell["outputs"])  # no warnings


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_its_names_exist(path: Path) -> None:
    for name in re.findall(r"\blm\.([a-zA-Z]\w*)", path.read_text()):
        assert hasattr(lm, name), name
