"""How reports are shown: as wide as there is room, in colour where rich prints, in a notebook, in IPython."""

import io
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import lazy_mlp, spec
from rich.console import Console

import lazymods as lm
from lazymods._initial.fill import name_of_constant, name_of_initializer
from lazymods._recording.dot import Drawing
from lazymods._tables import Table

init = nnx.initializers
WIDE = Table(
    ("path", "what", "n"),
    [("a.long.path.of.names", "some words that go on\nand a second line", "1"), ("b", "few", "1,000")],
    numbers=("n",),
    folded=(("what", 10), ("path", 8)),
    marked=[1],
    before=["above; not folded, however long it is"],
    totals="total: 1; total: 2; total: 3",
    after=["below"],
)


def test_a_table_that_has_room() -> None:
    assert WIDE.text(80).splitlines() == [
        "above; not folded, however long it is",
        "path                  what                       n",
        "a.long.path.of.names  some words that go on      1",
        "                      and a second line",
        "b                     few                    1,000",
        "total: 1; total: 2; total: 3",
        "below",
    ]


def test_a_table_that_is_folded() -> None:
    assert WIDE.text(27).splitlines() == [
        "above; not folded, however long it is",
        "path      what            n",
        "a.long.   some words      1",
        "path.of.  that go on",
        "names     and a",
        "          second",
        "          line",
        "b         few         1,000",
        "total: 1; total: 2;",
        "  total: 3",
        "below",
    ]


def test_what_belongs_together_begins_in_one_line() -> None:
    rows = [("one two\nthree", "1\n2", "x y")]
    table = Table(("a", "b", "c"), rows, folded=(("a", 3),), together=("a", "b"))
    assert table.text(10).splitlines() == ["a      b  c", "one    1  x y", "two", "three  2"]


def test_names_are_folded_after_underscores_where_there_is_no_other_way() -> None:
    rows = [("a.name_of_words", "kernel (16, 4, 4) float32")]
    table = Table(("a", "b"), rows, folded=(("a", 8), ("b", 18), ("a", 6)))
    assert table.text(30).splitlines() == [
        "a           b",
        "a.name_of_  kernel (16, 4, 4)",
        "words       float32",
    ]


