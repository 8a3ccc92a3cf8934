"""Reports as data, as a table and in a notebook: rows, totals, what is unknown, and floating-point operations."""

import copy
import pickle
from html.parser import HTMLParser
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import array, lazy_mlp, plain_mlp, spec

import lazymods as lm


class Net(nnx.Module):
    """A root with a parameter of its own, shared layers, statistics, raw arrays, a dtype of two bytes."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones(()))
        self.stem = lm.LazyConv(4, (3, 3), param_dtype=jnp.bfloat16, dtype=jnp.float32, rngs=rngs)
        self.norm = lm.LazyBatchNorm(rngs=rngs)
        self.blocks = nnx.List([lm.LazyLinear(4, use_bias=False, rngs=rngs)])
        self.again = self.blocks[0]
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.table = nnx.data(np.zeros((2, 3), np.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm(self.stem(x))
        return self.scale[...] * self.drop(self.again(self.blocks[0](x)))


def net() -> Any:
    return Net(rngs=nnx.Rngs(0))


X = spec(2, 6, 6, 3)


def rows(report: lm.ShapeReport) -> dict[str, lm.LayerRow]:
    return {row.path: row for row in report.rows}


# ---------------------------------------------------------------- as data


@pytest.mark.parametrize("find", [lm.infer_shapes, lm.materialize, lm.summary], ids=lambda f: f.__name__)
def test_rows(find: Any) -> None:
    report = find(net(), X)
    table = rows(report)
    assert list(table) == ["", "stem", "norm", "blocks.0"]
    ready = find is lm.materialize  # then the rows say what the layers are now
    prefix = "" if ready else "Lazy"
    assert [r.layer for r in report.rows] == ["Net", f"{prefix}Conv", f"{prefix}BatchNorm", f"{prefix}Linear"]
    assert [r.lazy for r in report.rows] == [False, not ready, not ready, not ready]
    assert [r.inputs for r in report.rows] == ["f32[2,6,6,3]", "f32[2,6,6,3]", "f32[2,6,6,4]", "f32[2,6,6,4]"]
    assert [r.output for r in report.rows] == [spec(2, 6, 6, 4)] * 4
    assert [r.inferred for r in report.rows] == [{}, {"in_features": 3}, {"num_features": 4}, {"in_features": 4}]
    shapes = {path: {p.name: p.shape for p in row.parameters} for path, row in table.items()}
    assert shapes == {
        "": {"scale": (), "table": (2, 3)},
        "stem": {"kernel": (3, 3, 3, 4), "bias": (4,)},
        "norm": {"scale": (4,), "bias": (4,), "mean": (4,), "var": (4,)},
        "blocks.0": {"kernel": (4, 4)},
    }
    assert [r.size for r in report.rows] == [7, 112, 16, 16]
    assert [r.nbytes for r in report.rows] == [28, 224, 64, 64]
    assert (report.total_parameters, report.total_bytes) == (151, 380)
    assert report.output == spec(2, 6, 6, 4) and report.is_complete and report.unreached == ()


@pytest.mark.parametrize("find", [lm.infer_shapes, lm.summary], ids=lambda f: f.__name__)
def test_parameters_in_definition_order(find: Any) -> None:
    assert [p.name for p in rows(find(lazy_mlp(), spec(2, 8)))["fc1"].parameters] == ["kernel", "bias"]


def test_a_ready_model_has_the_same_rows() -> None:
    lazy, ready = lm.infer_shapes(lazy_mlp(), spec(2, 8)), lm.infer_shapes(plain_mlp(), spec(2, 8))
    for a, b in zip(lazy.rows, ready.rows, strict=True):
        assert (a.path, a.inputs, a.output, a.size, a.nbytes) == (b.path, b.inputs, b.output, b.size, b.nbytes)
        assert {p.name: p.shape for p in a.parameters} == {p.name: p.shape for p in b.parameters}
        assert (a.layer, a.lazy, b.layer, b.lazy) == ("LazyLinear", True, "Linear", False)
        assert a.inferred and not b.inferred


def test_what_is_not_known_yet() -> None:
    report = lm.summary(lazy_mlp())
    first = report.rows[0]
    assert [(p.name, p.shape, p.size, p.nbytes) for p in first.parameters] == [
        ("kernel", (None, 16), None, None), ("bias", (16,), 16, 64)]
    assert (first.size, first.nbytes, first.inputs, first.output, first.inferred) == (None, None, "", None, {})
    assert not report.is_complete and report.output is None and report.unreached == ()
    assert (report.total_parameters, report.total_bytes) == (20, 80)  # the biases


def test_a_parameter_of_unknown_rank() -> None:
    row = lm.summary(nnx.Dict(w=lm.UninitializedParameter())).rows[0]
    assert row.parameters[0].shape is None and row.size is None and str(row.parameters[0]) == "w ?"


def test_layers_that_are_not_reached() -> None:
    class Skips(nnx.Module):
        def __init__(self) -> None:
            self.a, self.b, self.c = lm.LazyLinear(4, rngs=nnx.Rngs(0)), plain_mlp(), lm.LazyLinear(2, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.a(x)

    report = lm.infer_shapes(Skips(), spec(2, 8))
    table = rows(report)
    assert report.unreached == ("c",) and not report.is_complete
    assert [table[p].inputs for p in ("a", "b.fc1", "c")] == ["f32[2,8]", None, None]
    assert table["c"].size is None and table["b.fc1"].size == 144
    assert report.total_parameters == 36 + 212 + 2


class MakesLayers(lm.LazyModuleMixin, nnx.Module):
    """Has some of its layers only when it is initialized: lazy, ready and nested ones, and one that is not called."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.w = lm.UninitializedParameter((None, 6), init=nnx.initializers.ones)
        self.rngs = rngs

    def initialize_parameters(self, x: jax.Array) -> None:
        self.w.materialize((x.shape[-1], 6))
        self.a, self.b = lm.LazyLinear(3, rngs=self.rngs), nnx.Linear(3, 2, rngs=self.rngs)
        self.c, self.unused = lazy_mlp(), nnx.Linear(2, 2, rngs=self.rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.c(self.b(self.a(x @ self.w[...])))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("find", [lm.infer_shapes, lm.summary, lm.materialize])
def test_layers_that_a_layer_makes_when_it_is_initialized(find: Any, nested: bool) -> None:
    layer, x = MakesLayers(rngs=nnx.Rngs(0)), spec(5, 4)
    model = nnx.Sequential(nnx.relu, layer) if nested else layer
    found = {p.removeprefix("layers.1").lstrip("."): r for p, r in rows(find(model, x)).items() if nested or p}
    ready = MakesLayers(rngs=nnx.Rngs(0))
    ready(jnp.ones((5, 4)))
    want = {p: r for p, r in rows(lm.infer_shapes(ready, x)).items() if p}
    for path, row in want.items():
        assert (found[path].inputs, found[path].size) == (row.inputs, row.size), path
        assert str(found[path].output) == str(row.output)
    inputs = {p: r.inputs for p, r in want.items()}
    made = {"a": "f32[5,6]", "b": "f32[5,3]", "c.fc1": "f32[5,2]", "unused": None}
    assert {p: inputs[p] for p in made} == made


def test_the_first_call_of_a_layer_that_is_called_often() -> None:
    model = nnx.Sequential(*[lm.LazyLinear(8, rngs=nnx.Rngs(0))] * 3)
    assert [row.path for row in lm.infer_shapes(model, spec(2, 8)).rows] == ["layers.0"]


def test_rows_of_a_recurrent_layer() -> None:
    model = nnx.RNN(lm.LazySimpleCell(4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    table = rows(lm.infer_shapes(model, spec(2, 5, 3)))
    assert table["cell"].inferred == {"in_features": 3} and table["cell"].inputs == "f32[2,4], f32[2,3]"
    assert {p.name: p.shape for p in table["cell.dense_i"].parameters} == {"kernel": (3, 4), "bias": (4,)}
    assert {p.name: p.shape for p in table["cell.dense_h"].parameters} == {"kernel": (4, 4)}


def test_arguments_of_every_kind_in_the_input_column() -> None:
    class Takes(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(2))

        def __call__(self, x: Any, mask: Any = None, *, train: bool = False, mode: str = "a") -> Any:
            return x["a"]

    row = lm.infer_shapes(Takes(), {"a": spec(2), "b": [spec(3, dtype=jnp.int32)]}, mode="b", train=True).rows[0]
    assert row.inputs == "{a: f32[2], b: [i32[3]]}, mode='b', train=True"


def test_reports_are_values() -> None:
    report = lm.summary(net(), X)
    for twin in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
        assert str(twin) == str(report) and twin.output == report.output
    with pytest.raises(AttributeError):
        report.output = None  # type: ignore[misc]


# ---------------------------------------------------------------- floating-point operations


def flops(layer: Any, *args: Any) -> float:
    graphdef, state = nnx.split(layer)
    lowered = jax.jit(lambda s, *a: nnx.merge(graphdef, s)(*a)).lower(state, *args)
    # not every backend counts before it compiles
    cost: Any = lowered.cost_analysis() or lowered.compile().cost_analysis()
    return cost["flops"]


def test_flops_are_those_of_xla_for_the_explicit_layer() -> None:
    want, x = plain_mlp(), array(32, 8)
    for model in (lazy_mlp(), plain_mlp()):
        report = lm.summary(model, spec(32, 8))
        assert [row.flops for row in report.rows] == [flops(want.fc1, x), flops(want.fc2, array(32, 16))]
        assert report.flops == flops(want, x)
        assert report.flops is not None and report.flops >= 2 * 32 * (8 * 16 + 16 * 4)


def test_no_flops_unless_asked_for() -> None:
    report = lm.infer_shapes(lazy_mlp(), spec(32, 8))
    assert report.flops is None and all(row.flops is None for row in report.rows)
    assert "FLOPs" not in str(report)


def test_flops_of_a_layer_that_is_not_reached_are_left_empty() -> None:
    model = nnx.Dict(a=lm.LazyLinear(2, rngs=nnx.Rngs(0)))

    class OnlyA(nnx.Module):
        def __init__(self) -> None:
            self.a, self.b = model.a, lm.LazyLinear(3, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.a(x)

    report = lm.summary(OnlyA(), spec(2, 4))
    assert report.rows[0].flops and report.rows[1].flops is None
    assert str(report).count("not reached") == 2  # the row, and the list at the end


# ---------------------------------------------------------------- as a table, and in a notebook


def test_text() -> None:
    assert str(lm.infer_shapes(plain_mlp(), spec(32, 8))).splitlines()[-1] == (
        "total: 212 parameters, 848 B; output f32[32,4]")
    text = str(lm.summary(lazy_mlp(), spec(32, 784)))
    head, *lines, foot = text.splitlines()
    assert head.split() == ["path", "layer", "input", "->", "output", "parameters", "count", "bytes", "FLOPs"]
    assert "LazyLinear (lazy)" in lines[0] and "f32[32,784] ->" in lines[0] and " f32[32,16] " in text
    assert max(map(len, (head, *lines))) <= 100
    assert "12,560" in lines[0] and "49.1 KiB" in lines[0]
    assert any("kernel (784, 16) float32" in line for line in lines)
    assert foot.startswith("total: 12,628 parameters, 49.3 KiB; ") and "FLOPs" in foot and "f32[32,4]" in foot


def test_text_of_what_is_unknown() -> None:
    text = str(lm.summary(lazy_mlp()))
    assert "kernel (?, 16)" in text and " ? " in text
    assert text.splitlines()[-1] == "total: 20 parameters, 80 B, and what is not known yet (?)"


def test_a_wide_table_is_not_cut() -> None:
    model: Any = lm.LazyLinear(4, rngs=nnx.Rngs(0))
    for _ in range(12):
        model = nnx.Sequential(model)
    path = ".".join(["layers.0"] * 12)
    _, *lines, _ = str(lm.infer_shapes(model, spec(2, 8))).splitlines()
    assert "144 B" in lines[0] and max(map(len, lines)) <= 100
    assert "".join(line.split("  ")[0] for line in lines) == path  # folded after dots, and not cut


def test_more_is_told_if_asked_for() -> None:
    report = lm.infer_shapes(lazy_mlp(), spec(32, 784))
    assert "in_features" not in str(report) and "lecun_normal" not in str(report)
    text = report.table(verbose=True)
    head, *lines = text.splitlines()
    first = " ".join(lines[:3])
    assert head.split()[-2:] == ["inferred", "init"]
    assert "in_features=784" in first and "lecun_normal" in first
    ready = lm.infer_shapes(plain_mlp(784), spec(32, 784))
    assert report.footer() == ready.footer() and "1 compiled kernel for all shapes" in report.footer(verbose=True)


def test_the_repr_is_the_table() -> None:
    report = lm.summary(net(), X)
    assert repr(report) == str(report) and repr(report).startswith("path ")


def test_what_does_not_fit_in_100_columns_is_folded_where_texts_are_long() -> None:
    class Takes(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((2, 3)))

        def __call__(self, x: dict[str, jax.Array]) -> dict[str, jax.Array]:
            return x

    report = lm.infer_shapes(Takes(), {f"input_{i}": spec(2, 3) for i in range(6)})
    lines = str(report).splitlines()[:-1]
    assert max(map(len, lines)) <= 100 and len(lines) > 2
    whole = "".join(line[16:].split("  ")[0] for line in lines[1:])
    assert "w (2, 3) float32" in lines[1] and "input_0: f32[2,3]" in whole


def test_buffers_are_counted_apart() -> None:
    model = nnx.Sequential(lm.LazyLinear(4, rngs=nnx.Rngs(0)), lm.LazyBatchNorm(rngs=nnx.Rngs(0)))
    totals = "total: 32 parameters, 128 B; Param 24 (96 B) + BatchStat 8 (32 B); output"
    assert totals in str(lm.infer_shapes(model, spec(2, 3)))


def test_a_module_that_is_a_layer_itself() -> None:
    text = str(lm.infer_shapes(lm.LazyLinear(4, rngs=nnx.Rngs(0)), spec(2, 8)))
    assert text.splitlines()[1].startswith("(model)  LazyLinear (lazy)  f32[2,8] -> f32[2,4]  kernel (8, 4) float32")


SIZES = {500: "500 B", 2048: "2.0 KiB", 3 * 2**20: "3.0 MiB", 5 * 2**30: "5.0 GiB"}


@pytest.mark.parametrize("size, words", SIZES.items(), ids=str)
def test_sizes_in_bytes(size: int, words: str) -> None:
    model = lm.LazyLinear(1, use_bias=False, rngs=nnx.Rngs(0))
    assert f"parameters, {words}; " in str(lm.infer_shapes(model, spec(1, size // 4)))


class Cells(HTMLParser):
    """Collects the cells of a table, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True
        if tag == "br":
            self.rows[-1][-1] += "\n"

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def test_html_has_the_cells_of_the_table() -> None:
    report = lm.summary(net(), X)
    parser = Cells()
    parser.feed(report._repr_html_())
    heads, cells = report.cells()
    assert parser.rows == [heads, *cells]
    assert report.footer() in report._repr_html_()


def test_html_is_escaped() -> None:
    class Odd(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(2))

        def __call__(self, x: jax.Array, note: str) -> jax.Array:
            return x

    page = lm.infer_shapes(Odd(), spec(2), "<b>&")._repr_html_()
    assert "<b>" not in page and "&lt;b&gt;&amp;" in page


def test_parameters_of_every_kind() -> None:
    class Holds(nnx.Module):
        def __init__(self) -> None:
            self.tree = nnx.Variable({"a": jnp.ones(3)})
            self.count, self.name = nnx.Variable(0), nnx.Variable("left")
            self.mixed = nnx.data([jnp.ones(2), nnx.Dict(w=nnx.Param(jnp.ones(5)))])
            self.rngs = nnx.Rngs(0)

    table = rows(lm.summary(Holds()))
    assert {p.name: p.shape for p in table["mixed.1"].parameters} == {"w": (5,)}
    shapes = {p.name: p.shape for p in table[""].parameters}
    assert shapes["mixed.0"] == (2,) and shapes["count"] == () and "mixed.1.w" not in shapes
    assert not any("rngs" in name for name in shapes)
