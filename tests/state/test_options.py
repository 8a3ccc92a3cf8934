"""Arguments of loads, saves and rules that are none: an :class:`ArgumentError` names the argument and what it got."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm
from lazymods import rules

ARRAYS = {"fc.weight": np.ones((4, 3), np.float32)}


def load(**options: Any) -> Any:
    model = nnx.Dict(fc=lm.LazyLinear(4, use_bias=False, rngs=nnx.Rngs(0)))
    return lm.load(model, ARRAYS, **{"layout": "torch", **options})


BROKEN = "[^$]*missing \\), unterminated subpattern[^$]*needed: a regular expression[^$]*write:  '\\\\\\\\\\(fc'"
EXPRESSIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "ignore": (lambda: load(ignore="(fc"), "lm.load: ignore" + BROKEN),
    "one of ignore": (lambda: load(ignore=["fc", "(fc"]), "lm.load: ignore" + BROKEN),
    "missing": (lambda: load(missing="(fc"), "lm.load: missing" + BROKEN),
    "rename": (lambda: load(rename=[("(fc", "x")]), "lm.load: rename" + BROKEN),
    "a rule": (lambda: rules.Transpose("(fc"), r"lm\.rules\.Transpose" + BROKEN),
    "a part": (lambda: rules.Merge(("fc", "(fc"), into="x"), r"lm\.rules\.Merge" + BROKEN),
    "no expression": (
        lambda: load(rename=[(3, "x")]),
        "rename\n  got:    3\n  needed: a regular expression, as a text",
    ),
    "no sequence": (lambda: load(ignore=3), "ignore\n  got:    3\n  needed: a regular expression, or several"),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_that_is_none(name: str) -> None:
    call, text = EXPRESSIONS[name]
    with pytest.raises(lm.ArgumentError, match=text):
        call()


GROUP = r"[^$]*invalid group reference 2[^$]*needed: what re\.sub takes: the expression has 1 groups"
NAMES: dict[str, tuple[Callable[[], Any], str]] = {
    "rename": (lambda: load(rename=[("(fc)", r"\2")]), "lm.load: rename" + GROUP),
    "a pair that fits nothing": (lambda: load(rename=[("(nothing)", r"\2")]), "lm.load: rename" + GROUP),
    "Copy": (lambda: rules.Copy("(fc)", into=r"\2"), r"lm\.rules\.Copy" + GROUP),
    "Split": (lambda: rules.Split("(fc)", into=(r"\1", r"\2")), r"lm\.rules\.Split" + GROUP),
    "Merge": (lambda: rules.Merge(("(a)", "(b)"), into=r"\2"), r"lm\.rules\.Merge" + GROUP),
    "Stack": (lambda: rules.Stack(r"l(\d+)", into=r"\2"), r"lm\.rules\.Stack" + GROUP),
    "Unstack": (lambda: rules.Unstack("(l)", into=r"\2{i}"), r"lm\.rules\.Unstack" + GROUP),
    "no text": (lambda: load(rename=[("fc", 3)]), "rename\n  got:    3\n  needed: a text to put in the place of 'fc'"),
    "no text of a rule": (lambda: rules.Copy("fc", into=None), "Copy\n  got:    None\n  needed: a text"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_put_in_the_place_of_an_expression(name: str) -> None:
    call, text = NAMES[name]
    with pytest.raises(lm.ArgumentError, match=text):
        call()


def test_what_is_an_expression() -> None:
    import re

    assert load(ignore=re.compile("x"), missing={"y"}).matched
    assert load(rename=[("fc", lambda match: match[0])]).matched  # as re.sub takes it


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "layout": (lambda: load(layout="keras"), "lm.load: layout\n  got:    'keras'\n  needed: one of 'flax', 'torch'"),
    "flatten": (
        lambda: load(layout="flax", flatten={"fc": (1, 3)}),
        "layout\n  got:    'flax'\n  needed: flatten reorders",
    ),
    "dtype": (lambda: load(dtype=jnp.int8), "lm.load: dtype\n  got:    int8\n  needed: a floating-point dtype"),
    "no dtype": (lambda: load(dtype="keep"), "lm.load: dtype\n  got:    'keep'\n  needed: a floating-point dtype"),
    "mode": (lambda: load(mode="test"), "lm.load: mode\n  got:    'test'\n  needed: one of 'train', 'eval'"),
    "mismatched": (lambda: load(mismatched="drop"), 'mismatched\n  got:    \'drop\'\n  needed: one of "error", "skip"'),
    "variant": (lambda: load(variant="fp16"), "variant\n  got:    'fp16'\n  needed: None"),
    "rename": (lambda: load(rename="x"), "lm.load: rename\n  got:    'x'\n  needed: a mapping, a list of pairs"),
    "a name of rename": (lambda: load(rename={"fc.weight": 3}), "rename\n  got:    for 'fc.weight' it gave 3"),
    "two names of rename": (
        lambda: load(rename=lambda n: (n, "x")), r"write:  rename=\[lm\.rules\.Copy\('fc\\\\\.weight', into="
    ),
    "model": (lambda: lm.load(3, ARRAYS), "the model\n  got:    3\n  needed: what has entries"),  # type: ignore[arg-type]
    "like": (lambda: lm.export_torch(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), like=3), r"like\n  got:    3"),  # type: ignore[arg-type]
    "axes": (lambda: rules.Transpose("x", axes="ab"), "Transpose\n  got:    'ab'\n  needed: axes is whole numbers"),  # type: ignore[arg-type]
    "shape": (lambda: rules.Reshape("x", -1), "Reshape\n  got:    -1\n  needed: shape is whole numbers"),  # type: ignore[arg-type]
    "value": (lambda: rules.Add("x", "1"), "Add\n  got:    '1'\n  needed: a number"),  # type: ignore[arg-type]
    "axis": (lambda: rules.Stack(r"(\d)", "x", axis=None), r"got:    \(None,\)\n  needed: axis is whole numbers"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", OTHERS)
def test_an_option_that_is_none(name: str) -> None:
    call, text = OTHERS[name]
    with pytest.raises(lm.ArgumentError, match=text):
        call()


def test_paths_that_save_does_not_write(tmp_path: Path) -> None:
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(
        lm.ArgumentError, match=r"needed: a path that ends with[^$]*write:  lm\.save\(model, '.*x\.s"
    ):
        lm.save(layer, tmp_path / "x.pt")
    with pytest.raises(lm.ArgumentError, match=r"needed: a path without a suffix: wait=False"):
        lm.save(layer, tmp_path / "x.npz", wait=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "got"),
    [(None, "None"), (3, "3"), (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "Linear")],
    ids=["none", "number", "model"],
)
def test_what_is_no_path(path: Any, got: str) -> None:
    """``lm.save(path, model)`` gives the model for the path."""
    for call in (lambda: lm.save(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), path), lambda: lm.open(path)):
        with pytest.raises(lm.ArgumentError, match=rf"^the path\n  got:    {got}\n  needed: the name of a file"):
            call()
