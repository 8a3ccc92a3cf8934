"""From a call to a function of its operands: for one platform, or for the one that a program is compiled for.

``on_platform`` is for operations that are executed at once: the platform is that of the operands. ``anywhere`` is for a
program that is being traced: each platform's kernel is a branch of ``jax.lax.platform_dependent``, of which the
compiler sees one. Where platforms differ in their pairs, what one of them saves is
saved as zeros by the others: a program has one list of outputs, and the compiler drops those that nothing reads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from lazymods import _compat
from lazymods._errors import one_line
from lazymods.dispatch.call import Call, Output, Plan
from lazymods.dispatch.gradient import with_derivative
from lazymods.dispatch.keys import OTHER, PLATFORMS
from lazymods.dispatch.places import is_auto_mesh
from lazymods.dispatch.primitives import refuse
from lazymods.dispatch.refusals import NoKernelError, Refusal

Flat = Callable[..., Sequence[Any]]
"""A function of operands that returns the leaves of its output."""


def on_platform(call: Call, key: str) -> Callable[..., Any]:
    """Return the function of operands that runs on the platform of a key.

    Args:
        call: The call.
        key: CPU, CUDA or the like; or Lazy.

    Returns:
        What runs there, with its derivative; it returns what the kernel returns.

    Raises:
        NoKernelError: If the platform has no kernel.
    """
    plan = call.plan(key)
    if plan.kernel is None:
        raise NoKernelError(_refusal(call, key)(key))
    run = functools.partial(call.run, plan.kernel)
    if plan.pair is None and not plan.ambiguous:
        return run

    def forward(*operands: Any) -> tuple[Any, Any]:
        if plan.pair is None:
            raise NoKernelError(_refusal(call, key, ambiguous=True)(key))
        assert plan.kernel is not None
        out, saved = call.forward(plan.pair, *operands)
        return call.agreed(Output(plan.pair, out), call.output(plan.kernel, operands)), saved

    def backward(saved: Any, cotangent: Any) -> tuple[Any, ...]:
        assert plan.pair is not None  # forward came first
        return tuple(call.backward(plan.pair, saved, cotangent))

    return with_derivative(call.name, (call, key), run, forward, backward)


def _refusal(call: Call, *keys: str, **facts: Any) -> Refusal:
    return Refusal(call.name, tuple(call.kernels), keys, **facts)


# ---------------------------------------------------------------- any platform


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Refused:
    """What a branch saves that refuses: its gradients refuse as well, where only those are computed."""

    why: Refusal


class Branch(NamedTuple):
    """A function that was traced for a platform.

    Attributes:
        run: Takes operands, returns the leaves of its output.
        shapes: Its output, a pytree of ``jax.ShapeDtypeStruct``.
    """

    run: Flat
    shapes: Any


class Anywhere:
    """The kernels of all platforms, for a program whose platform is not known yet.

    Args:
        call: The call.
        here: The key of the platform that this process runs on: what its kernel raises is raised at once; another
            one's, when a program is lowered for that platform. A kernel of cuDNN can't be traced without it.
    """

    def __init__(self, call: Call, here: str) -> None:
        self._call = call
        self._here = here
        self._plans = {platform: call.plan(key) for platform, key in PLATFORMS.items()} | {None: call.plan(OTHER)}
        self._keys = {plan: key for key, plan in zip([*PLATFORMS.values(), OTHER], self._plans.values(), strict=True)}
        self._keys[call.plan(here)] = here

    def function(self) -> Callable[..., Any]:
        """Return the function of operands; it returns what a kernel returns.

        Raises:
            NoKernelError: If no platform has a kernel.
        """
        if all(plan.kernel is None for plan in self._keys):
            raise NoKernelError(_refusal(self._call, self._here)(self._here))
        if len(self._keys) == 1:  # the same everywhere
            return on_platform(self._call, self._here)
        if any(plan.pair is not None or plan.ambiguous for plan in self._keys):
            token = (self._call, self._here, None)
            return with_derivative(self._call.name, token, self._run, self._forward, self._backward)
        return self._run

    def _run(self, *operands: Any) -> Any:
        traced = self._kernels(operands)
        known, output = self._known(traced)
        branches = {plan: self._or_refusal(plan, traced[plan], known) for plan in traced}
        return jax.tree.unflatten(jax.tree.structure(output.shapes), self._chosen(operands, branches))

    def _chosen(self, operands: Sequence[Any], branches: dict[Plan, Flat]) -> Sequence[Any]:
        by_platform = {platform: branches[plan] for platform, plan in self._plans.items() if platform is not None}
        default = branches[self._plans[None]]
        return jax.lax.platform_dependent(*operands, default=default, **by_platform)

    # ------------------------------------------------------------ tracing

    def _kernels(self, operands: Sequence[Any]) -> dict[Plan, Branch | Refusal]:
        call, traced = self._call, dict[Plan, Any]()
        for plan in self._keys:
            if plan.kernel is None:
                traced[plan] = self._refusal(plan)
            else:
                traced[plan] = self._traced(plan, functools.partial(call.run, plan.kernel), operands)
        return traced

    def _traced(self, plan: Plan, function: Callable[..., Any], operands: Sequence[Any]) -> Branch | Refusal:
        """Trace a function; return what to say on its platform if it raises and the platform is not this one."""
        try:
            jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*operands)
        except Exception as error:
            if self._keys[plan] == self._here:
                raise
            return self._refusal(plan, kernel=plan.kernel, error=f"{type(error).__name__}: {one_line(error)}")
        return Branch(jaxpr_as_fun(jaxpr), shapes)

    def _known(self, traced: dict[Plan, Branch | Refusal]) -> tuple[Branch, Output]:
        """Return a branch that can be run, this platform's if it can, after a look at whether all are alike.

        Raises:
            NoKernelError: If there is none.
            RegistrationError: If their outputs differ.
        """
        order = sorted(traced, key=lambda plan: self._keys[plan] != self._here)
        found = [(plan, branch) for plan in order if isinstance(branch := traced[plan], Branch)]
        if not found:
            raise NoKernelError(*[why(self._keys[plan]) for plan, why in traced.items() if isinstance(why, Refusal)])
        plan, known = found[0]
        output = self._call.meta or Output(str(plan.kernel), known.shapes)
        for plan, branch in found:
            self._call.agreed(Output(str(plan.kernel), branch.shapes), output)
        return known, output

    def _refusal(self, plan: Plan, **facts: Any) -> Refusal:
        keys = [PLATFORMS.get(platform or "", OTHER) for platform, other in self._plans.items() if other == plan]
        return _refusal(self._call, *keys, **facts)

    def _or_refusal(self, plan: Plan, branch: Branch | Refusal, known: Branch) -> Flat:
        if isinstance(branch, Branch):
            return branch.run
        why = branch
        return lambda *operands: refuse(known.run(*operands), why)

    # ------------------------------------------------------------ derivatives

    def _forward(self, *operands: Any) -> tuple[Any, Any]:
        """Return the output, and for each plan what its branch saves: zeros, but for the one that runs.

        Zeros would have to be sharded as what they stand for. Where that is part of an array's type, the operands are
        saved instead, and the backward branch runs the forward function again.
        """
        if not is_auto_mesh():
            return self._run(*operands), operands
        traced = self._kernels(operands)
        known, output = self._known(traced)
        saving = {plan: self._saving(plan, branch, operands, known, output) for plan, branch in traced.items()}
        count = len(output.leaves())

        def branch(plan: Plan) -> Flat:
            def run(*operands: Any) -> list[Any]:
                leaves = list(saving[plan].run(*operands))
                saved = [leaves[count:] if p == plan else _blank(s.shapes[1]) for p, s in saving.items()]
                return leaves[:count] + [leaf for part in saved for leaf in part]

            return run

        leaves = self._chosen(operands, {plan: branch(plan) for plan in saving})
        shapes = (output.shapes, tuple(s.shapes[1] for s in saving.values()))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    def _saving(
        self, plan: Plan, kernel: Branch | Refusal, operands: Sequence[Any], known: Branch, output: Output
    ) -> Branch:
        """Return a branch that returns the output and what its derivative needs."""
        call = self._call

        def refusing(why: Refusal) -> Branch:
            return Branch(lambda *x: refuse(known.run(*x), why), (output.shapes, _Refused(why)))

        if not isinstance(kernel, Branch):
            return refusing(kernel)
        if plan.ambiguous:
            return refusing(self._refusal(plan, ambiguous=True))
        if plan.pair is None:
            function: Any = lambda *x: jax.vjp(kernel.run, *x)  # noqa: E731
        else:
            function = functools.partial(call.forward, plan.pair)
        traced = self._traced(plan, function, operands)
        if isinstance(traced, Refusal):
            return refusing(traced)
        if plan.pair is None:
            shapes = (output.shapes, traced.shapes[1])
        else:
            call.agreed(Output(plan.pair, traced.shapes[0]), output)
            shapes = traced.shapes
        return Branch(traced.run, shapes)

    def _backward(self, saved: tuple[Any, ...], cotangent: Any) -> tuple[Any, ...]:
        auto = is_auto_mesh()
        leaves, tree = jax.tree.flatten(cotangent)
        moving = [i for i, leaf in enumerate(leaves) if leaf.dtype != jax.dtypes.float0]
        wanted = [i for i, x in enumerate(self._call.operands) if jnp.issubdtype(x.dtype, jnp.inexact)]

        def branch(number: int, plan: Plan) -> Flat:
            def run(saved: tuple[Any, ...], moved: Sequence[Any]) -> list[Any]:
                given = list(leaves)
                for i, leaf in zip(moving, moved, strict=True):
                    given[i] = leaf
                state = saved[number] if auto else self._saved_again(plan, saved)
                like = self._call.operands if auto else saved
                found = self._gradients(plan, state, given, tree)
                full = [jnp.zeros_like(like[i]) if found[i] is None else found[i] for i in wanted]
                if not auto:  # the branches of a choice have one type
                    types = [jax.typeof(like[i]) for i in wanted]
                    full = list(map(_compat.named_axes.typed_as, full, types))
                return refuse(full, state.why) if isinstance(state, _Refused) else full

            return run

        branches = {plan: branch(number, plan) for number, plan in enumerate(self._keys)}
        found = self._chosen((saved, [leaves[i] for i in moving]), branches)
        gradients: list[Any] = [None] * len(self._call.operands)
        for i, gradient in zip(wanted, found, strict=True):
            gradients[i] = gradient
        return tuple(gradients)

    def _saved_again(self, plan: Plan, operands: Sequence[Any]) -> Any:
        """Return what the forward branch of a plan would have saved."""
        traced = self._kernels(operands)
        known, output = self._known(traced)
        saving = self._saving(plan, traced[plan], operands, known, output)
        leaves = saving.run(*operands)[len(output.leaves()) :]
        return jax.tree.unflatten(jax.tree.structure(saving.shapes[1]), leaves)

    def _gradients(self, plan: Plan, saved: Any, leaves: Sequence[Any], tree: Any) -> Sequence[Any]:
        if isinstance(saved, _Refused):
            return [None] * len(self._call.operands)
        if plan.pair is None:
            return list(saved(list(leaves)))
        return self._call.backward(plan.pair, saved, jax.tree.unflatten(tree, leaves))


def _blank(shapes: Any) -> list[Any]:
    return [jnp.zeros(x.shape, x.dtype) for x in jax.tree.leaves(shapes)]
