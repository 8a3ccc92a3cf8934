"""Calling an operator, in every engine: the values are those of the kernel of the platform, by plain jax.numpy."""

import dataclasses
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm
from lazymods import _compat
from lazymods._compat import plain_peeling
from lazymods.dispatch import Operator, places

with jax.default_device(jax.devices("cpu")[0]):
    X = jnp.arange(6.0).reshape(3, 2) + 1.0


def operator(name: str = "op", **kernels: Any) -> Operator:
    op = Operator(name)
    for key, kernel in kernels.items():
        op.register(key, kernel)
    return op


def same(got: Any, want: Any) -> None:
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5), got, want)


def by_rows(f: Any) -> Any:
    return lambda x: jax.lax.scan(lambda carry, row: (carry, f(row)), 0.0, x)[1]


def in_block(f: Any) -> Any:
    return lm.lazytensor.lazy()(f)


ENGINES = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "jit_vmap": lambda f: jax.jit(jax.vmap(f)),
    "vmap_jit": lambda f: jax.vmap(jax.jit(f)),
    "scan": by_rows,
    "remat": jax.checkpoint,
    "jit_remat": lambda f: jax.jit(jax.checkpoint(f)),
    "nnx_jit": nnx.jit,
    "lm_jit": lm.jit,
    "lazy": in_block,
    "map": lambda f: lambda x: jax.lax.map(f, x),
    "cond": lambda f: lambda x: jax.lax.cond(x.sum() > 0, f, lambda y: y, x),
}
OPERATORS: dict[str, dict[str, Any]] = {
    "one platform": {"CPU": lambda x: x**3},
    "two platforms": {"CPU": lambda x: x**3, "CUDA": lambda x: x * 0},
    "beside a composite": {"CPU": lambda x: x**3, "CompositeExplicitAutograd": lambda x: x * 0},
    "composite": {"CompositeImplicitAutograd": lambda x: x**3},
    "with shapes": {"CPU": lambda x: x**3, "CUDA": lambda x: x * 0, "Meta": lambda x: x},
}
CUBE = (lambda x: (x**3, (x, 100)), lambda saved, g: (g * saved[1] * saved[0],))  # a wrong derivative, told from JAX's
PAIRS: dict[str, dict[str, Any]] = {
    "for all": {"CPU": lambda x: x**3, "CUDA": lambda x: x * 0, "Autograd": CUBE},
    "for one": {"CPU": lambda x: x**3, "CUDA": lambda x: x * 0, "AutogradCPU": CUBE},
    "for each": {"CPU": lambda x: x**3, "CUDA": lambda x: x, "AutogradCPU": CUBE, "AutogradCUDA": (jnp.cos, jnp.sin)},
    "with shapes": {"CPU": lambda x: x**3, "AutogradCPU": CUBE, "Meta": lambda x: x},
    "explicit": {"CompositeExplicitAutograd": lambda x: x**3, "Autograd": CUBE},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", OPERATORS)
def test_values_and_derivatives_by_jax(kind: str, engine: str) -> None:
    f = ENGINES[engine](operator(**OPERATORS[kind]))
    same(f(X), X**3)
    if engine != "lazy":  # a block ends before its gradient
        same(jax.grad(lambda x: f(x).sum())(X), 3 * X**2)
        same(jax.jit(jax.grad(lambda x: f(x).sum()))(X), 3 * X**2)
        same(jax.jit(lambda x: jax.vjp(f, x)[1](x)[0])(X), 3 * X**3)


@pytest.mark.parametrize("engine", [e for e in ENGINES if e != "lazy"])
@pytest.mark.parametrize("kind", PAIRS)
def test_the_pair_is_the_derivative(kind: str, engine: str) -> None:
    op = operator(**PAIRS[kind])
    f = ENGINES[engine](op)
    same(f(X), X**3)
    same(jax.grad(lambda x: f(x).sum())(X), 100 * X)
    same(jax.jit(jax.grad(lambda x: f(x).sum()))(X), 100 * X)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize("kind", PAIRS)
def test_the_pair_has_both_modes_and_second_derivatives(kind: str, wrap: Any) -> None:
    op, x = operator(**PAIRS[kind]), X[0]
    same(wrap(lambda x: jax.jvp(op, (x,), (x + 1,)))(x), (x**3, 100 * x * (x + 1)))
    same(wrap(lambda x: jax.linearize(op, x)[1](x + 1))(x), 100 * x * (x + 1))
    same(wrap(jax.vmap(lambda x: jax.jvp(op, (x,), (x + 1,))[1]))(X), 100 * X * (X + 1))
    for outer in (jax.jacfwd, jax.jacrev):
        same(wrap(outer(op))(x), 100 * jnp.diag(x))
        for inner in (jax.jacfwd, jax.jacrev):
            same(wrap(outer(inner(lambda x: op(x).sum())))(x), 100 * jnp.eye(2))


def test_gradients_in_a_lazy_block() -> None:
    op = operator(**PAIRS["for one"])
    for _ in range(2):
        with lm.lazytensor.lazy():
            found = jax.grad(lambda x: op(x).sum())(X)
        same(found, 100 * X)


def test_a_block_of_lazy_tensors_compiles_once() -> None:
    for kernels in (OPERATORS["two platforms"], OPERATORS["with shapes"]):
        op = operator(**kernels)

        def step(op: Operator = op) -> Any:
            with lm.lazytensor.lazy():
                return op(op(X) + 1.0)

        same(step(), (X**3 + 1) ** 3)
        before = lm.lazytensor.metrics.counters().get("UncachedCompile")
        same(step(), (X**3 + 1) ** 3)
        assert lm.lazytensor.metrics.counters().get("UncachedCompile") == before


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"check": True}, {"donate_state": True}], ids=["plain", "checked", "donated"])
def test_without_gradients_in_lm_jit(options: Any) -> None:
    op = operator(**PAIRS["for all"])

    @lm.jit(**options)
    def f(x: Any) -> Any:
        with lm.autograd.no_grad():
            y = op(x)
        return (y * x).sum()

    same(f(X), (X**4).sum())
    same(lm.jit(jax.grad(f))(X), X**3)


