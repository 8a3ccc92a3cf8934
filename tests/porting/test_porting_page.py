"""docs/porting.md: its Python runs from top to bottom and prints what the page shows; its names and files exist."""

import contextlib
import io
import re
import warnings
from pathlib import Path
from typing import Any

import jax
import pytest

import lazymods as lm

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "porting.md").read_text()
CODE = re.compile(r"^```python\n(.*?)^```\n(?:\n^```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def without_rounding(text: str) -> list[str]:
    """The lines, but for how much two outputs that agree differ, which is rounding and another machine's own."""
    return [re.sub(r"\d\.\de-0[5-9]|0\.0e\+00", "tiny", line).rstrip() for line in text.splitlines()]


@pytest.mark.slow
def test_its_python_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the page ports a model from PyTorch")
    monkeypatch.chdir(tmp_path)
    blocks = CODE.findall(TEXT)
    assert len(blocks) == TEXT.count("```python")
    assert sum(bool(shown) for _, shown in blocks) == TEXT.count("```text") == 7
    names: dict[str, Any] = {"__name__": "porting"}
    for code, shown in blocks:
        out = io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", message=".*flattened channels last")  # the page says so
            exec(compile(code, "porting.md", "exec"), names)
        assert without_rounding(out.getvalue()) == without_rounding(shown)


def test_its_names_and_files_exist() -> None:
    for name in re.findall(r"\blm\.(\w+)", TEXT):
        assert hasattr(lm, name), name
    ports = {path.name for path in (ROOT / "examples" / "ports").glob("*.py")}
    assert set(re.findall(r"`examples/ports/(\w+\.py)`", TEXT)) == ports
