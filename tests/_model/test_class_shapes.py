"""Classes as other people write them, with every public function: their lazy twins give what the classes themselves do.

Bases in front of ``nnx.Module``, metaclasses, dataclasses and methods that override how attributes are found.
"""

# pyright: reportAssignmentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# (the classes share methods by assignment: their bases are what is tested)

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from shapes_of_classes import CLASSES, Body, Forward, Helper, Meta, Slotted, T, Tagged

import lazymods as lm

X = jnp.ones((2, 4))
SPEC = jax.ShapeDtypeStruct(X.shape, X.dtype)


def width(config: Any, x: Any) -> dict[str, int]:
    return {"n": x.shape[-1]}


LAZY = {cls: lm.lazy(cls, infer=width) for cls in CLASSES}


class Host(nnx.Module):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x)


def assert_same(model: Any, want: Any) -> None:
    assert nnx.graphdef(model) == nnx.graphdef(want)
    states = [nnx.to_flat_state(nnx.state(m)) for m in (model, want)]
    for (path, a), (other, b) in zip(*states, strict=True):
        assert path == other
        np.testing.assert_array_equal(a.get_raw_value(), b.get_raw_value(), err_msg=str(path))


Pair = tuple[Callable[[], Any], Callable[[], Any]]
OPERATIONS: dict[str, Callable[[Any, Any, Path], Any]] = {}


def operation(function: Callable[[Any, Any, Path], Any]) -> Callable[[Any, Any, Path], Any]:
    OPERATIONS[function.__name__] = function
    return function


@operation
def call(model: Any, want: Any, folder: Path) -> Any:
    np.testing.assert_array_equal(model(X), want(X))


@operation
def reports(model: Any, want: Any, folder: Path) -> Any:
    for report in (lm.infer_shapes, lm.summary):
        a, b = report(model, SPEC), report(want, SPEC)
        assert (a.total_parameters, a.output, a.flops) == (b.total_parameters, b.output, b.flops)
    assert lm.has_uninitialized_params(model) and str(lm.summary(model)) and repr(model)
    lm.materialize(model, SPEC)
    lm.materialize(want, SPEC)


@operation
def hooks(model: Any, want: Any, folder: Path) -> Any:
    for m in (model, want):
        seen: list[int] = []
        handles = [
            lm.register_forward_pre_hook(m, lambda *_, seen=seen: seen.append(0)),
            lm.register_forward_hook(m, lambda *_, seen=seen: seen.append(1)),
        ]
        lm.infer_shapes(m, SPEC)
        seen.clear()
        m(X)
        for handle in handles:
            handle.remove()
        m(X)
        assert seen == [0, 1]


@operation
def state_dict(model: Any, want: Any, folder: Path) -> Any:
    lm.load_state_dict(model, lm.state_dict(want))
    assert list(lm.state_dict(model)) == list(lm.state_dict(want))


@operation
def file(model: Any, want: Any, folder: Path) -> Any:
    lm.save(want, folder / "model.safetensors")
    lm.load(model, folder / "model.safetensors")
    lm.load(want, folder / "model.safetensors")


@operation
def jit(model: Any, want: Any, folder: Path) -> Any:
    function = lm.jit(lambda m, x: m(x))
    np.testing.assert_array_equal(function(model, X), function(want, X))
    np.testing.assert_array_equal(lm.jit(model)(X), function(want, X))


@operation
def flax_jit(model: Any, want: Any, folder: Path) -> Any:
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(model, X), nnx.jit(lambda m, x: m(x))(want, X))


@operation
def gradients(model: Any, want: Any, folder: Path) -> Any:
    function = lm.jit(lambda m, x: nnx.grad(lambda m: m(x).sum())(m))
    jax.tree.map(np.testing.assert_array_equal, function(model, X), function(want, X))


@operation
def copies(model: Any, want: Any, folder: Path) -> Any:
    model = nnx.clone(nnx.merge(*nnx.split(copy.deepcopy(model))))
    model(X)
    return copy.deepcopy(model)


@operation
def pickles(model: Any, want: Any, folder: Path) -> Any:
    model = pickle.loads(pickle.dumps(model))
    model(X)
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("cls", CLASSES)
def test_a_lazy_twin_is_used_as_the_class_is(cls: Any, name: str, tmp_path: Path) -> None:
    for wrap in (lambda m: m, Host) if name in ("call", "reports", "hooks") else (lambda m: m,):
        model, want = wrap(LAZY[cls](m=3, rngs=nnx.Rngs(0))), wrap(cls(n=4, m=3, rngs=nnx.Rngs(0)))
        other = OPERATIONS[name](model, want, tmp_path)
        assert_same(model if other is None else other, cls(n=4, m=3, rngs=nnx.Rngs(0)) if wrap is not Host else want)
        inner = getattr(model if other is None else other, "inner", model if other is None else other)
        assert type(inner) is cls and not lm.is_lazy(inner)


def test_what_a_subclass_hook_gave_a_class_its_lazy_twin_has() -> None:
    assert LAZY[Tagged].tag == Tagged.tag == 3


# ---------------------------------------------------------------- by hand


def weights(self: Any, n: int, m: int, *, rngs: nnx.Rngs) -> None:
    self.w = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (n, m)))


def times(self: Any, x: jax.Array) -> jax.Array:
    return x @ self.w[...]


class HandBaseFirst(Helper, nnx.Module):
    __init__, __call__ = weights, times


class HandAbstract(Forward, nnx.Module):
    __init__, __call__ = weights, times


