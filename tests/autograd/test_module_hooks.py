"""Backward hooks of modules: PyTorch's are the oracle where it has them, the same model without hooks elsewhere."""

import gc
import warnings
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lazymods as lm

ag = lm.autograd
RNG = np.random.default_rng(0)
W = RNG.standard_normal((3, 3)).astype(np.float32)
A, B = (RNG.standard_normal((2, 3)).astype(np.float32) for _ in range(2))
I = np.array([[1, 2, 0], [0, 1, 2]], np.int32)  # noqa: E741


class Ours(nnx.Module):
    """A function of a weight and the arguments, as a module."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.w, self.fn = nnx.Param(jnp.asarray(W)), fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(self.w[...], *args, **kwargs)


def parts(value: Any) -> list[Any]:
    return jax.tree.leaves(value, is_leaf=lambda x: x is None)


def same(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    got, want = parts(got), parts(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def record(seen: list[Any], *values: Any) -> None:
    """Append values, as they are when the program runs, with their Nones."""
    jax.debug.callback(lambda *v: seen.append(jax.tree.map(np.asarray, v)), *values)


# ---------------------------------------------------------------- as in PyTorch


class Case(NamedTuple):
    """A module, what it is called with, which arguments are differentiated, and the loss of its outputs."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    wrt: tuple[int, ...]
    loss: Callable[[Any], Any] = lambda y: (y * y).sum()
    kwargs: Mapping[str, Any] = MappingProxyType({})


def first(y: Any) -> Any:
    return (y[0] * y[0]).sum()


CASES = {
    "one input": Case(lambda w, x: x @ w, (A,), (0,)),
    "two inputs": Case(lambda w, x, y: x @ w * y, (A, B), (0, 1)),
    "one of two differentiated": Case(lambda w, x, y: x @ w * y, (A, B), (1,)),
    "no input differentiated": Case(lambda w, x, y: x @ w * y, (A, B), ()),
    "an unused input": Case(lambda w, x, y: x @ w, (A, B), (0, 1)),
    "all inputs unused": Case(lambda w, x: w * 2, (A,), (0,)),
    "two outputs": Case(lambda w, x: (x @ w, x * 2), (A,), (0,), lambda y: (y[0] * y[1]).sum()),
    "an unused output": Case(lambda w, x: (x @ w, x * 2), (A,), (0,), first),
    "an integer output": Case(lambda w, x: (x @ w, 7), (A,), (0,), first),
    "integers only": Case(lambda w, i: w[i], (I,), ()),
    "a number": Case(lambda w, x, k: x @ w * k, (A, 3.0), (0,)),
    "nothing": Case(lambda w, x, y: x @ w, (A, None), (0,)),
    "a keyword": Case(lambda w, x, y: x @ w * y, (A,), (0,), kwargs={"y": B}),
    "keywords only": Case(lambda w, x: x @ w, (), (), kwargs={"x": A}),
    "the input itself": Case(lambda w, x: x, (A,), (0,)),
}


def in_torch(case: Case) -> tuple[list[Any], list[Any]]:
    """Return what hooks see in PyTorch, and the gradients of the weight and the arguments."""
    torch = pytest.importorskip("torch")

    class Theirs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor(W))

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return case.fn(self.w, *args, **kwargs)

    def tensor(x: Any) -> Any:
        return torch.tensor(x) if isinstance(x, np.ndarray) else x

    module, seen = Theirs(), []
    module.register_full_backward_pre_hook(lambda m, go: seen.append(go))
    module.register_full_backward_hook(lambda m, gi, go: seen.append((gi, go)))
    args = [tensor(x) for x in case.args]
    for i in case.wrt:
        args[i].requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no input requires a gradient
        case.loss(module(*args, **{k: tensor(v) for k, v in case.kwargs.items()})).backward()
    def plain(x: Any) -> Any:
        return None if x is None else x.numpy()

    values = [jax.tree.map(plain, s, is_leaf=lambda x: x is None or hasattr(x, "numpy")) for s in seen]
    return values, [plain(module.w.grad), *(plain(args[i].grad) for i in case.wrt)]


