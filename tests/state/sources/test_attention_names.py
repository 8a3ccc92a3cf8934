"""Attentions whose projections have other names in the file: the line of the error gives PyTorch's numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

torch = pytest.importorskip("torch", reason="PyTorch is the oracle here")

HEADS, WIDTH = 2, 8
NAMES = {
    "timm": ("qkv", "proj"),
    "GPT-NeoX": ("query_key_value", "dense"),
    "diffusers": ("to_q", "to_k", "to_v", "to_out.0"),
    "T5": ("q", "k", "v", "o"),
    "Llama by Meta": ("wq", "wk", "wv", "wo"),
    "DistilBERT": ("q_lin", "k_lin", "v_lin", "out_lin"),
    "ESPnet": ("linear_q", "linear_k", "linear_v", "linear_out"),
    "BERT": ("self.query", "self.key", "self.value", "output.dense"),
    "FT-Transformer": ("W_q", "W_k", "W_v", "W_out"),
    "fused, with its own output": ("Wqkv", "out_proj"),
    "lucidrains": ("to_qkv", "to_out"),
    "TensorFlow's words": ("queries", "keys", "values", "fc_out"),
}


def state_of(names: tuple[str, ...], prefix: str, *, bias: bool) -> tuple[Any, dict[str, Any]]:
    """Return PyTorch's attention, and its numbers by other names."""
    torch.manual_seed(0)
    oracle = torch.nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True)
    state = {}
    for kind in ("weight", "bias") if bias else ("weight",):
        whole = getattr(oracle, f"in_proj_{kind}")
        torch.nn.init.normal_(whole)
        parts = [whole] if len(names) == 2 else whole.chunk(3)
        if names[0] == "query_key_value":  # head by head
            parts = [whole.reshape(3, HEADS, WIDTH // HEADS, -1).transpose(0, 1).reshape(whole.shape)]
        parts = [*parts, torch.nn.init.normal_(getattr(oracle.out_proj, kind))]
        state |= {f"{prefix}{n}.{kind}": part.detach() for n, part in zip(names, parts, strict=True)}
    return oracle, state


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("place", ["attn.", "net.layers.{}.attn.", "attentions.{}.", ""])
@pytest.mark.parametrize("name", NAMES)
def test_the_line_for_an_attention(name: str, place: str, bias: bool) -> None:
    attn = lm.LazyMultiHeadAttention(HEADS, decode=False, use_bias=bias, rngs=nnx.Rngs(0))
    model: Any = attn
    for part in reversed(place.removeprefix("net.").split(".")[:-1]):  # one prefix is the file's only
        model = nnx.List([model] * 12) if part == "{}" else nnx.Dict({part: model})
    oracle, one = state_of(NAMES[name], place, bias=bias)
    state = {entry.replace("{}", str(i)): value for i in range(12) for entry, value in one.items()}
    with pytest.raises(lm.StateDictError) as caught:
        lm.load(model, state, layout="torch")
    found = {problem.write for problem in caught.value.problems}
    assert len(found) == 1
    lm.load(model, state, layout="torch", **eval(f"dict({found.pop()})", {"lm": lm}))
    x = torch.randn(2, 5, WIDTH)
    with jax.default_matmul_precision("highest"):
        got = np.asarray(attn(jnp.asarray(x.numpy())))
    np.testing.assert_allclose(got, oracle(x, x, x)[0].detach().numpy(), atol=1e-5)