class HandGeneric(Generic[T], nnx.Module):
    __init__, __call__ = weights, times


class HandOfMeta(Slotted, nnx.Module, metaclass=Meta):
    __init__, __call__ = weights, times


class _ByHand(lm.LazyModuleMixin):
    def __init__(self, m: int, *, rngs: nnx.Rngs) -> None:
        self.w = lm.UninitializedParameter((None, m), init=nnx.initializers.lecun_normal(), key=rngs.params())

    def initialize_parameters(self, x: jax.Array) -> None:
        self.w.materialize((x.shape[-1], self.w.shape[-1]))


class LazyHandBaseFirst(_ByHand, HandBaseFirst):
    cls_to_become = HandBaseFirst


class LazyHandAbstract(_ByHand, HandAbstract):
    cls_to_become = HandAbstract


class LazyHandGeneric(_ByHand, HandGeneric[int]):
    cls_to_become = HandGeneric


class LazyHandOfMeta(_ByHand, HandOfMeta, metaclass=Meta):
    cls_to_become = HandOfMeta


BY_HAND = [LazyHandBaseFirst, LazyHandAbstract, LazyHandGeneric, LazyHandOfMeta]


@pytest.mark.parametrize("name", [n for n in OPERATIONS if n != "pickles"])
@pytest.mark.parametrize("cls", BY_HAND)
def test_a_class_by_hand_becomes_one_with_a_base_before_module(cls: Any, name: str, tmp_path: Path) -> None:
    model, want = cls(3, rngs=nnx.Rngs(0)), cls.cls_to_become(4, 3, rngs=nnx.Rngs(0))
    assert isinstance(model, cls) and type(model).__name__ == cls.__name__
    other = OPERATIONS[name](model, want, tmp_path)
    model = model if other is None else other
    assert_same(model, cls.cls_to_become(4, 3, rngs=nnx.Rngs(0)))
    assert type(model) is cls.cls_to_become


def test_a_class_by_hand_pickles_by_its_name() -> None:
    model = LazyHandBaseFirst(3, rngs=nnx.Rngs(0))
    model.w = lm.UninitializedParameter((None, 3))
    model = pickle.loads(pickle.dumps(model))
    assert isinstance(model, LazyHandBaseFirst)
    model(X)
    assert type(model) is HandBaseFirst and model.w.shape == (4, 3)


@pytest.mark.parametrize("base", [HandBaseFirst, HandAbstract, HandGeneric])
def test_a_class_by_hand_that_becomes_nothing_keeps_itself(base: Any) -> None:
    class Keeps(_ByHand, base):
        pass

    model = Keeps(3, rngs=nnx.Rngs(0))
    lm.materialize(model, SPEC)
    assert type(model) is Keeps and not lm.is_lazy(model)
    np.testing.assert_array_equal(model(X), base(4, 3, rngs=nnx.Rngs(0))(X))


# ---------------------------------------------------------------- classes that are told of their subclasses

REGISTER: list[tuple[str, type, str]] = []  # what a base was told, and by what


class Telling(nnx.Module):
    """A base that keeps a register, and demands a word of each class."""

    def __init_subclass__(cls, word: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.word = word
        REGISTER.append((cls.__name__, cls, word))


class PlainTelling:
    """The same as a plain class, which may come after ``nnx.Module``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        REGISTER.append((cls.__name__, cls, "plain"))


class TellingMeta(type(nnx.Module)):  # type: ignore[misc]
    def __new__(cls, name: str, bases: Any, namespace: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls, name, bases, namespace, **kwargs)
        REGISTER.append((name, made, "meta"))
        return made


class Told(Telling, word="a"):
    __init__, __call__ = Body.__init__, Body.__call__


class ToldAfter(nnx.Module, PlainTelling):
    __init__, __call__ = Body.__init__, Body.__call__


class ToldBefore(PlainTelling, nnx.Module):
    __init__, __call__ = Body.__init__, Body.__call__


class ToldByMeta(nnx.Module, metaclass=TellingMeta):
    __init__, __call__ = Body.__init__, Body.__call__


TOLD = [Told, ToldAfter, ToldBefore, ToldByMeta]


@pytest.mark.parametrize("name", [n for n in OPERATIONS if n != "pickles"])  # a class of lm.lazy here has no name
@pytest.mark.parametrize("cls", TOLD)
def test_no_register_of_classes_changes(cls: Any, name: str, tmp_path: Path) -> None:
    before = REGISTER.copy()
    lazy_class = lm.lazy(cls, infer=width)
    model, want = lazy_class(m=3, rngs=nnx.Rngs(0)), cls(4, 3, rngs=nnx.Rngs(0))
    other = OPERATIONS[name](model, want, tmp_path)
    assert_same(model if other is None else other, cls(4, 3, rngs=nnx.Rngs(0)))
    assert issubclass(lazy_class, cls) and not isinstance(Helper(), lazy_class)
    assert before == REGISTER


def test_a_subclass_of_a_lazy_class_is_told_of() -> None:
    class Own(lm.lazy(Told, infer=width), word="own"):  # type: ignore[misc]
        pass

    assert REGISTER.pop() == ("Own", Own, "own") and Own.word == "own"
    layer = Own(m=3, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(X), Told(4, 3, rngs=nnx.Rngs(0))(X))
    assert [c.__name__ for c in Own.__mro__[:3]] == ["Own", "LazyTold", "LazyModuleMixin"]
    assert Own.__mro__[3:] == Told.__mro__
