"""What is kept between forward and backward: as much as JAX says, and where."""

import contextlib
import io
import math
import re
from typing import Any

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

ag = lm.autograd
X = jnp.ones((8, 40))


class Net(nnx.Module):
    def __init__(self, rngs, lazy=False):
        self.fc1 = lm.LazyLinear(50, rngs=rngs) if lazy else nnx.Linear(40, 50, rngs=rngs)
        self.bn = lm.LazyBatchNorm(rngs=rngs) if lazy else nnx.BatchNorm(50, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.blocks = nnx.List([nnx.Sequential(nnx.Linear(50, 50, rngs=rngs), jax.nn.gelu) for _ in range(2)])
        self.fc2 = lm.LazyLinear(2, rngs=rngs) if lazy else nnx.Linear(50, 2, rngs=rngs)

    def __call__(self, x):
        x = self.drop(jnp.tanh(self.bn(self.fc1(x))))
        for block in self.blocks:
            x = block(x)
        return self.fc2(x)


def loss_fn(m, x):
    return (m(x) ** 2).mean()


SIZES = {"bool": 1, "f32": 4, "i32": 4, "float32": 4, "int32": 4}


def bytes_by_jax(f, *args):
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        jax.ad_checkpoint.print_saved_residuals(f, *args)
    kept = re.findall(r"^(\w+)\[([\d,]*)\]", text.getvalue(), re.M)
    assert len(kept) == len(text.getvalue().splitlines())
    return sum(SIZES[dtype] * math.prod(map(int, filter(None, shape.split(",")))) for dtype, shape in kept)


PLAIN = {
    "exp_sin": lambda x: jnp.sin(jnp.exp(x)).sum(),
    "argument": lambda x: (x * x).sum(),
    "mask": lambda x: jax.nn.relu(x * 2).sum(),
    "jit": lambda x: jax.jit(lambda a: jnp.exp(jnp.sin(a)) * a)(x).sum(),
    "jit_of_jit": lambda x: jax.jit(jax.jit(lambda a: (a, jnp.exp(a) * a)))(x)[1].sum(),
    "scan": lambda x: jax.lax.scan(lambda c, a: (jnp.sin(c) * a, None), 1.0, x.ravel())[0],
    "checkpoint": lambda x: jax.checkpoint(lambda a: jnp.sin(jnp.sin(a)))(x).sum(),
    "closed_over": lambda x: (x * jnp.arange(320.0).reshape(8, 40)).sum(),
    "tree": lambda x: {"a": jnp.exp(x), "b": (x * x, 3)},
    "nothing": lambda x: (2 * x).sum(),
}


@pytest.mark.parametrize("name", PLAIN)
def test_total_is_what_jax_says(name):
    assert ag.saved_bytes(PLAIN[name], X).total == bytes_by_jax(PLAIN[name], X)


@pytest.mark.slow
def test_total_of_a_model_is_what_jax_says():
    graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)
    want = bytes_by_jax(lambda p: loss_fn(nnx.merge(graph, p, rest, copy=True), X), params)
    m = Net(nnx.Rngs(0))
    before = jax.tree.leaves(nnx.state(m, nnx.Not(nnx.RngKey)))
    assert ag.saved_bytes(loss_fn, m, X).total == want
    assert ag.saved_bytes(loss_fn, m, jax.ShapeDtypeStruct(X.shape, X.dtype)).total == want
    after = jax.tree.leaves(nnx.state(m, nnx.Not(nnx.RngKey)))
    assert all(a is b for a, b in zip(before, after, strict=True))


@pytest.mark.slow
def test_rows_say_layer_operation_and_type():
    report = ag.saved_bytes(loss_fn, Net(nnx.Rngs(0)), X)
    dropped = [row for row in report.rows if row.layer == "drop"]
    assert {row.array for row in dropped} == {"bool[8,50]", "f32[8,50]"}
    assert {row.layer for row in report.rows} == {"", "bn", "drop"} | {
        f"blocks.{i}{inner}" for i in range(2) for inner in ("", ".layers.0")
    }
    arguments = {row.source: row.nbytes for row in report.rows if row.is_argument}
    assert arguments == {
        "blocks.0.layers.0.kernel": 10_000,
        "blocks.1.layers.0.kernel": 10_000,
        "fc2.kernel": 400,
        "x": 1280,
    }
    assert report.of_arguments == 21_680
    assert sum(report.by_layer.values()) == report.total == sum(row.nbytes for row in report.rows)


def test_named_scopes_are_layers_and_within_layers():
    class Attention(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(4))

        def __call__(self, x):
            with jax.named_scope("scores"):
                return jnp.exp(x * self.w)

    def loss(m, x):
        with jax.named_scope("head"):
            return jnp.sin(m(x)).sum()

    report = ag.saved_bytes(nnx.jit(loss), Attention(), jnp.ones(4))
    made = {(row.layer, row.source) for row in report.rows if not row.is_argument}
    assert made == {("/scores", "exp"), ("head", "cos")}


