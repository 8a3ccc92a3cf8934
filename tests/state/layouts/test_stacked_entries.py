"""Entries that a file has stacked, ``(layers, out, in)``, in modules of ``nnx.vmap``: each layer is PyTorch's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

N = 4


def rnn(cell: Any) -> Callable[[Any], Any]:
    return lambda rngs: nnx.RNN(cell(N, N, rngs=rngs), rngs=rngs)


LAYERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "SimpleCell": (lambda: torch.nn.RNN(N, N, batch_first=True), rnn(nnx.SimpleCell)),
    "SimpleCell without biases": (lambda: torch.nn.RNN(N, N, bias=False, batch_first=True), rnn(nnx.SimpleCell)),
    "LSTMCell": (lambda: torch.nn.LSTM(N, N, batch_first=True), rnn(nnx.LSTMCell)),
    "OptimizedLSTMCell": (lambda: torch.nn.LSTM(N, N, batch_first=True), rnn(nnx.OptimizedLSTMCell)),
    "ResetAfterGRUCell": (lambda: torch.nn.GRU(N, N, batch_first=True), rnn(lm.ResetAfterGRUCell)),
    "Linear": (lambda: torch.nn.Linear(N, N), lambda rngs: nnx.Linear(N, N, rngs=rngs)),
    "LayerNorm": (lambda: torch.nn.LayerNorm(N), lambda rngs: nnx.LayerNorm(N, epsilon=1e-5, rngs=rngs)),
    "LinearGeneral": (lambda: torch.nn.Linear(N, N), lambda rngs: nnx.LinearGeneral(N, N, rngs=rngs)),
    "LinearGeneral of heads": (lambda: torch.nn.Linear(N, N), lambda rngs: nnx.LinearGeneral(N, (2, 2), rngs=rngs)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_square_layers_of_a_stack(name: str) -> None:
    make, build = LAYERS[name]
    torch.manual_seed(0)
    layers = [make() for _ in range(N)]
    stack = {f"m.{key}": torch.stack([layer.state_dict()[key] for layer in layers]) for key in layers[0].state_dict()}
    made = nnx.vmap(lambda key: build(nnx.Rngs(key)), in_axes=0, out_axes=0)(jax.random.split(jax.random.key(0), N))
    model = nnx.Dict(m=made)
    out = lm.export_torch(model, like=lm.load(model, stack, layout="torch"))
    assert list(out) == list(stack) and all(np.array_equal(out[key], value.numpy()) for key, value in stack.items())
    x = np.random.RandomState(1).randn(2, 3, N).astype(np.float32)
    run = nnx.vmap(lambda layer, y: layer(y), in_axes=(0, None))
    with jax.default_matmul_precision("highest"):
        got = np.asarray(run(model.m, jnp.asarray(x))).reshape(N, 2, 3, N)
    for i, layer in enumerate(layers):
        want = layer(torch.from_numpy(x))
        want = (want[0] if isinstance(want, tuple) else want).detach().numpy()
        np.testing.assert_allclose(got[i], want, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_square_adapters_of_a_stack() -> None:
    a, b = (np.random.RandomState(seed).randn(N, N, N).astype(np.float32) for seed in (0, 1))
    lora = nnx.vmap(lambda key: nnx.LoRA(N, N, N, rngs=nnx.Rngs(key)), in_axes=0, out_axes=0)
    model = nnx.Dict(m=lora(jax.random.split(jax.random.key(0), N)))
    lm.load(model, {"m.lora_A.weight": a, "m.lora_B.weight": b}, layout="torch")
    np.testing.assert_array_equal(model.m.lora_a[...], a.swapaxes(1, 2))
    np.testing.assert_array_equal(model.m.lora_b[...], b.swapaxes(1, 2))


def test_stacked_statistics_after_a_flatten() -> None:
    mean = np.arange(2 * 12, dtype=np.float32).reshape(2, 12)
    norm = nnx.vmap(lambda key: nnx.BatchNorm(12, rngs=nnx.Rngs(key)), in_axes=0, out_axes=0)
    model: Any = nnx.Dict(m=norm(jax.random.split(jax.random.key(0), 2)))
    names = ("running_mean", "running_var", "weight", "bias")
    lm.load(model, {f"m.{name}": mean for name in names}, layout="torch", flatten={"m": (2, 2, 3)})
    want = mean.reshape(2, 3, 2, 2).transpose(0, 2, 3, 1).reshape(2, 12)
    for value in (model.m.mean, model.m.var, model.m.scale, model.m.bias):
        np.testing.assert_array_equal(value[...], want)


def attention(bias: bool = True) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(2, 8, decode=False, use_bias=bias, rngs=nnx.Rngs(0))


def test_a_stack_for_one_attention_is_refused() -> None:
    state = {f"m.{k}": v for k, v in torch.nn.MultiheadAttention(8, 2).state_dict().items()}
    state["m.out_proj.weight"] = torch.ones(2, 4, 8)  # the shape of Flax's kernel
    with pytest.raises(lm.StateDictError, match="2 axes, as PyTorch has") as caught:
        lm.load(nnx.Dict(m=attention()), state, layout="torch")
    write = r'rename=[(r"^m\.out_proj\.weight$", "m.out.kernel")]  # with an axis of heads'
    assert [problem.write for problem in caught.value.problems] == [write]


def test_matrices_with_an_axis_of_heads() -> None:
    """XLNet has ``(features, heads, features of a head)`` for all four; the lines name them as Flax does."""
    draw = np.random.default_rng(0)
    names = {"q": "query", "k": "key", "v": "value", "o": "out"}
    state = {f"m.{name}": draw.standard_normal((8, 2, 4)).astype(np.float32) for name in names}
    weights = [(f"m.{short}$", f"m.{name}.weight") for short, name in names.items()]
    model = nnx.Dict(m=attention(bias=False))
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(model, state, layout="torch", rename=weights)
    rules = [rule for p in caught.value.problems for rule in eval(f"dict({p.write}\n)", {"lm": lm})["rename"]]
    lm.load(model, state, layout="torch", rename=[*weights, *rules])
    x = draw.standard_normal((2, 5, 8)).astype(np.float32)
    q, k, v = (torch.einsum("bld,dhn->bhln", *map(torch.from_numpy, (x, state[f"m.{name}"]))) for name in "qkv")
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    with jax.default_matmul_precision("highest"):
        got = np.asarray(model.m(jnp.asarray(x)))
    np.testing.assert_allclose(got, torch.einsum("bhln,dhn->bld", y, torch.from_numpy(state["m.o"])), atol=1e-5)


def attentions(n: int, *, fused: bool, bias: bool) -> tuple[list[Any], dict[str, Any]]:
    """Return attentions of PyTorch, and their stacked entries."""
    torch.manual_seed(0)
    layers = [torch.nn.MultiheadAttention(8, 2, bias=bias, batch_first=True) for _ in range(n)]
    state = {f"m.attn.{k}": torch.stack([x.state_dict()[k] for x in layers]).clone() for k in layers[0].state_dict()}
    for value in state.values():
        value += torch.arange(n).reshape(-1, *(1,) * (value.ndim - 1)) / 10
    for i, layer in enumerate(layers):
        layer.load_state_dict({k.removeprefix("m.attn."): v[i] for k, v in state.items()})
    for kind in ("weight", "bias") if not fused else ():
        whole = state.pop(f"m.attn.in_proj_{kind}", None)
        parts = [] if whole is None else whole.chunk(3, 1)
        state |= {f"m.attn.{q}_proj.{kind}": part for q, part in zip("qkv", parts, strict=False)}
    return layers, state


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_attentions_of_a_stack(fused: bool, bias: bool) -> None:
    layers, state = attentions(3, fused=fused, bias=bias)
    make = nnx.vmap(lambda key: nnx.MultiHeadAttention(2, 8, decode=False, use_bias=bias, rngs=nnx.Rngs(key)))
    model: Any = nnx.Dict(m=nnx.Dict(attn=make(jax.random.split(jax.random.key(0), 3))))
    out = lm.export_torch(model, like=lm.load(model, state, layout="torch"))
    assert out.keys() == state.keys() and all(np.array_equal(out[key], value) for key, value in state.items())
    x = torch.randn(2, 5, 8)
    with jax.default_matmul_precision("highest"):
        run = nnx.vmap(lambda layer, y: layer(y), in_axes=(0, None))
        got = np.asarray(run(model.m.attn, jnp.asarray(x.numpy())))
    for i, layer in enumerate(layers):
        np.testing.assert_allclose(got[i], layer(x, x, x)[0].detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_the_line_for_stacked_attentions_takes_them_apart(fused: bool) -> None:
    layers, state = attentions(3, fused=fused, bias=True)
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(nnx.Dict(m=nnx.Dict(attn=attention())), state, layout="torch")
    (line,) = {problem.write for problem in caught.value.problems}
    assert line == r'rename=[lm.rules.Unstack(r"\bm[.]", into="m.{i}.")]  # for a list of 3 in the model'
    several: Any = nnx.Dict(m=nnx.List([nnx.Dict(attn=attention()) for _ in range(3)]))
    lm.load(several, state, layout="torch", **eval(f"dict({line.partition('  #')[0]})", {"lm": lm}))
    x = torch.randn(2, 5, 8)
    with jax.default_matmul_precision("highest"):
        for block, layer in zip(several.m, layers, strict=True):
            got = np.asarray(block.attn(jnp.asarray(x.numpy())))
            np.testing.assert_allclose(got, layer(x, x, x)[0].detach().numpy(), atol=1e-5)


def test_stacked_layers_are_refused_by_an_export() -> None:
    make = nnx.vmap(lambda key: nnx.LinearGeneral(1, 3, rngs=nnx.Rngs(key)), in_axes=0, out_axes=0)
    with pytest.raises(lm.StateDictError, match="no stacked layers"):
        lm.export_torch(nnx.Dict(m=make(jax.random.split(jax.random.key(0), 2))))


def test_numbered_modules_where_the_model_has_a_stack() -> None:
    """The error says the rule that stacks them; with it they load."""

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.fc, self.out = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

    model = nnx.Dict(layers=nnx.vmap(Block)(nnx.Rngs(0).split(3)))
    names = [f"layers.{i}.{name}.{leaf}" for i in range(3) for name in ("fc", "out") for leaf in ("weight", "bias")]
    draw = np.random.default_rng(0)
    given = {name: draw.random((4, 4) if "weight" in name else (4,), np.float32) for name in names}
    with pytest.raises(lm.StateDictError) as error:
        lm.load(model, given, layout="torch")
    _, cause, write, *_ = str(error.value).splitlines()
    assert cause == "  cause:  the file has numbered modules in 'layers', where the model has one, a stack of them"
    assert write == r'  write:  rename=[lm.rules.Stack(r"^layers[.](\d+)[.]", into="layers.")]'
    options = eval(f"dict({write.removeprefix('  write:  ')})", {"lm": lm})
    lm.load(model, given, layout="torch", **options)
    wanted = np.stack([given[f"layers.{i}.out.weight"].T for i in range(3)])
    np.testing.assert_array_equal(model.layers.out.kernel[...], wanted)


def test_a_stack_where_the_model_has_numbered_modules() -> None:
    """The error says the rule that takes it apart; with it they load."""
    model = nnx.Dict(layers=nnx.List([nnx.Dict(fc=nnx.Linear(4, 4, rngs=nnx.Rngs(0))) for _ in range(3)]))
    draw = np.random.default_rng(0)
    given = {"layers.fc.weight": draw.random((3, 4, 4), np.float32), "layers.fc.bias": draw.random((3, 4), np.float32)}
    with pytest.raises(lm.StateDictError) as error:
        lm.load(model, given, layout="torch")
    _, cause, write, *_ = str(error.value).splitlines()
    assert cause == "  cause:  the model has numbered modules in 'layers', where the file has one, a stack of them"
    assert write == r'  write:  rename=[lm.rules.Unstack(r"\blayers[.]", into="layers.{i}.")]'
    lm.load(model, given, layout="torch", **eval(f"dict({write.removeprefix('  write:  ')})", {"lm": lm}))
    for layer, kernel in zip(model.layers, given["layers.fc.weight"], strict=True):
        np.testing.assert_array_equal(layer.fc.kernel[...], kernel.T)
