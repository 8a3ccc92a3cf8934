"""The pages of docs/: their Python runs from top to bottom, their names exist, and nothing public is left out."""

import ast
import contextlib
import importlib
import io
import re
import types
from pathlib import Path
from typing import Any

import jax
import optax
import pytest
from flax import nnx

import lazymods as lm
import lazymods.nn as lazy_layers

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text() for path in sorted(DOCS.glob("*.md"))}
# These show what they print, or are followed step by step, in tests of their own.
ELSEWHERE = {"autograd.md", "devices.md", "dispatch.md", "how-it-works.md", "porting.md", "stack.md"}


def run(page: str, folder: Path) -> dict[str, Any]:
    """Run a page's blocks of Python in order, in one namespace; tracebacks show the page's lines.

    A block of text right after one is what it prints, and a block of a session is one call and its error.
    """
    names: dict[str, Any] = {"__name__": page.removesuffix(".md").replace("-", "_")}
    text = PAGES[page]
    with pytest.MonkeyPatch.context() as patch, jax.numpy_rank_promotion("allow"):
        patch.chdir(folder)
        for found in re.finditer(r"^```(python|pycon)\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", text, re.M | re.S):
            kind, code, shown = found.groups()
            if kind == "pycon":
                errors_as_shown(code, names)
                continue
            line, printed = text.count("\n", 0, found.start(2)), io.StringIO()
            with jax.numpy_dtype_promotion("standard"), contextlib.redirect_stdout(printed):  # as users have them
                exec(compile("\n" * line + code, page, "exec"), names)
            assert shown is None or printed.getvalue() == shown, f"{page}:{line}"
    return names


def errors_as_shown(session: str, names: dict[str, Any]) -> None:
    """Run the call of a session; its error must be the one that the session shows."""
    call, shown = session.removeprefix(">>> ").split("\n", 1)
    with pytest.raises(lm.LazyError) as caught:
        eval(call, names)
    assert f"{caught.type.__module__}.{caught.type.__name__}: {caught.value}\n" == shown


@pytest.mark.parametrize("page", [name for name in PAGES if name not in ELSEWHERE and "```python" in PAGES[name]])
def test_its_python_runs(page: str, tmp_path: Path) -> None:
    names = run(page, tmp_path)
    if page == "index.md":
        assert type(names["model"].fc1) is type(names["fresh"].fc1) is nnx.Linear
        assert names["losses"][2] < names["losses"][0]
    if page == "sizing.md":
        layers = names["fresh"].fc1, names["fresh"].fc2
        assert [(m.in_features, m.out_features) for m in layers] == [(784, 256), (256, 10)]
    if page == "layers.md":
        assert (names["twice"] == 2 * names["once"]).all()  # its bias is 0
    if page == "own-layers.md":
        assert type(names["layer"]) is names["Projection"] and names["layer"].w.shape == (3, 4)
    if page == "checkpoints.md":
        assert names["state"]["step"] == 100 and names["result"] == ([], [], [])
    if page == "compiling.md":
        assert float(names["after"]) < float(names["before"])


@pytest.mark.parametrize("page", PAGES)
def test_its_names_exist(page: str) -> None:
    text = PAGES[page]
    for root, dotted in re.findall(r"\b(lm|nnx|optax)((?:\.[a-zA-Z]\w+)+)", text):
        here: Any = {"lm": lm, "nnx": nnx, "optax": optax}[root]
        for name in dotted.split(".")[1:]:
            if not isinstance(here, types.ModuleType):
                break
            assert hasattr(here, name), f"{root}{dotted}"
            here = getattr(here, name)
    for path in re.findall(r"(?:examples|tests)/[\w/]+\.py", text):
        assert (ROOT / path).is_file(), path
    for path in re.findall(r"\]\(([\w-]+\.md)", text):
        assert path in PAGES, path


