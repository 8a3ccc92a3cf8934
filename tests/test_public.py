"""What the package promises about itself: public names, their docstrings, its version, where private names are used."""

import ast
import importlib
import inspect
import re
import textwrap
import types
from pathlib import Path
from typing import Any

import flax.nnx
import pytest

import lazymods as lm

PACKAGE = Path(lm.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = {n: getattr(lm, n) for n in dir(lm) if not n.startswith("_")}
PUBLIC = {n: v for n, v in NAMES.items() if not isinstance(v, types.ModuleType)}
TITLES = ("Args:", "Attributes:", "Returns:", "Yields:", "Raises:", "Example:", "References:", "Inferred:")


def sections(doc: str) -> dict[str, str]:
    """The sections of a docstring in Google's style, by title."""
    found: dict[str, str] = {"": ""}
    title = ""
    for line in inspect.cleandoc(doc).splitlines():
        head = next((t for t in TITLES if line.startswith(t)), None)
        if head is not None:
            title, line = head, line[len(head) :]
        found[title] = found.get(title, "") + line + "\n"
    return found


def documented_arguments(text: str) -> set[str]:
    return {name.strip("*") for name in re.findall(r"^    (\*{0,2}\w+):", text, re.M)}


def signature(value: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(value)
    except (TypeError, ValueError):
        return None


# ---------------------------------------------------------------- names


def test_the_table_of_layers_is_whole() -> None:
    """A lazy layer for every layer of flax.nnx that takes the size of its input."""
    sized = ("in_features", "num_features", "kernel_shape", "num_embeddings")
    missing = []
    for name, cls in vars(flax.nnx).items():
        if isinstance(cls, type) and issubclass(cls, flax.nnx.Module):
            parameters = inspect.signature(cls.__init__).parameters
            if any(p in parameters for p in sized) and f"Lazy{name}" not in PUBLIC:
                missing.append(name)
    assert missing == []


def test_names_of_the_contract() -> None:
    promised = """LazyConv1d LazyConv2d LazyConv3d LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d
        LazyBatchNorm1d LazyBatchNorm2d LazyBatchNorm3d LazyInstanceNorm1d LazyInstanceNorm2d LazyInstanceNorm3d
        LazyWeightNorm LazySpectralNorm LazyOptimizer lazy LazyModuleMixin
        UninitializedVariable UninitializedParameter UninitializedBuffer
        is_lazy has_uninitialized_params uninitialized_paths
        register_forward_pre_hook register_forward_hook register_state_dict_pre_hook register_state_dict_post_hook
        register_load_state_dict_pre_hook register_load_state_dict_post_hook
        infer_shapes materialize summary ShapeReport state_dict load_state_dict LoadResult
        LazyError UninitializedError ShapeInferenceError StateDictError CheckpointError"""
    assert sorted(set(promised.split()) - set(PUBLIC)) == []


def test_dir_shows_the_public_names_and_no_others() -> None:
    """Those that ``__init__.py`` imports as themselves, for type checkers or at run time, and those of lazymods.nn."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    aliases = [a for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names if a.name == a.asname]
    expected = {a.name for a in aliases} | {"nn", "__version__"} | set(lm.nn.__all__)
    assert dir(lm) == sorted(expected)
    modules = {n for n, v in NAMES.items() if isinstance(v, types.ModuleType)}
    assert modules == {"autograd", "dispatch", "lazytensor", "nn", "rules"}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_says_where_it_lives(name: str) -> None:
    value = PUBLIC[name]
    assert value.__name__ == name
    module = importlib.import_module(value.__module__)
    assert getattr(module, name) is value


def test_options_go_by_keyword_and_rngs_comes_last() -> None:
    for name, cls in PUBLIC.items():
        if hasattr(cls, "_lazymods_plan"):
            parameters = list(inspect.signature(cls).parameters.values())
            assert parameters[-1].name == "rngs" and parameters[-1].kind is inspect.Parameter.KEYWORD_ONLY, name
            for p in parameters:
                if p.kind is not inspect.Parameter.KEYWORD_ONLY:
                    assert p.default in (inspect.Parameter.empty, None), f"{name}: {p}"


# ---------------------------------------------------------------- docstrings


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring(name: str) -> None:
    value = PUBLIC[name]
    doc = inspect.getdoc(value)
    assert doc, name
    first = doc.splitlines()[0]
    assert first.endswith((".", "``.", ":")) and 5 < len(first) < 130
    if isinstance(value, type) and issubclass(value, Exception):
        return
    parts = sections(doc)
    own = signature(value)
    names = {p.name for p in own.parameters.values()} if own is not None else set()
    if isinstance(value, types.FunctionType) and names:
        assert documented_arguments(parts.get("Args:", "")) == names
        if own is not None and own.return_annotation not in (None, "None", "bool"):
            assert "Returns:" in parts
    if hasattr(value, "_lazymods_plan"):
        required = {p.name for p in own.parameters.values() if p.default is p.empty} if own is not None else set()
        assert required <= documented_arguments(parts["Args:"]), required
        assert "Inferred:" in parts and parts["Raises:"].strip().startswith("ShapeInferenceError:")


def raised(function: Any) -> set[str]:
    """Names of the exceptions in the raise statements of a function."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            # A function that returns an error says of which class.
            maker = inspect.unwrap(function).__globals__.get(node.exc.func.id)
            is_function = isinstance(maker, types.FunctionType)
            names.add(maker.__annotations__["return"] if is_function else node.exc.func.id)
    return names


def functions() -> list[tuple[str, Any]]:
    found = []
    for name, value in PUBLIC.items():
        if isinstance(value, types.FunctionType):
            found.append((name, value))
        elif isinstance(value, type) and value.__module__.startswith("lazymods"):
            for attribute, method in vars(value).items():
                if isinstance(method, types.FunctionType) and method.__module__.startswith("lazymods"):
                    found.append((f"{name}.{attribute}", method))
    return found


@pytest.mark.parametrize("name, function", functions(), ids=[n for n, _ in functions()])
def test_what_is_raised_is_documented(name: str, function: Any) -> None:
    attribute = name.rpartition(".")[2]
    if attribute.startswith("_"):
        return  # a magic method does what Python says it does
    documented = sections(inspect.getdoc(function) or "").get("Raises:", "")
    assert inspect.getdoc(function), name
    for error in raised(function):
        assert error in documented, f"{name} raises {error}"


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(PACKAGE)) for p in FILES])
def test_every_module_opens_with_what_it_is_about(path: Path) -> None:
    doc = ast.get_docstring(ast.parse(path.read_text()))
    assert doc and doc.splitlines()[0].endswith((".", ":"))


