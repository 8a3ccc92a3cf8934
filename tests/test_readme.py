"""README's Python runs from top to bottom, its names exist, and no layer or error is left out."""

import re
from pathlib import Path
from typing import Any

import pytest
from flax import nnx

import lazymods as lm
import lazymods.nn as lazy_layers

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(kind: str = "python") -> list[tuple[int, str]]:
    """The blocks of code, each with the number of its first line."""
    found = re.finditer(rf"^```{kind}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [(README.count("\n", 0, m.start(1)) + 1, m.group(1)) for m in found]


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the Python blocks have defined, run in order in a temporary folder."""
    names: dict[str, Any] = {"__name__": "readme"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("readme"))
        for line, code in blocks():
            exec(compile("\n" * (line - 1) + code, "README.md", "exec"), names)  # tracebacks show README's lines
    return names


def test_first_code_is_near_the_top():
    assert blocks()[0][0] < 15


def test_models_are_what_the_comments_say(namespace: dict[str, Any]):
    for name in ("model", "fresh"):
        found = [(type(m), m.in_features, m.out_features) for m in (namespace[name].fc1, namespace[name].fc2)]
        assert found == [(nnx.Linear, 784, 256), (nnx.Linear, 256, 10)]
    layer, cls = namespace["layer"], namespace["Projection"]
    assert type(layer) is cls
    assert nnx.graphdef(layer) == nnx.graphdef(cls(3, 4, rngs=nnx.Rngs(0)))
    assert namespace["result"] == ([], [], [])


def test_errors_are_shown_as_they_are(namespace: dict[str, Any]):
    ((_, block),) = blocks("pycon")
    call, shown = block.removeprefix(">>> ").split("\n", 1)
    with pytest.raises(lm.LazyError) as caught:
        eval(call, namespace)
    assert f"{caught.type.__module__}.{caught.type.__name__}: {caught.value}\n" == shown


def test_names_exist():
    for name in re.findall(r"\blm\.(\w+)", README):
        assert hasattr(lm, name), name
    for name in re.findall(r"\bnnx\.([A-Za-z]\w+)", README):
        assert hasattr(nnx, name), name
    for path in re.findall(r"(?:examples|tests)/\w+\.py", README):
        assert (ROOT / path).is_file(), path


def test_every_layer_has_a_row():
    table = README[README.index("## Layers") : README.index("## Your own classes")]
    shown = set(re.findall(r"\b(Lazy\w+)(?=[(`/])", table))
    layers = {name for name in dir(lazy_layers) if name.startswith("Lazy")}
    ranked = {name for name in layers if re.search(r"\dd$", name)}
    assert layers - ranked == {name for name in shown if not re.search(r"\dd$", name)}
    assert {name[:-2] for name in ranked} == {"LazyConv", "LazyConvTranspose", "LazyBatchNorm", "LazyInstanceNorm"}


def test_every_error_has_a_row():
    unlisted = {"LazyError"}  # the base
    errors = {name for name in dir(lm) if name.endswith("Error")} - unlisted
    rows = re.findall(r"^\| `(\w+Error)` \| (.+?) \|", README, re.MULTILINE)
    assert {name for name, _ in rows} == errors
    for name, bases in rows:
        shown = {base.rpartition(".")[2] for base in re.findall(r"`([\w.]+)`", bases)}
        assert shown
        assert shown < {cls.__name__ for cls in getattr(lm, name).__mro__}


def test_changelog_has_the_version():
    assert re.search(rf"^## \[{re.escape(lm.__version__)}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