def test_names_of_pytorch_exist() -> None:
    """Those of the first column of the tables."""
    torch = pytest.importorskip("torch", reason="its names are looked up")
    cells = re.findall(r"^\| (`.+?) \|", PAGES["from-pytorch.md"], re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"\b((?:nn|torch)(?:\.\w+)+)", cell)]
    assert len(names) > 25
    for module in ("distributed.tensor", "utils.checkpoint"):
        importlib.import_module(f"torch.{module}")
    for name in names:
        here = {"nn": torch.nn, "torch": torch}[name.split(".")[0]]
        for part in name.split(".")[1:]:
            here = getattr(here, part)


def test_parameters_are_counted_as_pytorch_counts_them() -> None:
    """By the row of the table: statistics are no parameters."""
    torch = pytest.importorskip("torch", reason="it counts")
    torch_model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
    rngs = nnx.Rngs(0)
    names = {"lm": lm, "model": nnx.Sequential(lm.LazyLinear(4, rngs=rngs), lm.LazyBatchNorm(rngs=rngs))}
    names["spec"] = jax.ShapeDtypeStruct((2, 8), "float32")
    [line] = [line for line in PAGES["from-pytorch.md"].splitlines() if line.startswith("| `sum(p.numel()")]
    theirs, ours = (cell.strip("|` ") for cell in line.split(" | ")[:2])
    assert eval(ours, names) == eval(theirs, {"model": torch_model}) == 44


def test_the_site_has_every_page() -> None:
    listed = re.findall(r"^ +- .+: (.+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    notebooks = [f"notebooks/{path.stem}.md" for path in (ROOT / "examples" / "notebooks").glob("*.ipynb")]
    assert sorted(listed) == sorted([*PAGES, *notebooks])


def test_the_reference_has_every_public_name() -> None:
    listed = set(re.findall(r"^::: lazymods\.([\w.]+)$", PAGES["reference.md"], re.MULTILINE))
    layers = {name for name in dir(lazy_layers) if name.startswith("Lazy")}
    assert "nn" in listed  # with all its layers
    public = set(dir(lm)) - layers - {"nn", "__version__"}
    parts = {"autograd", "dispatch", "lazytensor"}
    assert public - parts == {name for name in listed if "." not in name} - {"nn"}
    for part in parts:
        tree = ast.parse((ROOT / "lazymods" / part / "__init__.py").read_text())
        imports = [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
        own = {alias.name for alias in imports if alias.name == alias.asname}
        own -= {name for name in own if getattr(lm, name, None) is getattr(getattr(lm, part), name)}
        shown = {name.split(".")[1] for name in listed if name.startswith(f"{part}.")}
        assert own - {"checking"} == shown  # that one is for lazy(check=True)
    counts = {name.rpartition(".")[2] for name in listed if name.startswith("lazytensor.metrics.")}
    assert {"counters", "counter_names", "timers", "summary", "reset"} == counts


def test_every_layer_has_a_row() -> None:
    text = PAGES["layers.md"]
    shown = set(re.findall(r"\b(Lazy\w+)(?=[(`/])", text[: text.index("## Hooks")]))
    layers = {name for name in dir(lazy_layers) if name.startswith("Lazy")}
    ranked = {name for name in layers if re.search(r"\dd$", name)}
    assert layers - ranked == {name for name in shown if not re.search(r"\dd$", name)}
    assert {name[:-2] for name in ranked} == {"LazyConv", "LazyConvTranspose", "LazyBatchNorm", "LazyInstanceNorm"}


def test_every_error_has_a_row() -> None:
    unlisted = {"LazyError"}  # the base
    errors = {name for name in dir(lm) if name.endswith("Error")} - unlisted
    rows = re.findall(r"^\| `(\w+Error)` \| (.+?) \|", PAGES["errors.md"], re.MULTILINE)
    assert {name for name, _ in rows} == errors
    for name, bases in rows:
        shown = {base.rpartition(".")[2] for base in re.findall(r"`([\w.]+)`", bases)}
        assert shown
        assert shown < {cls.__name__ for cls in getattr(lm, name).__mro__}