# ---------------------------------------------------------------- files


def everywhere() -> list[Path]:
    return [p for folder in ("lazymods", "tests", "examples") for p in sorted((ROOT / folder).rglob("*.py"))]


def test_no_file_is_longer_than_500_lines() -> None:
    long = {str(p.relative_to(ROOT)): n for p in everywhere() if (n := len(p.read_text().splitlines())) > 500}
    assert long == {}


def imported(path: Path) -> list[str]:
    """Dotted names of everything that a file imports."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def test_private_names_of_jax_and_flax_are_imported_in_one_file() -> None:
    private = {}
    for path in FILES:
        names = [n for n in imported(path) if n.split(".")[0] in ("jax", "flax", "optax", "jaxlib")]
        hidden = [n for n in names if any(part.startswith("_") for part in n.split("."))]
        if hidden and path.parent.name != "_compat":
            private[str(path.relative_to(PACKAGE))] = hidden
    assert private == {}


def defined(tree: ast.AST) -> set[str]:
    """Names that a file defines: functions, classes, attributes, and texts that name attributes."""
    own = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                own.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Constant(value=str(name)):
                own.add(name)
    return own


def test_private_attributes_of_jax_and_flax_are_used_in_one_file() -> None:
    """Attributes that start with an underscore and are defined nowhere in the package."""
    trees = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in FILES}
    own = set().union(*map(defined, trees.values()))
    used: dict[str, set[str]] = {}
    for name, tree in trees.items():
        attributes = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)} - own
        private = {a for a in attributes if a.startswith("_") and not a.startswith("__")}
        if private and not name.startswith("_compat/"):
            used[name] = private
    replacing = (
        *("state/layouts/rule.py", "_initial/program.py", "lazytensor/reach.py"),
        *("state/entries.py", "state/load.py", "state/training.py"),
        *("porting/comparing.py", "porting/parity.py", "_layer/blocks.py", "state/files/torch_calls.py"),
    )
    of_named_tuples = {name: {"_replace"} for name in replacing}
    of_sys = {name: {"_getframe"} for name in ("_layer/factory.py", "_layer/ties.py", "_graph.py")}
    assert used == of_sys | of_named_tuples


def test_the_version_has_a_heading_in_the_changelog() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", lm.__version__)
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == "Unreleased" and lm.__version__ in headings


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()