@pytest.mark.parametrize("mode", [lm.autograd.no_grad, lm.autograd.inference_mode])
def test_without_gradients_a_kernel_is_executed_at_once_where_it_is_with_them(mode: Any) -> None:
    op = operator(CPU=lambda x: x * 2 if float(x.sum()) > 0 else x * 3)  # a program could not decide

    def f(x: Any) -> Any:
        with mode():
            y = op(x)
        return (x * y).sum()

    same([jax.grad(f)(X), jax.grad(f)(-X)], [X * 2, X * -3])
    op = operator(CPU=lambda x: x * 2, Lazy=lambda x: x * 7)
    with lm.lazytensor.lazy():
        found = jax.grad(f)(X)
    same(found, X * 7)


def test_a_kernel_for_lazy_tensors_runs_in_blocks_only() -> None:
    pair = (lambda x: (x * 7, ()), lambda _, g: (g * 5,))
    op = operator(CPU=lambda x: x * 2, Lazy=lambda x: x * 7, AutogradLazy=pair)
    with lm.lazytensor.lazy():
        value, gradient = op(X), jax.grad(lambda x: op(x).sum())(X)
    same(value, X * 7)
    same(gradient, jnp.full_like(X, 5))
    same([op(X), jax.jit(op)(X), jax.grad(lambda x: op(x).sum())(X)], [X * 2, X * 2, jnp.full_like(X, 2)])


def test_a_derivative_for_lazy_tensors_runs_in_blocks_only() -> None:
    pair = (lambda x: (x * 2, ()), lambda _, g: (g * 5,))
    op = operator(CompositeImplicitAutograd=lambda x: x * 2, AutogradLazy=pair)
    with lm.lazytensor.lazy():
        value, gradient = op(X), jax.grad(lambda x: op(x).sum())(X)
    same(value, X * 2)
    same(gradient, jnp.full_like(X, 5))
    same([op(X), jax.grad(lambda x: op(x).sum())(X)], [X * 2, jnp.full_like(X, 2)])