def test_layers_of_several_modules_have_the_names_of_the_arguments():
    def loss(encoder, decoder, x):
        return jnp.sin(decoder(jnp.tanh(encoder(x)))).sum()

    e, d = Net(nnx.Rngs(0)), nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(1)), jnp.exp)
    report = ag.saved_bytes(loss, e, decoder=d, x=X)
    assert {"encoder.bn", "encoder.drop", "decoder"} <= set(report.by_layer)
    assert "decoder.layers.0.kernel" in {row.source for row in report.rows}


def test_frozen_parameters_keep_nothing():
    m = Net(nnx.Rngs(0))
    whole = ag.saved_bytes(loss_fn, m, X).total
    for part in (m.fc1, m.bn, m.blocks):
        ag.requires_grad_(part, False)
    last = ag.saved_bytes(loss_fn, m, X)
    assert last.total < whole / 10
    assert set(last.by_layer) <= {"", "blocks.1", "(argument)"}


@pytest.mark.slow
def test_lazy_models_stay_lazy():
    m = Net(nnx.Rngs(0), lazy=True)
    want = ag.saved_bytes(loss_fn, Net(nnx.Rngs(0)), X)
    assert ag.saved_bytes(loss_fn, m, jax.ShapeDtypeStruct((8, 40), jnp.float32)) == want
    assert ag.saved_bytes(m, X).total == ag.saved_bytes(Net(nnx.Rngs(0)), X).total
    assert lm.is_lazy(m.fc1)
    m(X)
    assert ag.saved_bytes(loss_fn, m, X) == want


def test_nothing_is_computed():
    def fail(x):
        raise AssertionError

    def f(x):
        jax.debug.callback(fail, x)
        return jnp.exp(x).sum()

    assert ag.saved_bytes(f, jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32)).total == 4 << 40
    jax.effects_barrier()


def test_blocks_and_checkpoints_count():
    def halved(m, x):
        with ag.save_as(jnp.bfloat16):
            return loss_fn(m, x)

    m = Net(nnx.Rngs(0))
    assert ag.saved_bytes(halved, m, X).total <= 0.55 * ag.saved_bytes(loss_fn, m, X).total
    by_remat = ag.saved_bytes(lambda m, x: nnx.remat(loss_fn)(m, x), m, X).total
    assert ag.saved_bytes(ag.recompute(loss_fn), m, X).total <= by_remat


def test_what_is_kept_on_the_host_is_told():
    def f(x):
        with ag.save_on_cpu():
            y = jnp.exp(x)
        return jnp.sin(y).sum()

    report = ag.saved_bytes(f, jnp.ones(1000))
    assert (report.total, report.on_host) == (8000, 4000)
    assert str(report).endswith("total: 8,000 bytes in 2 arrays; 4,000 of them on the host")


def test_it_prints_as_a_table():
    def f(x, *, scale):
        with jax.named_scope("inner"):
            y = jnp.exp(x) * scale
        return jnp.sin(y).sum()

    report = ag.saved_bytes(f, jnp.ones((10, 100)), scale=np.float32(2))
    lines = [line.rstrip() for line in str(report).split("\n")]
    assert lines == [
        "layer        arrays  bytes  largest",
        "(argument)        1      4  f32[] scale",
        "inner             1  4,000  f32[10,100] exp",
        "(no module)       1  4,000  f32[10,100] cos",
        "total: 8,004 bytes in 3 arrays; 4 of them arguments and parameters",
    ]
    assert repr(report) == str(report)


@pytest.mark.parametrize(
    ("f", "args", "got"),
    [
        (lambda n: n * 2, (jnp.arange(3),), "no float among the arguments, and no trained parameter"),
        (lambda x: x > 0, (jnp.ones(3),), "no float among the results"),
    ],
    ids=["arguments", "results"],
)
def test_what_has_no_gradient_is_refused(f, args, got):
    with pytest.raises(lm.LazyError) as error:
        ag.saved_bytes(f, *args)
    assert str(error.value).split("\n") == [
        "lm.autograd.saved_bytes",
        f"  got:    {got}",
        "  needed: a function that floats go into and come out of: what it keeps is for its gradient",
        "  write:  lm.autograd.saved_bytes(loss, model, x)  # with a loss that returns a float",
    ]


def test_what_cannot_be_called_is_refused():
    array: Any = jnp.ones(3)
    with pytest.raises(lm.ArgumentError, match=r"lm\.autograd\.saved_bytes"):
        ag.saved_bytes(array)