def ours(case: Case, transform: Callable[[Any], Any], module: Any = None) -> tuple[list[Any], Any]:
    """Return what hooks see here, and the gradients of the weight and the arguments."""
    module, seen = module or Ours(case.fn), []
    ag.register_full_backward_pre_hook(module, lambda m, go: record(seen, go))
    ag.register_full_backward_hook(module, lambda m, gi, go: record(seen, gi, go))
    args = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in case.args]
    kwargs = {k: jnp.asarray(v) for k, v in case.kwargs.items()}

    def loss(module: Any, *chosen: Any) -> Any:
        rest = dict(zip(case.wrt, chosen, strict=True))
        return case.loss(module(*[rest.get(i, x) for i, x in enumerate(args)], **kwargs))

    found = transform(loss)(module, *[args[i] for i in case.wrt])
    found = jax.tree.leaves(found)
    jax.effects_barrier()
    return seen, found


def wrt_all(loss: Any) -> Any:
    return lambda *args: nnx.grad(loss, argnums=tuple(range(len(args))))(*args)


def lazily(loss: Any) -> Any:
    def run(*args: Any) -> Any:
        with lm.lazytensor.lazy():
            out = wrt_all(loss)(*args)
        lm.lazytensor.sync(out)
        return out

    return run


def inner_jit(loss: Any) -> Any:
    """Differentiate a compiled function."""

    def pure(state: Any, module: Any, *args: Any) -> Any:
        return jax.jit(lambda state, *args: loss(nnx.merge(nnx.graphdef(module), state), *args))(state, *args)

    return lambda module, *args: jax.grad(lambda s, *a: pure(s, module, *a), tuple(range(len(args) + 1)))(
        nnx.state(module), *args
    )


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "nnx.grad": wrt_all,
    "lm.autograd.grad": lambda loss: lambda *args: ag.grad(loss, argnums=tuple(range(len(args))))(*args),
    "nnx.jit": lambda loss: nnx.jit(wrt_all(loss)),
    "lm.jit": lambda loss: lm.jit(wrt_all(loss)),
    "lm.jit check": lambda loss: lm.jit(wrt_all(loss), check=True),
    "grad of jit": inner_jit,
    "nnx.remat": lambda loss: wrt_all(lambda *args: nnx.remat(loss)(*args)),
    "nnx.jit inside": lambda loss: wrt_all(lambda *args: nnx.jit(loss)(*args)),
    "a lazy block": lazily,
}


@pytest.mark.parametrize("name", CASES)
def test_hooks_see_what_they_see_in_pytorch(name: str) -> None:
    case = CASES[name]
    want, gradients = in_torch(case)
    seen, found = ours(case, wrt_all)
    got = [s[0] if len(s) == 1 else s for s in seen]
    gradients = [np.zeros_like(found[i]) if g is None else g for i, g in enumerate(gradients)]  # not used at all
    same(found, gradients)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        same(a, b)
        assert jax.tree.structure(a) == jax.tree.structure(b)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["two inputs", "no input differentiated", "an unused output", "integers only"])
def test_transforms_change_nothing(name: str, transform: str) -> None:
    case = CASES[name]
    want, gradients = ours(case, wrt_all)
    seen, found = ours(case, TRANSFORMS[transform])
    same(found, gradients)
    assert len(seen) == len(want) * (2 if transform == "lm.jit check" else 1)  # it runs in plain Python as well
    same(seen[: len(want)], want)


def test_integers_beside_others_have_no_gradient() -> None:
    case = Case(lambda w, x, i: x @ w * i.astype(np.float32), (A, I), (0,))
    seen, _ = ours(case, wrt_all)
    [_, ([grad_input, none], [grad_output])] = seen
    assert none is None and isinstance(seen[1][0], tuple)
    same(grad_input, 2 * (A @ W * I * I) @ W.T, 1e-4)
    same(grad_output, 2 * (A @ W * I))


