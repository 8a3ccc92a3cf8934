"""docs/autograd.md: its Python runs, and each row of its table of conventions is what JAX and PyTorch do."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "autograd.md"
TEXT = PAGE.read_text()
LINES = [line for line in TEXT.splitlines() if line.startswith("| `") and line.count(" | ") == 4]
PLAIN = [re.sub(r"\*\*(`.*?`)\*\*", r"\1", line) for line in LINES]
ROWS = [[cell.strip("` ") for cell in line.strip("| ").split(" | ")] for line in PLAIN]
EXPRESSIONS = [f"{row[0]} at {row[2]}" for row in ROWS]


@pytest.mark.slow
def test_the_python_of_the_page_runs() -> None:
    names: dict[str, Any] = {"__name__": "autograd"}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # what users have
        for block in re.finditer(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL):
            line = TEXT.count("\n", 0, block.start(1))
            exec(compile("\n" * line + block.group(1), str(PAGE), "exec"), names)  # tracebacks show the page's lines


def numbers(text: str) -> Any:
    return eval(text, {"nan": np.nan, "inf": np.inf})


def function(text: str, **modules: Any) -> Callable[[Any], Any]:
    """The function that a cell of the table writes, of x or of z."""
    return eval(f"lambda {'z' if 'z' in re.findall(r'[a-z]+', text) else 'x'}: {text}", modules)


def value(row: list[str]) -> np.ndarray:
    return np.array(numbers(row[2]), np.complex64 if re.search(r"\bz\b", row[0]) else np.float32)


def test_the_table_is_whole_and_says_where_they_differ() -> None:
    assert len(ROWS) >= 30
    marked = [line.count("**`") == 2 for line in LINES]
    assert marked == [row[3] != row[4] for row in ROWS]


@pytest.mark.parametrize("compiled", [False, True], ids=["as it is", "jit"])
@pytest.mark.parametrize("row", ROWS, ids=EXPRESSIONS)
def test_jax(row: list[str], compiled: bool) -> None:
    gradient = jax.grad(function(row[0], jax=jax, jnp=jnp))
    got = (jax.jit(gradient) if compiled else gradient)(jnp.asarray(value(row)))
    np.testing.assert_array_equal(got, np.array(numbers(row[3]), got.dtype))


def test_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    for row in ROWS:
        x = torch.tensor(value(row), requires_grad=True)
        function(row[1], torch=torch, F=torch.nn.functional)(x).backward()
        np.testing.assert_array_equal(x.grad, np.array(numbers(row[4]), x.grad.numpy().dtype), err_msg=row[1])
