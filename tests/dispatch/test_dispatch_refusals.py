"""What an operator does not take: each error names the operator, the key, and what is registered."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import lazymods as lm
from lazymods.dispatch import NoKernelError, Operator, RegistrationError

with jax.default_device(jax.devices("cpu")[0]):
    X = jnp.arange(6.0).reshape(3, 2)


def operator(name: str = "op", **kernels: Any) -> Operator:
    op = Operator(name)
    for key, kernel in kernels.items():
        op.register(key, kernel)
    return op


def text_of(error: type[Exception], call: Any) -> str:
    with pytest.raises(error) as caught:
        jax.block_until_ready(call())
    return str(caught.value)


def test_an_unknown_key() -> None:
    assert text_of(RegistrationError, lambda: operator().register("cuda", min)) == (
        "Operator 'op'\n"
        "  got:    the key 'cuda'\n"
        "  needed: one of CPU, AutogradCPU, CUDA, AutogradCUDA, TPU, AutogradTPU, XLA, AutogradXLA, FPGA, "
        "AutogradOther, Lazy, AutogradLazy, Meta, AutogradMeta, CompositeExplicitAutograd, Autograd, "
        "CompositeImplicitAutograd\n"
        "  write:  op.register('CUDA', kernel)"
    )


def test_a_second_kernel() -> None:
    op = operator(CPU=min, Autograd=(min, max))
    assert text_of(RegistrationError, lambda: op.register("CPU", max)) == (
        "Operator 'op'\n"
        "  got:    a second kernel for CPU; registered: CPU, Autograd\n"
        "  needed: one kernel a key\n"
        "  write:  lm.dispatch.Operator(name)  # one of its own; or another key"
    )
    assert op.registrations()["CPU"] is min


def test_a_second_kernel_by_decorator_is_refused_before_it_is_written() -> None:
    with pytest.raises(RegistrationError, match="second kernel"):
        operator(CPU=min).register("CPU")


@pytest.mark.parametrize("kernel", [min, (min,), (min, 3), [min, max, min], 7], ids=str)
def test_an_autograd_kernel_without_its_pair(kernel: Any) -> None:
    op = operator(CPU=min)
    text = text_of(RegistrationError, lambda: op.register("AutogradCPU", kernel))
    assert f"{type(kernel).__name__} as the kernel of AutogradCPU; registered: CPU" in text
    assert "a pair (forward, backward)" in text
    assert dict(op.registrations()) == {"CPU": min}


def test_a_kernel_that_is_no_function() -> None:
    text = text_of(RegistrationError, lambda: operator().register("CPU", jnp.ones(3)))
    assert "ArrayImpl as the kernel of CPU" in text


@pytest.mark.parametrize("name", ["", None, 3])
def test_an_operator_without_a_name(name: Any) -> None:
    with pytest.raises(RegistrationError, match="a name"):
        Operator(name)


CALLS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "lm_jit": lm.jit,
    "jit_vmap": lambda f: jax.jit(jax.vmap(f)),
}


@pytest.mark.parametrize("how", CALLS)
def test_no_kernel_for_the_platform(how: str) -> None:
    op = operator("lonely", FPGA=lambda x: x, Autograd=(min, max))
    text = text_of(NoKernelError, lambda: CALLS[how](op)(X))
    assert text == (
        "Operator 'lonely'\n"
        "  got:    a call on a platform whose key is CPU; registered: FPGA, Autograd\n"
        "  needed: a kernel for CPU, or a composite one, which serves every platform\n"
        "  write:  op.register('CPU', kernel)  # or op.register('CompositeImplicitAutograd', kernel)"
    )


@pytest.mark.parametrize("how", CALLS)
def test_a_kernel_that_the_meta_kernel_contradicts(how: str) -> None:
    op = operator("wrong", CPU=lambda x: x.astype(jnp.bfloat16), Meta=lambda x: x)
    text = text_of(RegistrationError, lambda: CALLS[how](op)(X))
    assert "bf16[" in text and "from the kernel of CPU" in text and "which the kernel of Meta gives" in text


def test_kernels_of_two_platforms_that_differ() -> None:
    op = operator("two", CPU=lambda x: {"a": x}, CUDA=lambda x: (x,))
    text = text_of(RegistrationError, lambda: jax.jit(op)(X))
    assert "got:    (f32[3,2]) from the kernel of CUDA\n  needed: {'a': f32[3,2]}, which the kernel of CPU" in text


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_a_forward_function_that_its_kernel_contradicts(wrap: Any) -> None:
    pair = (lambda x: (x.astype(jnp.bfloat16), ()), lambda _, g: (g,))
    op = operator("pair", CPU=lambda x: x, Autograd=pair)
    text = text_of(RegistrationError, lambda: wrap(jax.grad(lambda x: op(x).sum()))(X))
    assert "got:    bf16[3,2] from the kernel of Autograd\n  needed: f32[3,2], which the kernel of CPU gives" in text


@pytest.mark.parametrize(
    "backward, got",
    [
        (lambda _, g: g, "no tuple, f32[3,2],"),
        (lambda _, g: (g, g), "2 gradients"),
        (lambda _, g: (g[0],), "f32[2] for argument 0"),
        (lambda _, g: (g.astype(jnp.bfloat16),), "bf16[3,2] for argument 0"),
        (lambda _, g: ({"a": g},), "{'a': f32[3,2]} for argument 0"),
    ],
    ids=["no_tuple", "two", "shape", "dtype", "tree"],
)
def test_a_backward_function_that_returns_something_else(backward: Any, got: str) -> None:
    op = operator("back", CPU=lambda x: x, AutogradCPU=(lambda x: (x, ()), backward))
    for wrap in (lambda f: f, jax.jit):
        text = text_of(RegistrationError, lambda w=wrap: w(jax.grad(lambda x: op(x).sum()))(X))
        assert f"got:    {got} from the backward function of AutogradCPU" in text


def test_a_forward_function_that_returns_no_pair() -> None:
    op = operator("fwd", CPU=lambda x: x, Autograd=(lambda x: x, lambda _, g: (g,)))
    assert "f32[3,2] from the forward function of Autograd" in text_of(
        RegistrationError, lambda: jax.grad(lambda x: op(x).sum())(X)
    )


def test_an_array_that_has_no_position() -> None:
    op = operator("kw", CPU=lambda x, *, y: x * y, Autograd=(lambda x, *, y: (x * y, y), lambda r, g: (g * r,)))
    assert "by keyword only" in text_of(RegistrationError, lambda: jax.grad(lambda x: op(x, y=x).sum())(X))


def test_a_meta_kernel_that_returns_no_shapes() -> None:
    op = operator("meta", CPU=lambda x: x, Meta=lambda x: 3)
    assert "3 from the kernel of Meta" in text_of(RegistrationError, lambda: op(X))


def test_a_module_among_the_arguments() -> None:
    op = operator("mod", CPU=lambda m, x: x)
    text = text_of(RegistrationError, lambda: op(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), X))
    assert "a module, Linear, among the arguments" in text


def test_ambiguous_derivatives_are_refused_where_they_are_compiled() -> None:
    op = operator("amb", FPGA=lambda x: x, CompositeImplicitAutograd=lambda x: x**2)
    gradient = jax.jit(jax.grad(lambda x: op(x).sum()))
    assert (gradient(X) == 2 * X).all()
    jax.export.export(jax.jit(op), platforms=["rocm"])(X)
    text = text_of(NoKernelError, lambda: jax.export.export(gradient, platforms=["rocm"])(X))
    assert "a derivative on a platform of AutogradOther; registered: FPGA, CompositeImplicitAutograd" in text


def test_a_platform_without_kernel_refuses_also_where_only_the_gradient_is_used() -> None:
    op = operator("half", CPU=lambda x: x, Autograd=(lambda x: (x, ()), lambda _, g: (g,)))
    gradient = jax.jit(jax.grad(lambda x: op(x).sum()))
    assert (gradient(X) == 1).all()
    text = text_of(NoKernelError, lambda: jax.export.export(gradient, platforms=["cpu", "cuda"])(X))
    assert "a platform whose key is CUDA; registered: CPU, Autograd" in text


def test_a_kernel_that_can_not_be_traced_here_is_an_error_on_its_platform_alone() -> None:
    def no_cudnn(x: Any) -> Any:
        raise RuntimeError("cuDNN is not detected.")

    op = operator("cud", CPU=lambda x: x * 2, CUDA=no_cudnn)
    assert (jax.jit(op)(X) == 2 * X).all()
    assert (jax.jit(jax.grad(lambda x: op(x).sum()))(X) == 2).all()
    text = text_of(NoKernelError, lambda: jax.export.export(jax.jit(op), platforms=["cuda"])(X))
    assert "the platform of CUDA, where the kernel of CUDA raised RuntimeError: cuDNN is not detected." in text


def test_what_the_own_kernel_raises_is_raised() -> None:
    def bad(x: Any) -> Any:
        raise RuntimeError("mine")

    op = operator("own", CPU=bad, CUDA=lambda x: x)
    for call in (op, jax.jit(op), jax.vmap(op)):
        assert text_of(RuntimeError, lambda c=call: c(X)) == "mine"


def test_no_forward_mode_without_a_transpose() -> None:
    op = operator("clip", CPU=lambda x: x, Autograd=(lambda x: (x, ()), lambda _, g: (jnp.clip(g, -1.0, 1.0),)))
    assert (jax.grad(lambda x: 5 * op(x).sum())(X) == 1).all()
    for wrap in (lambda f: f, jax.jit):
        text = text_of(NoKernelError, lambda w=wrap: w(lambda x: jax.jvp(op, (x,), (x,))[1])(X))
        assert "Operator 'clip'" in text and "forward mode" in text and "reverse mode" in text


@pytest.mark.parametrize("what, says", [("norms", "one of attention"), ("attention", "no layer that takes it")])
def test_use_of_what_is_not_there(what: str, says: str) -> None:
    with pytest.raises(RegistrationError, match=says):
        lm.dispatch.use(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), what)


def test_the_errors_are_lazy_errors() -> None:
    assert issubclass(RegistrationError, lm.LazyError) and issubclass(RegistrationError, ValueError)
    assert issubclass(NoKernelError, lm.LazyError) and issubclass(NoKernelError, NotImplementedError)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_a_traced_value_in_a_closure_has_a_gradient_or_is_refused(wrap: Any) -> None:
    def loss(w: Any, **more: Any) -> Any:
        return operator("closed", CPU=lambda x: x @ w, CUDA=lambda x: x @ w, **more)(X).sum()

    w = jnp.ones((2, 2))
    want = jax.grad(lambda w: (X @ w).sum())(w)
    for more in ({}, {"Meta": lambda x: x}):
        assert (wrap(jax.grad(lambda w, more=more: loss(w, **more)))(w) == want).all()
    pair = (lambda x: (x @ w, x), lambda x, g: (g @ w.T,))
    text = text_of(RegistrationError, lambda: wrap(jax.grad(lambda w: loss(w, Autograd=pair)))(w))
    assert "hold a traced value in a closure; registered: CPU, CUDA, Autograd" in text


def test_a_model_that_a_kernel_holds_is_refused_where_it_would_be_an_old_one() -> None:
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    op = operator("model", CPU=lambda x: layer(x), CUDA=lambda x: layer(x))
    for factor in (2.0, 3.0):
        layer.kernel[...] *= factor
        assert (op(X) == layer(X)).all() and (jax.vmap(op)(X) == jax.vmap(layer)(X)).all()
        for wrap in (jax.jit, lm.jit, nnx.jit):
            text = text_of(RegistrationError, lambda w=wrap: w(lambda x: op(x))(X))
            assert "a kernel that holds a Linear, in a program that is compiled; registered: CPU, CUDA" in text
