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


def test_a_stack_for_one_attention_is_refused() -> None:
    model = nnx.Dict(m=nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0)))
    state = {f"m.{k}": v for k, v in torch.nn.MultiheadAttention(8, 2).state_dict().items()}
    state["m.out_proj.weight"] = torch.ones(2, 4, 8)  # the shape of Flax's kernel
    with pytest.raises(lm.StateDictError, match="2 axes, as PyTorch has"):
        lm.load(model, state, layout="torch")


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
