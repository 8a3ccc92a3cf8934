"""What backward hooks of modules see and change: PyTorch's are the oracle where it has them."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hooked_modules import CASES, TRANSFORMS, A, B, Case, I, Ours, W, ours, record, same, wrt_all

import lazymods as lm

ag = lm.autograd


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
        "  write:  module(x, other)  # what else it computes with, as an argument of its call"
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_python_decisions_of_forwards_and_hooks() -> None:
    def fn(w: Any, x: Any) -> Any:
        y = x @ w
        return y * 3 if y.sum() > 0 else y

    module = Ours(fn)
    ag.register_full_backward_hook(module, lambda m, gi, go: (gi[0] * 5,) if go[0].sum() > 0 else None)
    gradient = lambda m, x: jax.grad(lambda x: m(x).sum())(x)  # noqa: E731
    compiled = (lm.jit(gradient), lm.jit(gradient, check=True))
    for sign in (1, -1):
        x = sign * jnp.asarray(A)
        want = 5 * np.ones_like(A) @ W.T * (3 if (x @ W).sum() > 0 else 1)
        for run in (gradient, *compiled):
            same(run(module, x), want, 1e-4)


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map(check_vma: bool) -> None:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    module, parts = Ours(lambda w, x: jnp.sin(x @ w)), jax.sharding.PartitionSpec("d")
    want = jax.grad(lambda x: module(x).sum())(jnp.asarray(A))
    ag.register_full_backward_hook(module, lambda m, gi, go: (gi[0] * 2,))

    def inside(f: Any) -> Any:
        return jax.shard_map(f, mesh=mesh, in_specs=parts, out_specs=parts, check_vma=check_vma)

    same(inside(jax.grad(lambda x: module(x).sum()))(jnp.asarray(A)), 2 * want)
    same(jax.jit(jax.grad(lambda x: inside(module)(x).sum()))(jnp.asarray(A)), 2 * want)
