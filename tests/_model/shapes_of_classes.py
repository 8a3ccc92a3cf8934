"""Classes as other people write them, for tests: bases, metaclasses, dataclasses, decorated calls."""

# pyright: reportAssignmentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# (the classes share methods by assignment: their bases are what is tested)

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

import jax
from flax import nnx

T = TypeVar("T")


class Helper:
    def helper(self) -> int:
        return 1


class Slotted:
    __slots__ = ()


class Forward(abc.ABC):
    @abc.abstractmethod
    def __call__(self, x: jax.Array) -> jax.Array: ...


class Callee(Protocol):
    def __call__(self, x: jax.Array) -> jax.Array: ...


class Meta(type(nnx.Module)):  # type: ignore[misc]
    pass


class ProtocolMeta(type(nnx.Module), type(Protocol)):  # type: ignore[misc]
    pass


class Body:
    """What all of them do; no Module, so that it can be a base anywhere."""

    def __init__(self, n: int, m: int, *, rngs: nnx.Rngs) -> None:
        self.n = n
        self.fc = nnx.Linear(n, m, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x)


class BaseFirst(Body, Helper, nnx.Module): ...


class BaseAfter(nnx.Module, Helper):
    __init__, __call__ = Body.__init__, Body.__call__


class SlotsFirst(Slotted, nnx.Module):
    __init__, __call__ = Body.__init__, Body.__call__


class Abstract(Forward, nnx.Module):
    __init__, __call__ = Body.__init__, Body.__call__


class GenericFirst(Generic[T], nnx.Module):
    __init__, __call__ = Body.__init__, Body.__call__


class GenericAfter(nnx.Module, Generic[T]):
    __init__, __call__ = Body.__init__, Body.__call__


class OfProtocol(nnx.Module, Callee, metaclass=ProtocolMeta):
    __init__, __call__ = Body.__init__, Body.__call__


class OfMeta(nnx.Module, metaclass=Meta):
    __init__, __call__ = Body.__init__, Body.__call__


class NoPytree(nnx.Module, pytree=False):
    __init__, __call__ = Body.__init__, Body.__call__


class Nested(nnx.Module):
    def __init__(self, n: int, m: int, *, rngs: nnx.Rngs) -> None:
        self.first = BaseFirst(n, m, rngs=rngs)
        self.rest = nnx.List([GenericFirst[int](m, m, rngs=rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.rest[0](self.first(x))


class Tagging(nnx.Module):
    def __init_subclass__(cls, tag: int = 0, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.tag = tag


class Tagged(Tagging, tag=3):
    __init__ = Body.__init__

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x) * self.tag  # type: ignore[attr-defined]


class Properties(nnx.Module):
    def __init__(self, n: int, m: int, *, rngs: nnx.Rngs) -> None:
        self._w = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (n, m)))

    @property
    def w(self) -> Any:
        return self._w

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...]


class FindsAttributes(nnx.Module):
    __init__ = Body.__init__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("fc_"):
            return getattr(self.fc, name[3:])
        raise AttributeError(name)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.fc_kernel[...]


@dataclasses.dataclass(eq=False)
class Fields(Helper, nnx.Module):
    n: int
    m: int
    scale: int = 2
    _: dataclasses.KW_ONLY
    rngs: dataclasses.InitVar[nnx.Rngs]

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        self.fc = nnx.Linear(self.n, self.m, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x) * self.scale


class Cooperative(Helper, nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs, **sizes: int) -> None:
        super().__init__()
        self.rest = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.rest(x)


class Sub(Cooperative):
    def __init__(self, n: int, m: int, *, rngs: nnx.Rngs) -> None:
        super().__init__(rngs=rngs, n=n)
        self.fc = nnx.Linear(n, m, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(self.fc(x))


class Empty(nnx.Module):
    """Is false, of no length, and equal to all of its kind."""

    __init__, __call__ = Body.__init__, Body.__call__

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter([self.fc])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Empty)

    def __hash__(self) -> int:
        return 7


class Network(nnx.Module, abc.ABC, Generic[T]):
    """A base of published reinforcement learning code: abstract, generic, with a property to be defined."""

    @property
    @abc.abstractmethod
    def output_size(self) -> int: ...

    @abc.abstractmethod
    def step(self, x: jax.Array, state: T) -> tuple[jax.Array, T]: ...


class Buildable(Network[T], abc.ABC):
    @classmethod
    def from_config(cls, **config: Any) -> Any:
        return cls(**config)

    @classmethod
    @abc.abstractmethod
    def name(cls) -> str: ...


class OfNetwork(Buildable[int]):
    def __init__(self, n: int, m: int, *, rngs: nnx.Rngs) -> None:
        self._output_size = m
        self._core = nnx.Linear(n, m, rngs=rngs)

    @property
    def output_size(self) -> int:
        return self._output_size

    @classmethod
    def name(cls) -> str:
        return "of network"

    def step(self, x: jax.Array, state: int) -> tuple[jax.Array, int]:
        return self._core(x) * state, state + 1

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.step(x, self.output_size)[0]


class Rematted(nnx.Module):
    __init__ = Body.__init__

    @nnx.remat
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x)


class Jitted(nnx.Module):
    __init__ = Body.__init__

    @nnx.jit
    def forward(self, x: jax.Array) -> jax.Array:
        return self.fc(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.forward(x)


class OwnNew(nnx.Module):
    made = 0
    __init__, __call__ = Body.__init__, Body.__call__

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        OwnNew.made += 1
        return super().__new__(cls)


class Noted:
    __slots__ = ("note",)


class SlotsAfter(nnx.Module, Noted):
    """Has a slot beside the attributes that a Module has."""

    __init__, __call__ = Body.__init__, Body.__call__


@dataclasses.dataclass(eq=False, kw_only=True)
class KeywordFields(nnx.Module, Generic[T]):
    n: int
    m: int = 3
    sizes: tuple[int, ...] = dataclasses.field(default_factory=lambda: (2, 2))
    rngs: dataclasses.InitVar[nnx.Rngs]

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        self.fcs = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in self.widths()])

    def widths(self) -> list[tuple[int, int]]:
        ends = [self.n, *self.sizes, self.m]
        return list(itertools.pairwise(ends))

    def __call__(self, x: jax.Array) -> jax.Array:
        for fc in self.fcs:
            x = fc(x)
        return x


class Runnable(Protocol[T]):
    def __call__(self, x: jax.Array) -> jax.Array: ...

    def noted(self, note: T) -> T: ...


class OfGenericProtocol(nnx.Module, Runnable[int], metaclass=ProtocolMeta):
    __init__, __call__ = Body.__init__, Body.__call__


CLASSES = [
    BaseFirst, BaseAfter, SlotsFirst, Abstract, GenericFirst, GenericAfter, OfProtocol, OfMeta, NoPytree, Nested,
    Tagged, Properties, FindsAttributes, Fields, Sub, Empty, OfNetwork, Rematted, Jitted, OwnNew, SlotsAfter,
    KeywordFields, OfGenericProtocol,
]  # fmt: skip
