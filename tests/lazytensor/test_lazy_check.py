"""Check mode of lazy blocks: planted faults are found and named, and right programs go through."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import io_callback

import lazymods as lm
from lazymods._recording.graph import Graph
from lazymods._recording.kinds import OperationKind
from lazymods.lazytensor import executor, operators, trace

lazytensor = lm.lazytensor


@pytest.fixture(autouse=True)
def _compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test have the programs of another, which may be spoiled."""
    monkeypatch.setattr(executor, "_graphs", OrderedDict())


def program() -> Any:
    x = jnp.arange(4.0)
    y = jnp.cos(x) * 2.5
    return y + 1.5 * x


def run(check: bool = True) -> Any:
    with lazytensor.lazy(check=check):
        found = program()
    return np.asarray(found)


def spoiled(change: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a compiler whose programs give something else."""
    real = executor.compiled

    def compiled(structure: Any, results: Any) -> Any:
        function = real(structure, results)
        return lambda arrays, packs: [change(v) for v in function(arrays, packs)]

    return compiled


def weak(value: jax.Array) -> jax.Array:
    return jax.lax.convert_element_type_p.bind(value, new_dtype=value.dtype, weak_type=True, sharding=None)


FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "value": (lambda v: v + 1, "f32[4] 3.5 at [0], 4 of 4 wrong, of the block"),
    "nan": (lambda v: v / 0 * 0, "of the block"),
    "dtype": (lambda v: v.astype(jnp.float16), "f16[4], of the block"),
    "shape": (lambda v: v[:2], "f32[2], of the block"),
    "weak type": (weak, "f32[4], weakly typed, of the block"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_program_that_gives_something_else_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, said = FAULTS[fault]
    monkeypatch.setattr(executor, "compiled", spoiled(change))
    with pytest.raises(lm.LazyError) as caught:
        run()
    assert said in str(caught.value)
    assert "as without it" in str(caught.value)


def test_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "compiled", spoiled(lambda v: v + 1))
    with pytest.raises(lm.LazyError) as caught:
        run()
    assert str(caught.value) == (
        "add(f32[4], f32[4]) -> f32[4]\n"
        "  got:    f32[4] 3.5 at [0], 4 of 4 wrong, of the block\n"
        "  needed: 2.5 at [0], as without it\n"
        "  write:  with lm.lazytensor.lazy(check=True): fn(x)  # around less, to find what differs: it is a fault of "
        "lazymods"
    )


def test_an_operation_that_is_taken_for_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = trace.kind_of

    def kind_of(primitive: Any, operands: Any, params: Any, settings: Any) -> OperationKind:
        sine = primitive is jax.lax.cos_p
        return real(jax.lax.sin_p if sine else primitive, operands, params, settings)

    monkeypatch.setattr(trace, "kind_of", kind_of)
    with pytest.raises(lm.LazyError, match=r"sin\(f32\[4\]\)"):
        with lazytensor.lazy(check=True):
            y = jax.lax.cos_p.bind(jnp.arange(4.0) + 1, accuracy=None)
            y.block_until_ready()


def test_an_operator_that_is_known_as_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with lazytensor.lazy():
        x = jnp.arange(4.0) * 1.0
        made = [x + x, x * x]
    for key in [k for k in operators._known if k[0] == "__add__" and k[1] == k[2] == x.aval]:
        monkeypatch.setitem(operators._known, key, operators._known["__mul__", *key[1:]])
    with lazytensor.lazy(check=True):
        x = jnp.arange(4.0) * 1.0
        with pytest.raises(lm.LazyError) as caught:
            made.append(x + x)
    said = (
        "__add__\n  got:    multiply(f32[4], f32[4]) -> f32[4], of the block\n  needed: add(f32[4], f32[4]) -> f32[4]"
    )
    assert str(caught.value).startswith(said)


def test_numbers_that_are_mixed_up_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Graph.packs
    monkeypatch.setattr(Graph, "packs", lambda self: [pack[::-1] for pack in real(self)])
    with pytest.raises(lm.LazyError, match="wrong, of the block"):
        run()


def test_a_right_program_gives_what_plain_python_gives() -> None:
    np.testing.assert_allclose(run(), program(), rtol=1e-6)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.fc = lm.nn.LazyLinear(3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(jnp.tanh(self.norm(self.fc(x))))


def train() -> tuple[list[float], Net]:
    # the gradient of a bias before a BatchNorm is 0 to rounding, of which a small eps would make a large step
    net, x = Net(nnx.Rngs(0)), jnp.arange(12.0).reshape(4, 3) / 12
    net(x)
    optimizer = nnx.Optimizer(net, optax.adam(0.05, eps=0.1), wrt=nnx.Param)
    losses = []
    for _ in range(4):
        loss, grads = nnx.value_and_grad(lambda m, x: (m(x) ** 2).mean())(net, x)
        optimizer.update(net, grads)
        losses.append(float(loss) if loss > 0 else 0.0)
        x = x[:, ::-1] * jnp.where(x[1:2] > 0.5, x, 1 - x)
    return losses, net


@pytest.mark.slow
def test_training_goes_through() -> None:
    with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
        want, plain = train()
        got, net = lazytensor.lazy(check=True)(train)()
    np.testing.assert_allclose(got, want, rtol=1e-4)
    for mine, other in zip(jax.tree.leaves(nnx.state(net)), jax.tree.leaves(nnx.state(plain)), strict=True):
        if jnp.issubdtype(mine.dtype, jnp.floating):
            np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-5)


def test_effects_run_once() -> None:
    seen: list[float] = []
    with lazytensor.lazy(check=True):
        x = jnp.ones(()) * 3
        jax.debug.callback(lambda v: seen.append(float(v)), x)
        y = io_callback(lambda v: (seen.append(-1.0), v)[1], jax.ShapeDtypeStruct((), jnp.float32), x)
        z = y + 1
    jax.effects_barrier()
    assert float(z) == 4
    assert sorted(seen) == [-1, 3]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    "use", [lambda y: y * 2.0, lambda y: 1.0 + y, lambda y: -y, lambda y: y**2, lambda y: y * y, lambda y: y > 1]
)
def test_operators_on_what_has_effects(use: Callable[[Any], Any], ordered: bool) -> None:
    runs: list[int] = []

    def asked(x: jax.Array) -> Any:
        kind = jax.ShapeDtypeStruct((), jnp.float32)
        return io_callback(lambda v: (runs.append(1), np.float32(v.sum()))[1], kind, x, ordered=ordered)

    want = use(jnp.float32(3.0))
    with lazytensor.lazy():
        use(jnp.ones(()) * 2)  # from here on it is known what the operator becomes
    with lazytensor.lazy(check=True):
        got = [use(asked(jnp.ones(3))) for _ in range(2)]
    np.testing.assert_allclose(got, [want, want])
    assert len(runs) == 2


def test_it_can_be_turned_on_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "compiled", spoiled(lambda v: v + 1))
    run(check=False)
    monkeypatch.setenv("LAZYMODS_CHECK", "1")
    with pytest.raises(lm.LazyError):
        run(check=False)


def test_values_go_from_one_kind_of_block_to_the_other() -> None:
    with lazytensor.lazy():
        x = jnp.arange(3.0) * 2
    with lazytensor.lazy(check=True):
        with lazytensor.lazy():
            y = x + 1
    with lazytensor.lazy():
        z = y * x
    np.testing.assert_array_equal(z, [0.0, 6.0, 20.0])


def test_after_a_difference_recording_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(executor, "compiled", spoiled(lambda v: v + 1))
        with pytest.raises(lm.LazyError):
            run()
    executor._graphs.clear()
    np.testing.assert_allclose(run(), program(), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: optax.adam(1e-2), lambda: optax.sign_sgd(1e-2)], ids=["adam", "signs"])
def test_a_step_that_divides_by_the_size_of_rounding_is_right(make: Callable[[], Any]) -> None:
    class Net(nnx.Module):
        """The gradients of its first bias are 0 but for rounding: the normalization takes the bias away."""

        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.first, self.norm = nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.tanh(self.norm(self.first(x)))

    model = Net()
    optimizer = nnx.Optimizer(model, make(), wrt=nnx.Param)
    kernel = np.asarray(model.first.kernel[...])
    with lazytensor.lazy(check=True), jax.numpy_dtype_promotion("standard"):
        for seed in range(3):
            x = jax.random.normal(jax.random.key(seed), (16, 3))
            grads = nnx.grad(lambda m, x=x: ((m(x) - x[:, :1]) ** 2).mean())(model)
            optimizer.update(model, grads)
            lazytensor.mark_step()
    assert int(optimizer.step[...]) == 3
    assert not np.allclose(kernel, np.asarray(model.first.kernel[...]), atol=1e-3)