def test_pytrees_are_seen_as_pytrees() -> None:
    case = Case(lambda w, t: {"a": t["x"] @ w, "n": 3, "b": [t["y"] * 2]}, (), ())
    module, seen = Ours(case.fn), []
    ag.register_full_backward_hook(module, lambda m, gi, go: record(seen, gi, go))

    def loss(x: Any, y: Any) -> Any:
        out = module({"x": x, "y": y, "k": 2})
        assert out["n"] == 3
        return out["a"].sum() + 5 * out["b"][0].sum()

    found = jax.grad(loss, (0, 1))(jnp.asarray(A), jnp.asarray(B))
    [(grad_input, grad_output)] = seen
    assert set(grad_input[0]) == {"x", "y", "k"} and grad_input[0]["k"] is None and grad_output[0]["n"] is None
    same([grad_input[0]["x"], grad_input[0]["y"]], found)
    same([grad_output[0]["a"], grad_output[0]["b"]], [np.ones_like(A), [np.full_like(B, 5)]])


class Tied(nnx.Module):
    """A layer that is called twice."""

    def __init__(self) -> None:
        self.layer = Ours(lambda w, x: x @ w)

    def __call__(self, x: Any) -> Any:
        return self.layer(jnp.tanh(self.layer(x)))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_module_that_is_called_twice_has_its_hooks_run_twice(transform: str) -> None:
    torch = pytest.importorskip("torch")
    w, x, want = torch.nn.Linear(3, 3, bias=False), torch.tensor(A, requires_grad=True), []
    w.weight.data = torch.tensor(W.T.copy())
    w.register_full_backward_hook(lambda m, gi, go: want.append((gi[0].numpy(), go[0].numpy())))
    (w(torch.tanh(w(x))) ** 2).sum().backward()
    model, seen = Tied(), []
    ag.register_full_backward_hook(model.layer, lambda m, gi, go: record(seen, gi[0], go[0]))
    _, found = TRANSFORMS[transform](lambda model, x: (model(x) ** 2).sum())(model, jnp.asarray(A))
    jax.effects_barrier()
    same(sorted(seen[:2], key=lambda v: float(v[0].sum())), sorted(want, key=lambda v: float(v[0].sum())), 1e-4)
    same(found, x.grad.numpy(), 1e-4)


def test_modules_inside_modules() -> None:
    order: list[str] = []
    model = Tied()
    for name, module in (("outer", model), ("inner", model.layer)):
        ag.register_full_backward_pre_hook(module, lambda m, go, name=name: order.append(f"{name} pre"))
        ag.register_full_backward_hook(module, lambda m, gi, go, name=name: order.append(name))
    jax.grad(lambda x: model(x).sum())(jnp.asarray(A))
    assert order == ["outer pre", "inner pre", "inner", "inner pre", "inner", "outer"]


# ---------------------------------------------------------------- what hooks change


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_what_hooks_return_takes_the_place_of_the_gradients(transform: str) -> None:
    module = Ours(lambda w, x, y: (x @ w, y * 2))
    ag.register_full_backward_pre_hook(module, lambda m, go: (go[0] * 3, None))  # None: zeros
    ag.register_full_backward_pre_hook(module, lambda m, go: None)
    ag.register_full_backward_pre_hook(module, lambda m, go: [go[0] + 1, go[1] + 7])
    ag.register_full_backward_hook(module, lambda m, gi, go: (gi[0] * 2, gi[1]))
    ag.register_full_backward_hook(module, lambda m, gi, go: (gi[0] + 1, gi[1] - go[1]))
    loss = lambda m, x, y: sum(o.sum() for o in m(x, y))  # noqa: E731
    w, x, y = TRANSFORMS[transform](loss)(module, jnp.asarray(A), jnp.asarray(B))
    grad_output = np.full_like(A, 4)
    same(jax.tree.leaves(w)[0], A.T @ grad_output, 1e-4)
    same([x, y], [2 * grad_output @ W.T + 1, np.full_like(B, 7)], 1e-4)


