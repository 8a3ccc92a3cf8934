"""What is around a call matters to its kernels: named axes, meshes, mutable arrays, effects, and what they hold."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import io_callback

import lazymods as lm
from lazymods._compat import named_axes, plain_axes
from lazymods.dispatch import Operator, RegistrationError
from lazymods.dispatch.holdings import held

P = jax.sharding.PartitionSpec

with jax.default_device(jax.devices("cpu")[0]):
    X = jnp.array([0.25, 1.0, 2.0])
    W = jnp.array([1.0, 3.0])


def operator(name: str = "op", **kernels: Any) -> Operator:
    op = Operator(name)
    for key, kernel in kernels.items():
        op.register(key, kernel)
    return op


def like(x: Any, *_: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def same(got: Any, want: Any) -> None:
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


JITS = {"plain": lambda f: f, "jit": jax.jit, "lm.jit": lm.jit, "check": lambda f: lm.jit(f, check=True)}

# ---------------------------------------------------------------- named axes


def centred(x: Any) -> Any:
    return x - jax.lax.pmean(x, "batch")


def numbered(x: Any) -> Any:
    return x * jax.lax.axis_index("batch").astype(x.dtype)


PAIR = (lambda x: (centred(x), 100.0), lambda saved, g: (saved * centred(g),))
BY_AXES: dict[str, tuple[Any, float, dict[str, Any]]] = {  # the function, how often its derivative, the kernels
    "one": (centred, 1, {"CPU": centred}),
    "with shapes": (centred, 1, {"CPU": centred, "CUDA": lambda x: x, "Meta": like}),
    "numbered": (numbered, 1, {"CompositeImplicitAutograd": numbered, "Meta": like}),
    "pair": (centred, 100, {"CPU": centred, "Autograd": PAIR}),
    "pair for one": (centred, 100, {"CPU": centred, "CUDA": lambda x: x * 0, "AutogradCPU": PAIR}),
    "pair with shapes": (centred, 100, {"CPU": centred, "AutogradCPU": PAIR, "Meta": like}),
}
MAPS = {
    "vmap": lambda f: jax.vmap(f, axis_name="batch"),
    "vmap of jit": lambda f: jax.vmap(jax.jit(lambda x: f(x)), axis_name="batch"),
    "vmap of vmap": lambda f: lambda x: jax.vmap(jax.vmap(f), axis_name="batch")(x[:, None])[:, 0],
    "vmap in vmap": lambda f: lambda x: jax.vmap(jax.vmap(f, axis_name="batch"))(x[None])[0],
    "checkpoint": lambda f: jax.vmap(jax.checkpoint(f), axis_name="batch"),
    "nnx.vmap": lambda f: nnx.vmap(f, axis_name="batch"),
}


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize("how", MAPS)
@pytest.mark.parametrize("kind", BY_AXES)
def test_kernels_that_name_an_axis_of_vmap(kind: str, how: str, jit: str) -> None:
    function, times, kernels = BY_AXES[kind]
    got, want = MAPS[how](operator(**kernels)), MAPS[how](function)

    def gradient(f: Any) -> Any:
        return lambda x: jax.grad(lambda x: (f(x) ** 2).sum())(x)

    run = JITS[jit]
    same(run(lambda x: got(x))(X), want(X))
    same(run(gradient(got))(X), times * gradient(want)(X))
    same(run(lambda x: jax.jvp(got, (x,), (x * x,))[1])(X), times * jax.jvp(want, (X,), (X * X,))[1])


def test_a_sum_over_an_axis_is_not_mapped() -> None:
    total = operator(CPU=lambda x: jax.lax.psum(x, "batch"), Meta=like)
    for run in (lambda f: f, jax.jit, lm.jit):
        assert run(lambda x: jax.vmap(total, axis_name="batch", out_axes=None)(x))(X) == X.sum()


class Synced(nnx.Module):
    def __init__(self, op: Operator, *, rngs: nnx.Rngs) -> None:
        self.op, self.fc = op, lm.LazyLinear(2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return nnx.vmap(lambda fc, x: self.op(fc(x)), in_axes=(None, 0), axis_name="batch")(self.fc, x)


def test_a_lazy_model_with_one() -> None:
    model = Synced(operator(CPU=centred, Meta=like), rngs=nnx.Rngs(0))
    x = jnp.arange(6.0).reshape(3, 2)
    assert lm.infer_shapes(model, x).output.shape == (3, 2)
    lm.materialize(model, x)
    want = nnx.Linear(2, 2, rngs=nnx.Rngs(0))(x)
    same([model(x), lm.jit(model)(x)], [want - want.mean(0, keepdims=True)] * 2)


def test_without_the_private_names_of_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("are_there", "typed_as"):
        monkeypatch.setattr(named_axes, name, getattr(plain_axes, name))
    op = operator(CPU=lambda x: x**3, AutogradCPU=(lambda x: (x**3, x), lambda x, g: (g * 7 * x,)), Meta=like)
    same(jax.jit(jax.vmap(op, axis_name="batch"))(X), X**3)
    same(jax.vmap(jax.grad(op), axis_name="batch")(X), 7 * X)


# ---------------------------------------------------------------- shard_map


def product(x: Any, w: Any) -> Any:
    return jnp.sin(x) * w


def product_back(saved: Any, g: Any) -> Any:
    x, w = saved
    return g * jnp.cos(x) * w, 100 * g * jnp.sin(x)


PRODUCT = (lambda x, w: (product(x, w), (x, w)), product_back)
SHARDED = {
    "everywhere": {"CompositeExplicitAutograd": product, "Autograd": PRODUCT},
    "on one": {"CPU": product, "AutogradCPU": PRODUCT},
    "on each": {"CPU": product, "CUDA": lambda x, w: x * w, "AutogradCPU": PRODUCT},
    "none for one": {"CPU": product, "AutogradCPU": (PRODUCT[0], lambda saved, g: (None, product_back(saved, g)[1]))},
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("run", [lambda f: f, jax.jit, lm.jit], ids=["plain", "jit", "lm.jit"])
@pytest.mark.parametrize("kind", SHARDED)
def test_a_pair_with_an_operand_that_is_whole_on_each_device(kind: str, run: Any, check_vma: bool) -> None:
    op, mesh = operator(**SHARDED[kind]), jax.make_mesh((1,), ("a",), devices=jax.devices("cpu")[:1])
    x = jnp.arange(2.0)

    def loss(f: Any) -> Any:
        inside = lambda x, w: jax.lax.psum(f(x, w), "a")  # noqa: E731
        mapped = jax.shard_map(inside, mesh=mesh, in_specs=(P("a"), P()), out_specs=P(), check_vma=check_vma)
        return lambda x, w: mapped(x, w).sum()

    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.NamedSharding(mesh, P("a")))
        got = run(jax.grad(loss(op), (0, 1)))(x, W)
    same(got[1], 100 * jnp.sin(x))
    same(got[0], jnp.zeros(2) if kind == "none for one" else jnp.cos(x) * W)


# ---------------------------------------------------------------- mutable arrays, effects


@pytest.mark.parametrize("shapes", [{}, {"Meta": lambda r, x: like(x)}], ids=["", "with shapes"])
@pytest.mark.parametrize("jit", ["plain", "jit", "lm.jit"])
def test_a_mutable_array_among_the_arguments(jit: str, shapes: Any) -> None:
    def kernel(total: Any, x: Any) -> Any:
        total[...] = total[...] + x
        return total[...] * 2

    op = operator(CPU=kernel, CUDA=kernel, **shapes)
    total, other = jax.new_ref(jnp.zeros(3)), jax.new_ref(jnp.ones(3))
    f = JITS[jit](lambda total, other, x: (op(total, x), op(other, x), op(total, x)))
    for n in (1, 2):
        got = f(total, other, X)
        same(got, ((4 * n - 2) * X, 2 + 2 * n * X, 4 * n * X))
    same([total[...], other[...]], [4 * X, 1 + 2 * X])


def printing(x: Any, ordered: bool) -> Any:
    return io_callback(lambda x: np.asarray(x) * 2, like(x), x, ordered=ordered)


IN_PROGRAMS = {
    "jit": jax.jit,
    "lm.jit": lm.jit,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0],
    "cond": lambda f: lambda x: jax.lax.cond(x.sum() > 0, f, lambda x: x, x),
    "block": lambda f: lm.lazytensor.lazy()(f),
}


@pytest.mark.parametrize("how", IN_PROGRAMS)
def test_an_ordered_effect_beside_a_meta_kernel_is_refused_where_it_is_compiled(how: str) -> None:
    op = operator(CPU=lambda x: printing(x, ordered=True), Meta=like)
    with pytest.raises(RegistrationError) as caught:
        jax.block_until_ready(IN_PROGRAMS[how](lambda x: op(x))(X))
    assert str(caught.value) == (
        "Operator 'op'\n"
        "  got:    a kernel with an ordered effect (OrderedIOEffect) beside a Meta kernel, in a compiled program\n"
        "  needed: no order: with a Meta kernel, the kernels are traced when the program around them has been made\n"
        "  write:  jax.debug.print(..., ordered=False)  # or io_callback(..., ordered=False); or no "
        "Meta kernel"
    )
    for fine in (op, *map(IN_PROGRAMS[how], (operator(CPU=lambda x: printing(x, ordered=True)),))):
        same(fine(X), X * 2)
    same(IN_PROGRAMS[how](operator(CPU=lambda x: printing(x, ordered=False), Meta=like))(X), X * 2)


# ---------------------------------------------------------------- registered while it is traced


@pytest.mark.parametrize("shapes", [{}, {"Meta": like}], ids=["", "with shapes"])
@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize("options", [{}, {"donate_state": True}], ids=["plain", "donated"])
def test_a_kernel_that_is_registered_while_lm_jit_traces(options: Any, decides: bool, shapes: Any) -> None:
    op = operator(CompositeImplicitAutograd=lambda x: x * 2, **shapes)

    @lm.jit(**options)
    def f(x: Any) -> Any:
        first = op(x)
        if decides and first.sum() < 0:
            return first
        if "CPU" not in op.registrations():  # as a plugin that is imported at its first use
            op.register("CPU", lambda x: x * 5)
        return first + op(x)

    same(f(X), 7 * X)
    same(f(X), 10 * X)
    before = f.cache_info()
    same([f(X), f(X)], [10 * X] * 2)
    assert f.cache_info() == before


# ---------------------------------------------------------------- what kernels hold

ARRAY = jnp.ones(3)


def names_it(x: Any) -> Any:
    return x + ARRAY


def names_it_inside(x: Any) -> Any:
    return (lambda y: y + ARRAY)(x)


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, x: Any) -> Any:
        return x + self.held


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held

    def method(self, x: Any) -> Any:
        return x + self.held


HOLDING = {
    "global": names_it,
    "global of an inner function": names_it_inside,
    "cell": lambda x, inner=names_it: inner(x),
    "partial": functools.partial(jnp.add, ARRAY),
    "method": Holder(ARRAY).method,
    "slots": Slotted(ARRAY),
    "list": lambda x, parts=([ARRAY],): x + parts[0][0],
    "dict": lambda x, parts={"a": ARRAY}: x + parts["a"],
    "operator": operator("inner", CPU=names_it),
    "custom_jvp": jax.custom_jvp(names_it),
    **{f.__name__: f(names_it) for f in (jax.jit, jax.checkpoint, jax.vmap)},
}


@pytest.mark.parametrize("kind", HOLDING)
def test_an_array_that_a_kernel_holds_is_found(kind: str) -> None:
    assert [id(x) for x in held([HOLDING[kind]])] == [id(ARRAY)]


@pytest.mark.parametrize("kernel", [jnp.sin, jax.nn.relu, lambda x: jax.nn.gelu(x) * np.pi, lm.dispatch.rms_norm])
def test_libraries_hold_nothing_of_the_users(kernel: Any) -> None:
    assert list(held([kernel])) == []


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.vmap, lambda f: (lambda x: (lambda y: f(y))(x))])
def test_a_model_that_a_kernel_reaches_by_another_function_is_refused(wrap: Any) -> None:
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    op, x = operator(CPU=wrap(lambda x: layer(x))), jnp.ones((3, 2))
    same(op(x), layer(x))
    for compiled in (jax.jit, lm.jit):
        with pytest.raises(RegistrationError, match="a kernel that holds a Linear"):
            compiled(lambda x: op(x))(x)
