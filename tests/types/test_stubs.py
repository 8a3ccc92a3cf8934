"""The committed stubs say what the built-in layers take at run time; ``lm.jit`` has the function's own signature."""

import ast
import inspect
from typing import Any

import make_stubs
import pytest

import lazymods.nn

STUBS = {module: make_stubs.FOLDER / f"{module}.pyi" for module in make_stubs.MODULES}


@pytest.mark.parametrize("module", STUBS)
def test_the_stub_is_what_the_generator_writes(module: str) -> None:
    assert STUBS[module].read_text() == make_stubs.stub(module), "run: python tests/types/make_stubs.py"


def constructors() -> dict[str, ast.arguments]:
    """By class, what its constructor takes, as the committed stubs have it."""
    found = {}
    for path in STUBS.values():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                (method,) = [n for n in node.body if isinstance(n, ast.FunctionDef)]
                found[node.name] = method.args
    return found


def kinds_of(arguments: ast.arguments) -> list[tuple[str, Any, bool]]:
    """Name, kind and whether it has a default, of each argument but ``self``."""
    by_position = arguments.args
    with_default = len(by_position) - len(arguments.defaults)
    first = [(a.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD, n >= with_default) for n, a in enumerate(by_position)]
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return first[1:] + [(a.arg, inspect.Parameter.KEYWORD_ONLY, default is not None) for a, default in named]


def test_there_is_a_stub_of_each_layer() -> None:
    assert sorted(constructors()) == sorted(lazymods.nn.__all__)


@pytest.mark.parametrize("name", lazymods.nn.__all__)
def test_a_constructor_is_that_of_run_time(name: str) -> None:
    parameters = inspect.signature(getattr(lazymods.nn, name)).parameters.values()
    assert kinds_of(constructors()[name]) == [(p.name, p.kind, p.default is not p.empty) for p in parameters]


def test_a_written_constructor() -> None:
    """One by hand, so that generator and comparison can't be wrong together."""
    arguments = constructors()["LazyEmbed"]
    assert [(a.arg, ast.unparse(a.annotation)) for a in arguments.args[1:] if a.annotation] == [
        ("num_embeddings", "int | None"),
        ("features", "int | None"),
    ]
    own = {a.arg: ast.unparse(a.annotation) for a in arguments.kwonlyargs if a.annotation}
    assert own["dtype"] == "Dtype | None" and own["rngs"] == "nnx.Rngs"


@pytest.mark.parametrize("name", lazymods.nn.__all__)
def test_the_docstring_lists_the_options(name: str) -> None:
    stub = next(path.read_text() for path in STUBS.values() if f"class {name}(" in path.read_text())
    node = next(n for n in ast.parse(stub).body if isinstance(n, ast.ClassDef) and n.name == name)
    listed = " ".join((ast.get_docstring(node) or "").partition("Options: ")[2].split()).rstrip(".").split(", ")
    parameters = inspect.signature(getattr(lazymods.nn, name)).parameters.values()
    assert listed == [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