@pytest.mark.parametrize("under", ["vmap of grad", "grad of vmap", "vmap twice", "vmap over parameters"])
def test_vmap_runs_hooks_for_each_example(under: str) -> None:
    module = Ours(lambda w, x, y: jnp.tanh(x @ w) * y)
    hook = lambda m, gi, go: (gi[0] / (1 + abs(gi[0]).max()), gi[1] + go[0].sum())  # noqa: E731
    ag.register_full_backward_hook(module, hook)
    x, y = jnp.asarray(A), jnp.asarray(B[0])
    loss = lambda x, y: (module(x, y) ** 2).sum()  # noqa: E731
    each = [jax.grad(loss, (0, 1))(row, y) for row in x]
    want = [jnp.stack([e[0] for e in each]), sum(e[1] for e in each)]
    if under == "vmap of grad":
        got = list(jax.vmap(jax.grad(loss, (0, 1)), (0, None))(x, y))
        got[1] = got[1].sum(0)
    elif under == "grad of vmap":
        got = jax.grad(lambda x, y: jax.vmap(loss, (0, None))(x, y).sum(), (0, 1))(x, y)
    elif under == "vmap twice":
        twice = jax.vmap(jax.vmap(loss, (1, None)), (0, None))
        got = jax.grad(lambda x, y: twice(x[:, :, None], y).sum(), (0, 1))(x, y)
    else:
        states = jax.tree.map(lambda w: jnp.stack([w, w]), nnx.state(module))
        graphdef = nnx.graphdef(module)
        run = lambda s, x, y: (nnx.merge(graphdef, s)(x, y) ** 2).sum()  # noqa: E731
        got = jax.grad(lambda x, y: jax.vmap(run, (0, None, None))(states, x[0], y).sum(), (0, 1))(x, y)
        want = [jnp.stack([2 * each[0][0], jnp.zeros(3)]), 2 * each[0][1]]
    same(got, want, 1e-4)


def test_an_output_alone_that_vmap_maps_is_refused() -> None:
    def fn(w: Any, x: Any) -> Any:
        return x @ w * scale

    module = Ours(lambda w, x: fn(w, x))
    ag.register_full_backward_hook(module, lambda m, gi, go: None)

    def run(s: Any, x: Any) -> Any:
        nonlocal scale
        scale = s
        return module(x).sum()

    scale: Any = 1.0
    with pytest.raises(lm.LazyError) as error:
        jax.grad(lambda x: jax.vmap(run, (0, None))(jnp.arange(2.0), x).sum())(jnp.asarray(A))
    assert str(error.value) == (
        "a module with backward hooks, under jax.vmap\n"
        "  got:    outputs that are mapped, of inputs and parameters that are not\n"
        "  needed: an input, or a Variable of the module, that vmap maps: hooks run for each example\n"
        "  write:  what else the module computes with, as an argument of its call"
    )
    scale = 1.0


@pytest.mark.parametrize("loop", ["scan", "while", "cond", "custom_vjp", "linearize"])
def test_control_flow(loop: str) -> None:
    module, plain = Ours(lambda w, x: jnp.sin(x @ w)), Ours(lambda w, x: jnp.sin(x @ w))
    seen: list[Any] = []
    ag.register_full_backward_hook(module, lambda m, gi, go: record(seen, gi[0], go[0]))

    def run(m: Any, x: Any) -> Any:
        if loop == "scan":
            return jax.lax.scan(lambda c, _: (m(c), c.sum()), x, length=3)[1].sum()
        if loop == "while":
            return jax.lax.fori_loop(0, 3, lambda i, c: m(c), x).sum()
        if loop == "cond":
            return jax.lax.cond(x[0, 0] > 10, lambda x: x, m, x).sum()
        if loop == "linearize":
            return m(x).sum()
        inner = jax.custom_vjp(lambda x: m(x).sum())
        inner.defvjp(lambda x: jax.vjp(lambda x: m(x).sum(), x), lambda vjp, g: vjp(g))
        return inner(x)

    def gradient(m: Any, x: Any) -> Any:
        if loop == "linearize":
            out, linear = jax.linearize(lambda x: run(m, x), x)
            return jax.linear_transpose(linear, x)(jnp.ones_like(out))[0]
        return jax.grad(lambda x: run(m, x))(x)

    x = jnp.asarray(A)
    same(gradient(module, x), gradient(plain, x))
    jax.effects_barrier()
    assert len(seen) == {"scan": 3, "while": 3}.get(loop, 1)