class Deep(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        layer = lm.LazyMultiHeadAttention(4, decode=False, rngs=rngs)
        self.decoder = nnx.Dict(transformer_layers=nnx.List([nnx.Dict(self_attention_of_the_decoder=layer)]))
        self.spectral = lm.LazySpectralNorm(lm.LazyLinear(8, rngs=rngs), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.spectral(self.decoder["transformer_layers"][0]["self_attention_of_the_decoder"](x))


def test_long_paths_and_many_parameters_fit_in_100_columns() -> None:
    text = str(lm.infer_shapes(Deep(), spec(2, 12, 16)))
    assert max(map(len, text.splitlines())) <= 100
    assert "out_sharding" not in text  # Flax's own None, which says nothing


def test_a_model_that_was_not_run_has_no_column_of_inputs() -> None:
    assert lm.summary(Deep()).cells()[0] == ["path", "layer", "parameters", "count", "bytes"]
    assert "input -> output" in lm.summary(Deep(), spec(2, 12, 16)).cells()[0]


def shown(report: Any, **options: Any) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system="standard", **options)
    console.print(report)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_rich_prints_in_colour_and_as_wide_as_its_console(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    report = lm.infer_shapes(lazy_mlp(), spec(32, 784))
    text = shown(report)
    assert "\x1b[1mpath" in text and "\x1b[33mfc1" in text  # heads in bold, lazy layers in yellow
    assert "\x1b[33m" not in shown(report, no_color=True)
    plain = Console(file=io.StringIO(), width=60)
    plain.print(report)
    lines = plain.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 60 and "\x1b" not in "".join(lines)


def test_print_is_plain_in_a_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    report = lm.infer_shapes(lazy_mlp(), spec(32, 784))
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    print(report)
    assert "\x1b" not in terminal.getvalue() and "fc1" in terminal.getvalue()


def test_every_report_is_html_that_takes_the_colours_of_the_page() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jnp.sin(jnp.exp(x)).sum()

    reports: list[Any] = [
        lm.summary(lazy_mlp(), spec(2, 8)),
        lm.autograd.saved_bytes(loss, jnp.ones(3)),
        lm.dispatch.Operator("one").dispatch_table(),
    ]
    for report in reports:
        page = report._repr_html_()
        assert "<table" in page and "background:transparent" in page
        assert "color:black" not in page and "color:white" not in page
    assert reports[0]._repr_html_().count("#d97706") == 2  # the lazy layers


def test_html_keeps_numbers_and_what_belongs_together_in_their_lines() -> None:
    page = lm.summary(lazy_mlp(), spec(2, 8))._repr_html_()
    whole = {head for style, head in re.findall(r'<th style="([^"]*)">([^<]+)</th>', page) if style.endswith(":pre;")}
    assert whole == {"parameters", "count", "bytes", "FLOPs"}


def test_ipython_shows_the_same_text() -> None:
    class Printer:
        written = ""

        def text(self, text: str) -> None:
            self.written += text

    printer, report = Printer(), lm.infer_shapes(lazy_mlp(), spec(2, 8))
    report._repr_pretty_(printer, False)
    assert printer.written == "\n".join(line.rstrip() for line in str(report).splitlines())


NAMES = [
    (init.lecun_normal(), "lecun_normal"),
    (init.he_uniform(), "he_uniform"),
    (init.glorot_normal(), "glorot_normal"),
    (init.variance_scaling(0.5, "fan_out", "normal"), "variance_scaling(scale=0.5)"),
    (init.normal(0.02), "normal(stddev=0.02)"),
    (init.uniform(0.1), "uniform(scale=0.1)"),
    (lm.has_uninitialized_params, "has_uninitialized_params"),
    (None, ""),
]


@pytest.mark.parametrize("initializer, name", NAMES, ids=[name for _, name in NAMES])
def test_initializers_in_words(initializer: Any, name: str) -> None:
    assert name_of_initializer(initializer) == name


@pytest.mark.parametrize("value, name", [(0.0, "zeros"), (1, "ones"), (0.5, "all 0.5"), (-3, "all -3")])
def test_constants_in_words(value: float, name: str) -> None:
    assert name_of_constant(value) == name


def test_totals_by_kind_and_what_is_trained() -> None:
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    first: Any = model.layers[0]
    lm.autograd.requires_grad_(first, False)
    report = lm.summary(model)
    assert report.by_kind == {"Param": (15, 60), "BatchStat": (6, 24)}
    assert report.footer() == (
        "total: 21 parameters, 84 B; 6 trained, 9 frozen; Param 15 (60 B) + BatchStat 6 (24 B)")


def test_flops_and_counts_say_what_they_count() -> None:
    class Scaled(nnx.Module):
        def __init__(self) -> None:
            self.scale, self.fc = nnx.Param(jnp.ones(4)), nnx.Linear(3, 4, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.fc(x) * self.scale[...][None]

    legend = "count and bytes are a layer's own; FLOPs are of one call, with the layers inside of it"
    assert str(lm.summary(Scaled(), spec(2, 3))).splitlines()[-1] == legend
    assert legend not in str(lm.infer_shapes(Scaled(), spec(2, 3)))


# ---------------------------------------------------------------- graphs


def test_a_graph_is_its_text_and_a_picture_where_graphviz_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    drawing = lm.lower(lambda x: x * 2, jnp.ones(3)).dot
    assert isinstance(drawing, Drawing) and drawing.startswith("digraph program {")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert drawing._repr_svg_() is None
    assert "install graphviz" in drawing._repr_html_() and "digraph program {" in drawing._repr_html_()
    program = tmp_path / "dot"
    program.write_text('#!/bin/sh\necho "<?xml?><svg>"; while read line; do echo "$line"; done; echo "</svg>"\n')
    program.chmod(0o755)
    picture = drawing._repr_svg_()
    assert picture is not None and picture.startswith("<svg>") and "digraph program {" in picture
    assert "<svg>" in drawing._repr_html_()
    program.write_text("#!/bin/sh\nexit 1\n")
    assert drawing._repr_svg_() is None and "digraph program {" in drawing._repr_html_()