@pytest.mark.slow
@pytest.mark.parametrize("run", [lambda f: f, jax.jit, lm.jit], ids=["plain", "jit", "lm.jit"])
@pytest.mark.parametrize("inner", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_an_output_that_does_not_depend_on_the_mapped_operand(run: Any, inner: Any) -> None:
    def plain(x: Any, w: Any) -> Any:
        return {"product": x * w, "square": (x**2).sum(), "constant": jnp.ones(2)}

    def backward(saved: Any, g: Any) -> Any:
        x, w = saved
        return g["product"] * w + 2 * x * g["square"], g["product"] * x

    op = operator(CompositeExplicitAutograd=plain, Autograd=(lambda x, w: (plain(x, w), (x, w)), backward))
    given = jnp.array([1.0, 2.0]), jnp.arange(6.0).reshape(3, 2)

    def mapped(f: Any) -> Any:
        return jax.vmap(inner(f), (None, 0))

    def loss(f: Any) -> Any:
        return lambda x, w: sum((leaf**2).sum() for leaf in jax.tree.leaves(mapped(f)(x, w)))

    same(run(lambda x, w: mapped(op)(x, w))(*given), mapped(plain)(*given))
    same(run(jax.grad(loss(op), (0, 1)))(*given), jax.grad(loss(plain), (0, 1))(*given))
    same(run(lambda *x: jax.jvp(mapped(op), x, x))(*given), jax.jvp(mapped(plain), given, given))
    same(run(jax.hessian(loss(op)))(*given), jax.hessian(loss(plain))(*given))


def decides(op: Operator) -> Any:
    def function(x: Any) -> Any:
        return op(x) if op(x).sum() > 0 else x

    return function


@pytest.mark.parametrize("options", [{}, {"check": True}], ids=["plain", "checked"])
def test_decisions_in_lm_jit(options: Any) -> None:
    f = lm.jit(decides(operator(**OPERATORS["two platforms"])), **options)
    for x in (X, -X, X):
        same(f(x), x**3 if x.sum() > 0 else x)


# ---------------------------------------------------------------- registered later

LATER = {
    "jit": lambda op: jax.jit(lambda x: op(x)),
    "jit_op": jax.jit,
    "nnx_jit": lambda op: nnx.jit(lambda x: op(x)),
    "lm_jit": lambda op: lm.jit(lambda x: op(x)),
    "lm_jit_op": lm.jit,
    "checked": lambda op: lm.jit(lambda x: op(x), check=True),
    "decides": lambda op: lm.jit(decides(op)),
    "scan": by_rows,
    "jit_scan": lambda op: jax.jit(by_rows(op)),
    "vmap": lambda op: jax.jit(jax.vmap(op)),
    "grad": lambda op: jax.jit(lambda x: x * jax.grad(lambda x: op(x).sum())(x)),
    "remat": jax.checkpoint,
    "block": in_block,
}


@pytest.mark.parametrize("engine", LATER)
@pytest.mark.parametrize("shapes", [{}, {"Meta": lambda x: x}], ids=["", "with_shapes"])
def test_a_kernel_that_is_registered_later_is_seen(engine: str, shapes: Any) -> None:
    op = operator(CompositeExplicitAutograd=lambda x: x * 5, **shapes)
    f = LATER[engine](op)
    for _ in range(3):
        same(f(X), X * 5)
    op.register("CPU", lambda x: x * 2)
    for _ in range(2):
        same(f(X), X * 2)


def test_a_pair_that_is_registered_later_is_seen() -> None:
    op = operator(CPU=lambda x: x * 5)
    gradient = jax.jit(jax.grad(lambda x: op(x).sum()))
    same(gradient(X), jnp.full_like(X, 5))
    op.register("Autograd", (lambda x: (x * 5, ()), lambda _, g: (g * 7,)))
    same(gradient(X), jnp.full_like(X, 7))


def test_registering_before_the_first_call_compiles_nothing_anew() -> None:
    traces = []
    other = jax.jit(lambda x: (traces.append(1), x + 1)[1])
    other(X)
    operator(CPU=lambda x: x, CUDA=lambda x: x)
    other(X)
    assert len(traces) == 1


# ---------------------------------------------------------------- arguments


def test_what_is_no_array_reaches_the_kernel_as_it_is() -> None:
    seen = []

    def kernel(x: Any, n: Any, *, flag: bool = False, text: str = "", none: Any = None) -> Any:
        seen.append((n, flag, text, none))
        return x * n if flag else x

    op = operator(CPU=kernel, CUDA=kernel)
    for wrap in (lambda f: f, jax.jit, lm.jit, in_block):
        same(wrap(lambda x: op(x, 3, flag=True, text="t"))(X), X * 3)
    assert set(seen) == {(3, True, "t", None)}


def test_numbers_that_are_equal_are_told_apart() -> None:
    op = operator(CPU=lambda x, n: x * 0 + jnp.copysign(1.0, n), Meta=lambda x, n: x)
    for n, sign in ((0.0, 1.0), (-0.0, -1.0)):
        with lm.lazytensor.lazy():
            out = op(X, n)
        same(out, jnp.full_like(X, sign))


def test_arrays_of_numpy_are_arrays_of_jax() -> None:
    op = operator(CPU=lambda x: x, CUDA=lambda x: x)
    for wrap in (lambda f: f, jax.jit):
        out = wrap(op)(np.ones(2))
        assert isinstance(out, jax.Array) and out.dtype == jnp.float32
    assert operator(CPU=lambda x: 2.0)(X).dtype == jnp.float32


def test_trees_keys_and_integers() -> None:
    def kernel(key: Any, tree: Any, count: Any) -> Any:
        return {"s": jax.random.normal(key, (2,)) * tree["a"], "n": count + 1}

    def forward(key: Any, tree: Any, count: Any) -> Any:
        return kernel(key, tree, count), (key, count)

    def backward(saved: Any, g: Any) -> Any:
        return None, {"a": g["s"] * 7.0, "b": None}, None

    tree, seed, count = {"a": jnp.ones(2) * 3.0, "b": jnp.ones(3)}, jax.random.key(1), jnp.arange(2)
    want = jax.random.normal(seed, (2,)) * 3
    for key in ("Autograd", "AutogradCPU"):
        op = operator(CPU=kernel, CUDA=kernel)
        op.register(key, (forward, backward))
        for wrap in (lambda f: f, jax.jit):
            same(wrap(op)(seed, tree, count), {"s": want, "n": jnp.arange(2) + 1})
            found = wrap(jax.grad(lambda t, op=op: op(seed, t, count)["s"].sum()))(tree)
            same(found, {"a": jnp.full(2, 7.0), "b": jnp.zeros(3)})


def test_defaults_of_a_pair_have_a_gradient_of_their_own() -> None:
    def forward(x: Any, y: Any = None, scale: float = 1.0) -> Any:
        return x * scale, ()

    op = operator(CPU=lambda x, y=None, scale=1.0: x * scale, Autograd=(forward, lambda _, g: (g * 9, None, None)))
    for wrap in (lambda f: f, jax.jit):
        same(wrap(jax.grad(lambda x: op(x, scale=2.0).sum()))(X), jnp.full_like(X, 9))
        same(wrap(jax.grad(lambda x: op(x=x).sum()))(X), jnp.full_like(X, 9))


def test_a_number_may_be_differentiated() -> None:
    op = operator(CPU=lambda x: x**3, Autograd=(lambda x: (x**3, x), lambda x, g: (g * 100 * x,)))
    assert jax.grad(op)(2.0) == 200 and jax.jit(jax.grad(op))(2.0) == 200


# ---------------------------------------------------------------- shapes, platforms, meshes


@pytest.mark.parametrize("engine", ["plain", "jit", "vmap", "jit_vmap", "scan", "remat", "cond"])
def test_the_meta_kernel_says_shapes_and_no_other_is_traced(engine: str) -> None:
    traced = []
    op = operator(
        CPU=lambda x: (traced.append(1), jnp.tile(x, 2))[1], Meta=lambda x: jax.ShapeDtypeStruct((4,), x.dtype)
    )
    single = op if "vmap" in engine or engine == "scan" else jax.vmap(op)
    out = jax.eval_shape(ENGINES[engine](lambda x: single(x)[..., :2]), jax.ShapeDtypeStruct((3, 2), jnp.bfloat16))
    assert (out.shape, out.dtype) == ((3, 2), jnp.bfloat16)
    assert traced == []


class Model(nnx.Module):
    def __init__(self, op: Operator, *, rngs: nnx.Rngs) -> None:
        self.op = op
        self.fc = lm.LazyLinear(4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.fc(self.op(x))


def test_lazy_models() -> None:
    widen = operator(
        CPU=lambda x: jnp.pad(x, ((0, 0), (0, 3))), Meta=lambda x: jax.ShapeDtypeStruct((x.shape[0], 5), x.dtype)
    )
    spec = jax.ShapeDtypeStruct((3, 2), jnp.float32)
    assert lm.infer_shapes(Model(widen, rngs=nnx.Rngs(0)), spec).output.shape == (3, 4)
    model, called = Model(widen, rngs=nnx.Rngs(0)), Model(widen, rngs=nnx.Rngs(0))
    lm.materialize(model, spec)
    explicit = nnx.Linear(5, 4, rngs=nnx.Rngs(0))
    want = explicit(jnp.pad(X, ((0, 0), (0, 3))))
    for found in (model(X), called(X), lm.jit(called)(X), nnx.jit(lambda m, x: m(x))(nnx.clone(called), X)):
        same(found, want)
    assert model.fc.in_features == 5


@pytest.mark.parametrize("shapes", [{}, {"Meta": lambda x: x}], ids=["", "with_shapes"])
def test_one_artifact_for_several_platforms(shapes: Any) -> None:
    op = operator(CPU=lambda x: x * 2, CUDA=lambda x: x * 3, TPU=lambda x: x * 4, **shapes)
    for spec in (X, jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 2"), jnp.float32)):
        out = jax.export.export(jax.jit(lambda x: op(x)), platforms=["cpu", "cuda", "tpu"])(spec)
        same(jax.export.deserialize(out.serialize()).call(X), X * 2)
        text = out.mlir_module()
        assert all(f"dense<{n}.000000e+00>" in text for n in (2, 3, 4))
    same(jax.export.deserialize(bytearray(lm.export(op, X, platforms=("cpu", "cuda")))).call(X), X * 2)
    text = jax.jit(op).trace(X).lower(lowering_platforms=("cuda",)).as_text()
    assert "dense<3.000000e+00>" in text and "dense<2.000000e+00>" not in text


@pytest.mark.parametrize("kind", PAIRS)
def test_meshes(kind: str) -> None:
    op = operator(**PAIRS[kind])
    spec = jax.sharding.PartitionSpec("a")
    for axis in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((1,), ("a",), axis_types=(axis,), devices=jax.devices("cpu")[:1])
        with jax.set_mesh(mesh):
            placed = jax.device_put(X, jax.NamedSharding(mesh, spec))
            same([op(placed), jax.jit(op)(placed)], [X**3, X**3])
            same(jax.jit(jax.grad(lambda x: op(x).sum()))(placed), 100 * X)
            mapped = jax.shard_map(op, in_specs=spec, out_specs=spec)
            same([mapped(placed), jax.jit(mapped)(placed)], [X**3, X**3])
            same(jax.jit(jax.grad(lambda x, f=mapped: f(x).sum()))(placed), 100 * X)


def test_without_compilation() -> None:
    with jax.disable_jit():
        for kernels in OPERATORS.values():
            same(jax.jit(operator(**kernels))(X), X**3)


def test_threads_register_and_call() -> None:
    op, found = operator(CompositeExplicitAutograd=lambda x: x * 5), []

    def call() -> None:
        f = jax.jit(lambda x: op(x))
        for _ in range(20):
            found.append(float(f(jnp.float32(1.0))))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    op.register("CPU", lambda x: x * 2)
    for thread in threads:
        thread.join()
    assert set(found) <= {5.0, 2.0} and len(found) == 60
    assert float(jax.jit(lambda x: op(x))(jnp.float32(1.0))) == 2


def test_platforms_of_devices() -> None:
    """What is asked of a device: JAX calls those of CUDA and of ROCm gpu."""
    told = {"cpu": "CPU", "tpu": "TPU", "metal": "FPGA", "gpu cuda 12080": "CUDA", "gpu rocm 60200": "FPGA"}
    for text, key in told.items():
        platform, _, version = text.partition(" ")
        device = types.SimpleNamespace(platform=platform, client=types.SimpleNamespace(platform_version=version))
        assert places._key_of.__wrapped__(device) == key


def test_without_the_private_names_of_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator in jax.grad or jax.vmap is compiled at each call then."""
    for name in ("runs_at_once", "base_trace", "base_value"):
        monkeypatch.setattr(_compat, name, getattr(plain_peeling, name))
    for kernels in (PAIRS["for one"], PAIRS["with shapes"]):
        op = operator(**kernels)
        same([op(X), jax.vmap(op)(X), jax.jit(op)(X)], [X**3] * 3)
        same(jax.grad(lambda x, op=op: op(x).sum())(X), 100 * X)
        same(jax.vmap(jax.grad(lambda x, op=op: op(x).sum()))(X), 100 * X)
    with pytest.raises(lm.dispatch.NoKernelError):
        jax.vmap(operator(FPGA=lambda x: x))(X)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scaled:
    x: Any
    scale: Any = dataclasses.field(metadata={"static": True})


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit, lm.jit])
def test_equal_values_of_other_types_are_told_apart(jit: Any) -> None:
    make: Any = Scaled

    def kernel(given: Any, scales: Any) -> Any:
        factor = {bool: 2.0, int: 3.0, float: 5.0}
        return given.x * factor[type(given.scale)] * factor[type(next(iter(scales)))]

    op = operator(CPU=kernel, Meta=lambda given, _: jax.ShapeDtypeStruct(given.x.shape, given.x.dtype))
    values = (1, 1.0, True)

    def f(x: Any) -> Any:
        return [op(make(x, a), frozenset({b})) for a in values for b in values]

    same(jit(f)(X), [X * a * b for a in (3, 5, 2) for b in (3, 5, 2)])
