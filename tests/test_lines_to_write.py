"""Every line to write that stands in the sources is Python that can be pasted, whether a test meets it or not."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import is_pasteable

import lazymods as lm

SOURCES = sorted(Path(lm.__file__).parent.rglob("*.py"))
MAKERS = {  # which argument of them is the line
    **{"Problem": 3, "wrong_argument": 3, "refused": 3, "problem": 3},
    **{"Cannot": 3, "Refusal": 2, "NotInferableError": 1},
}
Names = dict[str, list[ast.expr]]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: "/".join(path.parts[-2:]))
def test_lines_of_a_file(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names = _assigned(tree)
    for node in ast.walk(tree):
        for line in _lines(node, names):
            assert is_pasteable(line) or "x), ...]" in line, (node.lineno, line)  # type: ignore[attr-defined]


def test_there_are_lines_in_every_package() -> None:
    found = {path.parent.name for path in SOURCES for n in ast.walk(ast.parse(path.read_text())) if any(_lines(n, {}))}
    assert {"_layer", "_model", "autograd", "compile", "dispatch", "lazytensor", "nn", "porting", "state"} <= found


def _assigned(tree: ast.AST) -> Names:
    """Every value that a name of a file may have, wherever it is assigned."""
    names: Names = {}
    for node in ast.walk(tree):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            pairs = [(node.target, node.value)]
        for target, value in pairs:
            parts = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                parts = list(zip(target.elts, value.elts, strict=True))
            for name, part in parts:
                if isinstance(name, ast.Name):
                    names.setdefault(name.id, []).append(part)
    return names


def _lines(node: ast.AST, names: Names) -> Iterator[str]:
    """The lines to write of a call that makes a problem; ``x`` stands for what is filled in."""
    if not isinstance(node, ast.Call):
        return
    yield from (text for k in node.keywords if k.arg == "write" for text in _texts(k.value, names))
    at = MAKERS.get(getattr(node.func, "id", getattr(node.func, "attr", "")))
    if at is None:
        return
    arguments = list(node.args)
    if arguments and isinstance(arguments[-1], ast.Starred) and isinstance(arguments[-1].value, ast.Name):
        whole = names.get(arguments[-1].value.id, [])
        arguments[-1:] = whole[0].elts if whole and isinstance(whole[0], ast.Tuple) else []
    if len(arguments) > at:
        yield from _texts(arguments[at], names)


def _texts(value: ast.expr, names: Names) -> list[str]:
    """The texts that an expression may be; none, if it can't be told."""
    if isinstance(value, ast.Constant):
        return [value.value] if isinstance(value.value, str) else []
    if isinstance(value, ast.JoinedStr):
        return ["".join(str(p.value) if isinstance(p, ast.Constant) else "x" for p in value.values)]
    if isinstance(value, ast.IfExp):
        return _texts(value.body, names) + _texts(value.orelse, names)
    if isinstance(value, ast.BoolOp):
        return [text for part in value.values for text in _texts(part, names)]
    if isinstance(value, ast.BinOp):
        return [a + b for a in _texts(value.left, names) for b in _texts(value.right, names)]
    if isinstance(value, ast.Name):
        others = {name: found for name, found in names.items() if name != value.id}
        return [text for found in names.get(value.id, []) for text in _texts(found, others)]
    return []
