"""docs/stack.md: its Python runs from top to bottom and prints what the page shows."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

TEXT = (Path(__file__).parents[2] / "docs" / "stack.md").read_text()


def test_its_python_prints_what_it_shows() -> None:
    pairs = re.findall(r"^```python\n(.*?)^```\n\n^```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert len(pairs) == TEXT.count("```python") == 3
    names: dict[str, Any] = {}
    for code, shown in pairs:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, "stack.md", "exec"), names)
        assert out.getvalue() == shown
