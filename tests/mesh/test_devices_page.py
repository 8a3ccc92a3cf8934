"""docs/devices.md: its Python runs on eight devices and prints what the page shows."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import jax
import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "devices.md").read_text()


def test_the_page_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "devices"}
    shown = 0
    for found in re.finditer(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", PAGE, re.MULTILINE | re.DOTALL):
        code, text = found.groups()
        line = PAGE.count("\n", 0, found.start(1))
        printed = io.StringIO()
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # as users have them
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * line + code, "devices.md", "exec"), names)
        assert printed.getvalue() == (text or "")
        shown += text is not None
    assert shown == 4