def test_higher_orders_and_forward_mode() -> None:
    module, plain = Ours(lambda w, x: jnp.sin(x @ w)), Ours(lambda w, x: jnp.sin(x @ w))
    calls: list[int] = []
    ag.register_full_backward_hook(module, lambda m, gi, go: calls.append(1))
    x = jnp.asarray(A[0])
    f, g = (lambda x: module(x).sum() ** 3), (lambda x: plain(x).sum() ** 3)
    same(jax.jvp(f, (x,), (x,)), jax.jvp(g, (x,), (x,)))
    same(jax.jacfwd(f)(x), jax.jacfwd(g)(x))
    assert not calls
    for order in (jax.hessian, lambda f: jax.jacrev(jax.grad(f)), lambda f: jax.jacrev(jax.jacfwd(f))):
        same(order(f)(x), order(g)(x), 1e-4)
    same(jax.jacrev(jax.hessian(f))(x), jax.jacrev(jax.hessian(g))(x), 1e-3)
    assert calls


# ---------------------------------------------------------------- the module itself


class Noisy(nnx.Module):
    """Statistics, random state, a counter."""

    def __init__(self, lazy: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.linear = lm.LazyLinear(4, rngs=rngs) if lazy else nnx.Linear(3, 4, rngs=rngs)
        self.norm = lm.LazyBatchNorm(rngs=rngs) if lazy else nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        return self.dropout(self.norm(self.linear(x)))


def arrays(model: Any) -> list[np.ndarray]:
    leaves = jax.tree.leaves(nnx.state(model))
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in leaves]


@pytest.mark.parametrize("lazy", [False, True], ids=["ready", "lazy"])
@pytest.mark.parametrize("transform", ["nnx.grad", "nnx.jit", "lm.jit", "lm.jit check", "nnx.remat", "nnx.jit inside"])
def test_statistics_and_random_state_are_as_without_hooks(transform: str, lazy: bool) -> None:
    if lazy and transform not in ("lm.jit", "lm.jit check"):
        pytest.skip("a gradient with respect to a model that is lazy needs lm.jit")
    models, found = [Noisy(lazy), Noisy(lazy)], []
    for module in (models[0], models[0].norm, models[0].linear, models[0].dropout):
        ag.register_full_backward_hook(module, lambda m, gi, go: None)
        ag.register_full_backward_pre_hook(module, lambda m, go: tuple(go))
    for model in models:
        step = TRANSFORMS[transform](lambda model, x: (model(x) ** 2).sum())
        found.append([step(model, jnp.asarray(A)) for _ in range(2)])
    for a, b in zip(arrays(models[0]), arrays(models[1]), strict=True):
        np.testing.assert_array_equal(a, b)
    same(jax.tree.leaves(found[0]), jax.tree.leaves(found[1]))
    assert int(models[0].calls[...]) == 2


def test_a_hook_gets_the_module_or_its_copy_with_values() -> None:
    module, got = Ours(lambda w, x: x @ w), []
    ag.register_full_backward_hook(module, lambda m, gi, go: got.append(m))
    x = jnp.asarray(A)
    jax.grad(lambda x: module(x).sum())(x)
    assert got[0] is module
    nnx.grad(lambda m, x: m(x).sum())(module, x)
    assert isinstance(got[1], Ours) and got[1] is not module
    np.testing.assert_array_equal(got[1].w[...], W)
    module, values = Ours(lambda w, x: x @ w), []
    ag.register_full_backward_hook(module, lambda m, gi, go: record(values, m.w[...]))
    for transform in ("nnx.jit", "lm.jit", "nnx.remat"):
        TRANSFORMS[transform](lambda m, x: m(x).sum())(module, x)
    jax.effects_barrier()
    assert len(values) == 3
    same(values, [(W,)] * 3)


