"""docs/how-it-works.md says what happens: its names exist, its Python runs, and each step is taken, in its order."""

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx

import lazymods as lm

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lazymods"
TEXT = (ROOT / "docs" / "how-it-works.md").read_text()
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)

REFERENCE = re.compile(r"([\w/]+\.py)(?:: ([\w.]+))?")
STEP = re.compile(r"^\d+\. `([\w/]+\.py): ([\w.]+)`", re.MULTILINE)

# Runs the blocks of Python that stdin lists, in one namespace, and prints what of lazymods each of them has entered, in
# the order of the first time. In an interpreter of its own: what another test has left in a cache is not made again.
RECORDER = """
import json, os, sys
import lazymods
package = os.path.dirname(lazymods.__file__) + os.sep
entered = []
def note(frame, event, arg):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(package):
        entered[-1].setdefault(code.co_filename[len(package):].replace(os.sep, "/") + ": " + code.co_qualname)
names = {"__name__": "how_it_works"}
for source in json.load(sys.stdin):
    code = compile(source, "how-it-works.md", "exec")
    entered.append({})
    sys.setprofile(note)
    exec(code, names)
    sys.setprofile(None)
classes = {k: f"{type(v).__module__}.{type(v).__qualname__}" for k, v in names.items() if hasattr(v, "__dict__")}
json.dump({"entered": [list(e) for e in entered], "classes": classes}, sys.stdout)
"""


def blocks() -> list[tuple[str, list[str]]]:
    """Each block of Python, with the steps that the text says it takes."""
    parts = re.split(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)[1:]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [(code, [": ".join(step) for step in STEP.findall(text)]) for code, text in pairs]


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    """What the Python of the page has entered, and the classes of what it has made."""
    command = [sys.executable, "-W", "error", "-c", RECORDER]
    sources = json.dumps([code for code, _ in blocks()])
    done = subprocess.run(command, input=sources, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@cache
def defined(file: Path) -> frozenset[str]:
    """The classes, functions and methods of a file."""

    def inside(node: ast.AST, prefix: str) -> set[str]:
        found = set()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                found |= {prefix + child.name}
                found |= inside(child, f"{prefix}{child.name}.") if isinstance(child, ast.ClassDef) else set()
            elif isinstance(child, ast.If):  # what type checkers are not to see
                found |= inside(child, prefix)
        return found

    return frozenset(inside(ast.parse(file.read_text()), ""))


def exists(span: str) -> bool:
    """Whether what the page writes in backticks is there."""
    reference = REFERENCE.fullmatch(span)
    if reference:
        file, name = reference.groups()
        root = ROOT if file.startswith("tests/") else PACKAGE
        return (root / file).is_file() and (name is None or name in defined(root / file))
    if span.endswith("/"):
        return (ROOT / span).is_dir() or (PACKAGE / span).is_dir()
    module, _, rest = span.partition(".")
    if rest and module in ("lm", "nnx", "jax"):
        found: Any = {"lm": lm, "nnx": nnx, "jax": jax}[module]
        for name in rest.split("."):
            found = getattr(found, name, None)
        return found is not None
    return any(span in defined(file) for file in PACKAGE.rglob("*.py"))


# What is no file, function or class: arguments, attributes, names and an expression that the text speaks of.
WORDS = {"file.py: function", "__init__", "in_features", "infer", "rngs", "kernel", "bias", "x", "y", "norm", "fresh"}
CODE = {'layout="torch"', "if loss > 1:", "sin"}


def test_every_name_exists():
    spans = set(re.findall(r"`([^`]+)`", PROSE)) - WORDS - CODE
    assert len(spans) > 60
    assert [span for span in sorted(spans) if not exists(span)] == []


@pytest.mark.parametrize(
    "span", ["compile/missing.py", "_layer/mixin.py: missing", "missing/", "lm.missing", "Missing", "Cache.missing"]
)
def test_a_name_that_is_gone_is_found(span: str):
    assert not exists(span)


def test_every_call_is_followed():
    followed = [steps for _, steps in blocks() if steps]
    assert len(followed) == 6  # constructor and first call; load; first and later call of lm.jit; lazy block
    assert sum(map(len, followed)) == len(re.findall(r"^\d+\. ", PROSE, re.MULTILINE))


def test_each_step_is_taken_in_this_order(run: dict[str, Any]):
    for (_, steps), entered in zip(blocks(), run["entered"], strict=True):
        assert [step for step in entered if step in steps] == steps


def test_the_layers_become_what_the_text_says(run: dict[str, Any]):
    assert {name: run["classes"][name] for name in ("layer", "fresh", "norm")} == {
        "layer": "flax.nnx.nn.linear.Linear",
        "fresh": "flax.nnx.nn.linear.Linear",
        "norm": "flax.nnx.nn.normalization.BatchNorm",
    }


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 150
