"""docs/dispatch.md: its Python runs from top to bottom and prints what the page shows; its names exist."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import jax

import lazymods as lm

TEXT = (Path(__file__).parents[2] / "docs" / "dispatch.md").read_text()


def test_its_python_prints_what_it_shows() -> None:
    pairs = re.findall(r"^```python\n(.*?)^```\n\n^```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert len(pairs) == TEXT.count("```python") == 4
    names: dict[str, Any] = {}
    for code, shown in pairs:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), jax.numpy_dtype_promotion("standard"):
            exec(compile(code, "dispatch.md", "exec"), names)
        assert out.getvalue() == shown


def test_its_keys_are_all_keys() -> None:
    keys = lm.dispatch.Operator("op").keys()
    told = set(re.findall(r"`(\w+)`", TEXT)) & set(keys)
    assert set(keys) - told == {k for k in keys if k.startswith("Autograd") and k not in told}
    assert {"CPU", "CUDA", "TPU", "XLA", "FPGA", "Lazy", "Meta", "AutogradOther", "Autograd"} <= told


def test_its_names_exist() -> None:
    for name in re.findall(r"`lm\.dispatch\.(\w+)", TEXT):
        assert hasattr(lm.dispatch, name)
    row = re.compile(r"^\| `(\w+)\((.*?)\)`", re.MULTILINE)
    operators = row.findall(TEXT)
    assert len(operators) == 4
    for name, arguments in operators:
        kernel = getattr(lm.dispatch, name).registrations()["CompositeImplicitAutograd"]
        assert list(kernel.__code__.co_varnames[: kernel.__code__.co_argcount]) == arguments.split(", ")