def test_hooks_on_lazy_layers_stay() -> None:
    layer, seen = lm.LazyLinear(2, rngs=nnx.Rngs(0)), []
    handle = ag.register_full_backward_hook(layer, lambda m, gi, go: seen.append(type(m).__name__))
    jax.grad(lambda x: layer(x).sum())(jnp.asarray(A))
    assert seen == ["Linear"] and isinstance(layer, nnx.Linear)
    handle.remove()
    assert type(layer) is nnx.Linear


def test_forward_hooks_run_between_the_marks() -> None:
    module, seen = Ours(lambda w, x: x @ w), []
    lm.register_forward_pre_hook(module, lambda m, args: (args[0] * 2,))
    lm.register_forward_hook(module, lambda m, args, out: out * 3)
    ag.register_full_backward_hook(module, lambda m, gi, go: record(seen, gi[0], go[0]))
    found = jax.grad(lambda x: module(x).sum())(jnp.asarray(A))
    ones = np.ones_like(A)
    same(seen, [(3 * ones @ W.T, ones)])
    same(found, 6 * ones @ W.T)


# ---------------------------------------------------------------- removal


def test_removal() -> None:
    module, calls = Ours(lambda w, x: x @ w), []
    handles = [ag.register_full_backward_hook(module, lambda m, gi, go, i=i: calls.append(i)) for i in range(3)]
    first = ag.register_full_backward_hook(module, lambda m, gi, go: calls.append("first"), prepend=True)
    run = lambda: jax.grad(lambda x: module(x).sum())(jnp.asarray(A))  # noqa: E731
    run()
    assert calls == ["first", 0, 1, 2]
    for handle in (handles[1], handles[1], first):
        handle.remove()
    calls.clear()
    run()
    assert calls == [0, 2]
    for handle in handles:
        handle.remove()
    assert type(module) is Ours and set(vars(module)) == set(vars(Ours(len)))


@pytest.mark.parametrize("transform", ["nnx.grad", "lm.autograd.grad", "nnx.jit", "lm.jit", "plain"])
def test_a_hook_may_remove_itself_and_the_next_one_runs_once_more(transform: str) -> None:
    module, calls = Ours(lambda w, x: x @ w), []

    def once(m: Any, gi: Any, go: Any) -> None:
        calls.append("once")
        handle.remove()
        later.remove()

    handle = ag.register_full_backward_hook(module, once)
    later = ag.register_full_backward_hook(module, lambda m, gi, go: calls.append("later"))
    x = jnp.asarray(A)
    for _ in range(3):
        if transform == "plain":
            jax.grad(lambda x: module(x).sum())(x)
        else:
            TRANSFORMS[transform](lambda m, x: m(x).sum())(module, x)
    assert calls == ["once", "later"]
    module(x)
    assert type(module) is Ours


def test_a_removed_hook_leaves_compiled_code() -> None:
    module, x = Ours(lambda w, x: x @ w), jnp.asarray(A)
    for jit in (nnx.jit, lm.jit):
        step = jit(lambda m, x: nnx.grad(lambda x: m(x).sum())(x))
        want = step(module, x)
        with ag.register_full_backward_hook(module, lambda m, gi, go: (gi[0] * 2,)):
            same(step(module, x), 2 * want)
        same(step(module, x), want)


def test_nothing_is_kept() -> None:
    class Big(Ours):
        pass

    module = Big(lambda w, x: x @ w)
    handle = ag.register_full_backward_hook(module, lambda m, gi, go: None)
    x = jnp.asarray(A)
    for transform in ("nnx.grad", "nnx.jit", "lm.jit", "nnx.remat"):
        TRANSFORMS[transform](lambda m, x: m(x).sum())(module, x)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
    handle.remove()


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_no_tracer_leaks(transform: str) -> None:
    with jax.checking_leaks():
        ours(CASES["two inputs"], TRANSFORMS[transform])
        ours(CASES["no input differentiated"], TRANSFORMS[transform])


