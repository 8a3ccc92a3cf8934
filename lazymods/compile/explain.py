"""Why the last trace happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lazymods._graph import dotted
from lazymods.compile.tokens import show


@dataclasses.dataclass(frozen=True)
class Situation:
    """What a trace was for, without the objects: texts and tokens by path."""

    inputs: dict[str, str]
    structure: dict[str, tuple[Any, ...]]
    context: Any


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a function was traced; its ``str`` says it.

    Attributes:
        function: The name of the function.
        reasons: One line for each difference from the trace before that is most alike.
    """

    function: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """Name the function, then one reason a line."""
        return "\n".join([f"lm.jit traced {self.function}:", *(f"  {r}" for r in self.reasons)])

    __repr__ = __str__


_last: list[Explanation] = [Explanation("nothing", ("nothing was traced so far",))]


def explain() -> Explanation:
    """Say why the last trace of an ``lm.jit`` function happened.

    Returns:
        An object whose ``str`` names the function and each difference from its earlier trace that is most alike: for
        arrays the old and the new ``f32[5,6]``; for attributes the path, the old and the new value.

    Example:
        >>> import jax.numpy as jnp
        >>> import lazymods as lm
        >>> double = lm.jit(lambda x: x * 2)
        >>> _ = double(jnp.ones((5, 6))), double(jnp.ones((3, 6)))
        >>> print(lm.explain())
        lm.jit traced <lambda>:
          argument 0: was f32[5,6], is f32[3,6]
    """
    return _last[0]


def note_trace(function: str, now: Situation, earlier: Sequence[Situation]) -> None:
    """Keep why a function is traced: what tells ``now`` from the most alike of the earlier situations."""
    if not earlier:
        reasons: list[str] = ["its first call"]
    else:
        reasons = min((_differences(then, now) for then in reversed(earlier)), key=len)
    _last[0] = Explanation(function, tuple(reasons) or ("its compiled program was dropped from the cache",))


def note_path(function: str) -> None:
    """Keep that a function was traced since its Python decided on values as it never did before."""
    _last[0] = Explanation(function, ("Python decided on the value of an array as it did not before: a new path",))


def _differences(then: Situation, now: Situation) -> list[str]:
    found = []
    for name in {**then.inputs, **now.inputs}:
        old, new = then.inputs.get(name), now.inputs.get(name)
        if old != new:
            found.append(_difference(name, old or "nothing", new or "nothing"))
    for name in {**then.structure, **now.structure}:
        old_tokens, new_tokens = then.structure.get(name), now.structure.get(name)
        if old_tokens != new_tokens:
            found.append(_difference(name, _show(old_tokens), _show(new_tokens)))
    if then.context != now.context:
        found.append("a setting of JAX: precision, x64, mesh, default device, checks or the like")
    return found


def _difference(name: str, old: str, new: str) -> str:
    return f"{name}: was {old}, is {new}" if old != new else f"{name}: another {new} than before"


def _show(tokens: tuple[Any, ...] | None) -> str:
    return "nothing" if tokens is None else " ".join(map(show, tokens)) or "empty"


def structure_of(tokens: Sequence[Any], paths: Sequence[Any], roots: list[str]) -> dict[str, Any]:
    """Gather the tokens of a picture by dotted path, below the names of its roots."""
    found: dict[str, Any] = {}
    for what, (root, *path) in zip(tokens, paths, strict=True):
        inner = dotted(tuple(path))
        name: str = f"{roots[root]}.{inner}" if inner else roots[root]
        found[name] = (*found.get(name, ()), what)
    return found
