"""README's Python runs from top to bottom and does what it says; its names exist."""

import re
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx

import lazymods as lm

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
            with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # as users have them
                exec(compile("\n" * (line - 1) + code, "README.md", "exec"), names)  # tracebacks show README's lines
    return names


def test_first_code_is_near_the_top():
    assert blocks()[0][0] < 15


def test_models_are_what_the_comments_say(namespace: dict[str, Any]):
    for name in ("model", "fresh"):
        found = [(type(m), m.in_features, m.out_features) for m in (namespace[name].fc1, namespace[name].fc2)]
        assert found == [(nnx.Linear, 784, 256), (nnx.Linear, 256, 10)]


def test_what_the_first_example_prints_is_shown(capsys: pytest.CaptureFixture[str]):
    ((start, code), *_) = blocks()
    exec(code, {"__name__": "readme"})
    ((line, shown),) = blocks("text")
    assert line == start + code.count("\n") + 3  # right under it
    assert capsys.readouterr().out == shown


def test_it_is_short():
    assert README.count("\n") <= 120


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
    for path in re.findall(r"(?:examples|tests)/[\w/]+\.(?:py|ipynb)|docs/[\w-]+\.md", README):
        assert (ROOT / path).is_file(), path


def test_changelog_has_the_version():
    assert re.search(rf"^## \[{re.escape(lm.__version__)}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