# ---------------------------------------------------------------- bad input


def failing(hook: Any, *, pre: bool = False, wrt_input: bool = True) -> str:
    module = Ours(lambda w, x: x @ w)
    (ag.register_full_backward_pre_hook if pre else ag.register_full_backward_hook)(module, hook)
    with pytest.raises(lm.LazyError) as error:
        if wrt_input:
            jax.grad(lambda x: module(x).sum())(jnp.asarray(A))
        else:
            nnx.grad(lambda m: m(jnp.asarray(A)).sum())(module)
    return str(error.value)


def wrong(m: Any, gi: Any, go: Any = None) -> Any:
    return gi[0][:1]


def test_another_shape_is_refused() -> None:
    assert failing(wrong) == (
        "the hook wrong of Ours\n"
        "  got:    f32[1,3], returned by it\n"
        "  needed: (f32[2,3],), as the grad_input that it was given, or None to leave that as it is\n"
        "  write:  return (new_gradient,): a tuple also for one, with the shape and the dtype of each"
    )
    assert "needed: (f32[2,3],), as the grad_output" in failing(wrong, pre=True)


@pytest.mark.parametrize(
    "value", [lambda g: (g[0], g[0]), lambda g: (), lambda g: (g[0].astype(jnp.bfloat16),), lambda g: (g[0][0],),
              lambda g: ("text",), lambda g: ({"a": g[0]},), lambda g: 3, lambda g: (np.asarray(g[0], np.float64),)]
)  # fmt: skip
@pytest.mark.parametrize("pre", [False, True])
def test_other_gradients_are_refused(pre: bool, value: Any) -> None:
    hook = (lambda m, go: value(go)) if pre else (lambda m, gi, go: value(gi))
    assert "or None to leave that as it is" in failing(hook, pre=pre)


def test_a_gradient_that_is_not_there_is_not_replaced() -> None:
    text = failing(lambda m, gi, go: (go[0],), wrt_input=False)
    assert "needed: None: no input of this call is differentiated, so there is no gradient to replace" in text
    module = Ours(lambda w, x: x @ w)
    ag.register_full_backward_hook(module, lambda m, gi, go: (None,))
    nnx.grad(lambda m: m(jnp.asarray(A)).sum())(module)


@pytest.mark.parametrize("register", [ag.register_full_backward_hook, ag.register_full_backward_pre_hook])
def test_what_is_no_module_or_no_function_is_refused(register: Any) -> None:
    with pytest.raises(lm.ArgumentError) as error:
        register(nnx.Param(jnp.ones(2)), len)
    name = f"lm.autograd.{register.__name__}"
    assert str(error.value) == (
        f"{name}\n  got:    Param\n  needed: an nnx.Module: the hook runs in the backward pass of its calls\n"
        f"  write:  {name}(model.layer, fn), or lm.autograd.register_hook(variable, fn) for a Variable"
    )
    with pytest.raises(lm.ArgumentError, match=f"{name}\n  got:    an int"):
        register(Ours(len), 3)


def test_a_hook_that_fails_is_told_and_leaves_the_model_as_it_was() -> None:
    def hook(m: Any, gi: Any, go: Any) -> None:
        raise OSError("inside")

    model = Noisy()
    handle = ag.register_full_backward_hook(model, hook)
    for transform in ("nnx.grad", "nnx.jit", "lm.jit"):
        with pytest.raises(OSError, match="inside"):
            TRANSFORMS[transform](lambda m, x: m(x).sum())(model, jnp.asarray(A))
    handle.remove()
    for a, b in zip(arrays(model), arrays(Noisy()), strict=True):
        np.testing.assert_array_equal(a, b)
    TRANSFORMS["nnx.grad"](lambda m, x: m(x).sum())(model, jnp.asarray(A))
