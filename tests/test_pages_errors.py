"""The table of messages in docs/errors.md: each is met by doing what its row says."""

# pyright: reportCallIssue=false, reportArgumentType=false

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import lazymods as lm

PAGE = (Path(__file__).parent.parent / "docs" / "errors.md").read_text()
X = jnp.ones((2, 3))


def lazy() -> Any:
    return lm.LazyLinear(4, rngs=nnx.Rngs(0))


class Twice(nnx.Module):
    def __init__(self) -> None:
        self.fc = lazy()

    def __call__(self, x: Any) -> Any:
        return self.fc(self.fc(x))


class Decides(Twice):
    def __call__(self, x: Any) -> Any:
        return self.fc(x) if x.sum() > 0 else x


STORE: dict[str, Any] = {}


def storing(x: Any) -> Any:
    STORE["last"] = x * 2
    return x


def all_paths() -> None:
    number = lm.jit(lambda x: int(x), max_paths=1)
    for value in (0, 1):
        number(jnp.int32(value))


def damaged(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"this is not a checkpoint")
    lm.load(lazy(), folder / "model.safetensors")


def frozen() -> None:
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    lm.autograd.requires_grad_(model, False)
    lm.autograd.grad(lambda model: model(X).sum())(model)


def call(model: Any, x: Any) -> Any:
    return model(x)


# In the order of the table. The second and third row have no words of their own.
CASES: list[tuple[str, Callable[[Path], Any]]] = [
    ("a use of its value, while it is an uninitialized parameter", lambda _: lazy().kernel + 1),
    ("nnx.Optimizer", lambda _: nnx.Optimizer(lazy(), optax.adam(0.1), wrt=nnx.Param)),
    ("nnx.tabulate", lambda _: nnx.tabulate(lazy(), X)),
    ("a use of .in_features", lambda _: lazy().in_features),
    ("no in_features: it is inferred from the first input", lambda _: lm.LazyLinear(784, 10, rngs=nnx.Rngs(0))),
    ("use_bias= in place of bias=", lambda _: lm.LazyLinear(10, bias=False, rngs=nnx.Rngs(0))),
    ("rngs is required", lambda _: lm.LazyLinear(10)),
    ("the same sizes at every call", lambda _: lm.materialize(Twice(), X)),
    ("the batch axis optional", lambda _: lm.LazyConv2d(4, (3, 3), rngs=nnx.Rngs(0))(X)),
    ("a copy of it that was made inside jax.jit", lambda _: jax.jit(call)(lazy(), X)),
    ("its first call inside nnx.grad", lambda _: nnx.grad(lambda m: m(X).sum())(lazy())),
    ("its first call inside nnx.cond", lambda _: nnx.cond(True, call, call, lazy(), X)),
    ("its first call inside an NNX loop", lambda _: nnx.fori_loop(0, 2, lambda i, c: (c[0], c[0](c[1])), (lazy(), X))),
    ("a forward that decides on the values of arrays", lambda _: lm.materialize(Decides(), X)),
    ("the arguments of a call", lambda _: lm.materialize(lazy())),
    ("the model first, then what it is called with", lambda _: lm.materialize(X, lazy())),
    (
        "while kernel, bias are uninitialized",
        lambda _: lm.LazyOptimizer(lazy(), optax.adam(0.1), wrt=nnx.Param).update(lazy(), {}),
    ),
    ("no entry in the state dict", lambda _: lm.load_state_dict(lazy(), {"kernel": jnp.ones((3, 4))})),
    (
        "an entry that the model has no parameter for",
        lambda _: lm.load_state_dict(lazy(), {"weight": X}),
    ),
    ("without broadcasting", lambda _: lm.load_state_dict(lazy(), {"kernel": jnp.ones((3, 5)), "bias": jnp.ones(5)})),
    ("the file is truncated, or no safetensors file", damaged),
    ("a compiled function that stores an array there", lambda _: lm.jit(storing)(X)),
    ("with the parameter's name, if it is part of the program", lambda _: lm.jit(lambda x, how: x)(X, "fast")),
    ("paths: each is compiled by itself", lambda _: all_paths()),
    ("frozen parameters and no others", lambda _: frozen()),
]


def test_the_table_has_these_rows() -> None:
    cells = re.findall(r"^\| (`.+?`|the same, from `.+?`) \|", PAGE.partition("## By message")[2], re.MULTILINE)
    assert [re.sub(r".*?`(.+)`", r"\1", cell) for cell in cells] == [words for words, _ in CASES]


@pytest.mark.parametrize("words, mistake", CASES, ids=[words for words, _ in CASES])
def test_the_message_is_met(words: str, mistake: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(lm.LazyError) as caught:
        mistake(tmp_path)
    assert (CASES[0][0] if words.startswith("nnx.") else words) in str(caught.value)
