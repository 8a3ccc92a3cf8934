"""From an initializer to a program over elements, if it is one.

An initializer is called once with a key that has no value, and the programs that executing it would run are noted
(:func:`lazymods._compat.abstract.recorded`). It is a program over elements if one of them draws random bits for all
elements, and the others follow one after the other, each element by element, with scalars for all else. Two
initializers, or one at two shapes, that differ in nothing but scalars have equal programs: their kernels are the same.

Scalars that were computed on the way, such as the deviation of ``lecun_normal``, are computed here by numpy, and only
by operations that IEEE 754 defines to the last bit; on a GPU the device does those that it has faster ones of.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lazymods import _compat, _memory
from lazymods._initial import scaling
from lazymods._initial.stacking import Shape

CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}
UNCHANGED = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy", "copy_p", "stop_gradient", "device_put"}
ELEMENTWISE = set(
    "abs add and bitcast_convert_type ceil clamp convert_element_type div eq erf erf_inv erfc exp exp2 expm1 floor ge "
    "gt integer_pow is_finite le log log1p logistic lt max min mul ne neg nextafter not or pow round rsqrt select_n "
    "shift_left shift_right_arithmetic shift_right_logical sign sqrt square sub tanh xor".split()
)
_EXACT: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "sqrt": np.sqrt,
}
_FAST = {"div", "sqrt"}  # GPUs have faster ones, which are not exact


class NotElementwiseError(Exception):
    """The initializer is no program over elements, or not known to be one."""


class Literal(NamedTuple):
    """A scalar of the program itself, by its bytes: NaN equals NaN, and -0 is not 0."""

    dtype: np.dtype[Any]
    data: bytes

    @classmethod
    def of(cls, value: Any, dtype: Any) -> Literal:
        """Take a scalar, or an array of one element."""
        array = np.asarray(value, dtype)
        _require(array.size == 1, "a constant that is no scalar")
        return cls(array.dtype, array.tobytes())

    @property
    def value(self) -> Any:
        """The scalar."""
        return np.frombuffer(self.data, self.dtype)[0]


class Step(NamedTuple):
    """One operation; ``inputs`` holds literals and numbers, as :class:`Unit` counts them."""

    primitive: Any
    params: tuple[tuple[str, Any], ...]
    inputs: tuple[int | Literal, ...]


@dataclasses.dataclass(frozen=True)
class Unit:
    """What is compiled as one. Its inputs are numbered 0, 1, ..., the results of its steps -1, -2, ...

    Attributes:
        drawn: Of each input, whether it has a value for each element; the others are scalars.
        dtypes: The inputs' dtypes.
        steps: The operations.
        output: The number of the result.
        dtype: The result's dtype.

    It is a key in many tables, and long: its hash is kept.
    """

    drawn: tuple[bool, ...]
    dtypes: tuple[np.dtype[Any], ...]
    steps: tuple[Step, ...]
    output: int
    dtype: np.dtype[Any]

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.drawn, self.dtypes, self.steps, self.output, self.dtype))

    def __hash__(self) -> int:
        return self._hash


class Drawn(NamedTuple):
    """A program: the first unit draws, each other one takes what the one before gave.

    Attributes:
        units: What is compiled; equal for all that differ in scalars alone.
        scalars: The scalars that each unit takes.
    """

    units: tuple[Unit, ...]
    scalars: tuple[tuple[Any, ...], ...]


class Constant(NamedTuple):
    """The same value for every element."""

    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A run of an initializer: its operations in order.

    Doing them gives what the initializer gives, so it is called once only: one with a state of its own is right, too.
    """

    key: Any
    out: Any
    operations: Sequence[Any]

    def on(self, key: jax.Array) -> Any:
        """Do the operations, each as executing the initializer would."""
        values = {id(self.key): key}
        for primitive, inputs, params, outputs in self.operations:
            made = primitive.bind(*(values.get(id(x), x) for x in inputs), **params)
            values |= zip(map(id, outputs), made if primitive.multiple_results else [made], strict=True)
        return values.get(id(self.out), self.out)


class Reading(NamedTuple):
    """What was read of an initializer: its program over elements, if it is one, and the run that told."""

    program: Drawn | Constant | None
    run: Run | None


_NOTHING = Reading(None, None)


def read(init: Callable[..., Any], shape: Shape, dtype: Any) -> Reading:
    """Read what ``init(key, shape, dtype)`` computes, by calling it where nothing is known of it yet."""
    if init is jax.nn.initializers.zeros or init is jax.nn.initializers.ones:
        return Reading(Constant(np.dtype(dtype).type(init is jax.nn.initializers.ones)), None)
    if scaling.drawing_one(init) is not None:
        x64 = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
        return Reading(_read_cached(init, shape, np.dtype(dtype), x64, _memory.default_device()), None)
    return _read_anew(init, shape, dtype)


@functools.lru_cache(maxsize=1024)
def _read_cached(init: Callable[..., Any], shape: Shape, dtype: Any, x64: bool, device: Any) -> Drawn | Constant | None:
    """Read one of JAX's own initializers, which depend on nothing else."""
    scaled = _scaled(init, len(shape), dtype, x64, device)
    if scaled is None:
        return _read_one(init, shape, dtype) or _read_anew(init, shape, dtype).program
    try:
        factor = scaling.factor(init, shape, dtype)
    except Exception:  # whatever is wrong, calling it says it better
        return _read_anew(init, shape, dtype).program
    return Drawn(scaled.units, (*scaled.scalars[:-1], (factor,)))


@functools.lru_cache(maxsize=256)
def _scaled(init: Callable[..., Any], rank: int, dtype: Any, x64: bool, device: Any) -> Drawn | None:
    """Read an initializer of which at other shapes nothing differs but the last factor; None if it is no such one."""
    if device.platform != "cpu":  # which computes the factor otherwise than numpy
        return None
    found = []
    for size in (6, 35):
        shape = (size,) * rank
        made = _read_one(init, shape, dtype)
        if not isinstance(made, Drawn) or len(made.scalars[-1]) != 1:
            return None
        try:
            same = scaling.factor(init, shape, dtype).tobytes() == made.scalars[-1][0].tobytes()
        except (AttributeError, TypeError, ArithmeticError):  # it does more than is known here
            return None
        found.append(made if same else None)
    one, other = found
    return one if one and other and (one.units, one.scalars[:-1]) == (other.units, other.scalars[:-1]) else None


def _read_one(init: Callable[..., Any], shape: Shape, dtype: Any) -> Drawn | Constant | None:
    """Read what an initializer does to one element, with the scalars of the whole shape."""
    one = scaling.drawing_one(init)
    return None if one is None else _read_anew(one, shape, dtype, drawn_shape=(1,)).program


def _read_anew(init: Callable[..., Any], shape: Shape, dtype: Any, drawn_shape: Shape | None = None) -> Reading:
    result = shape if drawn_shape is None else drawn_shape
    try:
        key, out, operations = _compat.abstract.recorded(lambda key: init(key, shape, dtype), _compat.threefry_dtype())
        if np.shape(out) != result:
            return _NOTHING
        kind = type(out)
        is_other = issubclass(kind, np.ndarray) or _compat.dtype_of(out) != dtype
    except Exception:  # whatever is wrong, calling it says it better
        return _NOTHING
    run = Run(key, out, operations)
    if is_other:  # of another dtype than it was asked for, or of numpy: what it returned is the value
        return Reading(None, run)
    try:
        _require(_compat.is_tracer(out) and not out.aval.weak_type, "a result of another kind")
        return Reading(_read(key, out, operations, math.prod(result)), run)
    except NotElementwiseError:
        return Reading(None, run)


def cast(made: Drawn | Constant, dtype: Any) -> Drawn | Constant:
    """Add ``astype(dtype)``, from one float to another."""
    if isinstance(made, Constant):
        return Constant(made.value.astype(dtype))
    params = (("new_dtype", np.dtype(dtype)), ("sharding", None), ("weak_type", False))
    step = Step(lax.convert_element_type_p, params, (0,))
    unit = Unit((True,), (made.units[-1].dtype,), (step,), -1, np.dtype(dtype))
    return Drawn((*made.units, unit), (*made.scalars, ()))


# ---------------------------------------------------------------- reading


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise NotElementwiseError(what)


def _read(key: Any, out: Any, operations: Sequence[Any], size: int) -> Drawn | Constant:
    scalars: dict[int, Any] = {}  # values that are the same for every element, by id
    last: Any = None  # what the last unit gave
    units: list[Unit] = []
    taken: list[tuple[Any, ...]] = []
    for primitive, inputs, params, outputs in operations:
        _require(len(outputs) == 1, "several results")
        draws = any(x is key for x in inputs)
        known = [scalars.get(id(x)) if _compat.is_tracer(x) else np.asarray(x, _compat.dtype_of(x)) for x in inputs]
        if not draws and all(v is not None for v in known):
            scalars[id(outputs[0])] = _scalar(primitive, params, known, outputs[0].aval)
            continue
        _require(draws == (last is None), "two draws")
        for x, value in zip(inputs, known, strict=True):
            _require(x is key or value is not None or x is last, "a value that is not the last one")
        pairs = list(zip(inputs, known, strict=True))
        kinds = tuple([None if x is key else (v is None, np.dtype((x if v is None else v).dtype)) for x, v in pairs])
        unit = _unit(primitive, tuple(params.items()), kinds, outputs[0].aval, size)
        if unit is not None:
            units.append(unit)
            taken.append(tuple([value.reshape(())[()] for value in known if value is not None]))
        last = outputs[0]
    if last is not None:
        _require(out is last, "a result of its own")
        return Drawn(tuple(units), tuple(taken))
    return Constant(scalars[id(out)].reshape(())[()])


def _unit(
    primitive: Any, params: Any, kinds: tuple[tuple[bool, np.dtype[Any]] | None, ...], aval: Any, size: int
) -> Unit | None:
    """Return an operation as a unit, None if it changes nothing.

    Args:
        primitive: The operation.
        params: Names and values of its parameters.
        kinds: Of each input, whether it is drawn, and its dtype; None for the key.
        aval: Shape and dtype of the result.
        size: The number of elements that are drawn.
    """
    try:
        hash(params)
    except TypeError:
        return _new_unit(primitive, params, kinds, aval, size)
    return _cached_unit(primitive, params, kinds, aval, size)


def _new_unit(primitive: Any, params: Any, kinds: Any, aval: Any, size: int) -> Unit | None:
    builder = _UnitBuilder(size)
    inputs = [_KEY if kind is None else builder.add_input(*kind) for kind in kinds]
    made = builder.operation(primitive, dict(params), inputs, aval)
    _require(made.drawn and made.size == size and builder.draws == (None in kinds), "a result that is not drawn")
    return builder.unit(made) if builder.steps else None


_cached_unit = functools.lru_cache(maxsize=256)(_new_unit)


def _scalar(primitive: Any, params: Mapping[str, Any], inputs: Sequence[Any], aval: Any) -> Any:
    """Compute a scalar as one program on the CPU would: one exact operation, and conversions."""
    _require(primitive.name in UNCHANGED or aval.size == 1, "an operation on equal elements")
    if primitive.name in UNCHANGED:
        return inputs[0]
    if primitive.name in CALLS:
        return _scalar_call(params[CALLS[primitive.name]], inputs)
    if primitive.name == "convert_element_type":
        value = np.asarray(inputs[0]).astype(params["new_dtype"])
    else:
        _require(primitive.name in _EXACT and _is_float(aval.dtype), "an operation that is not exact")
        value = _computed(primitive, params, inputs).astype(aval.dtype)
    _require(not _is_float(value.dtype) or scaling.is_normal(value), "a number that XLA takes for zero")
    return value


def _computed(primitive: Any, params: Mapping[str, Any], inputs: Sequence[Any]) -> Any:
    device = _memory.default_device()
    if primitive.name in _FAST and device.platform != "cpu":
        with jax.default_device(device):
            return np.asarray(primitive.bind(*map(jnp.asarray, inputs), **params))
    with np.errstate(all="raise"):
        return np.asarray(_EXACT[primitive.name](*inputs))


def _scalar_call(closed: Any, inputs: Sequence[Any]) -> Any:
    jaxpr = closed.jaxpr
    _require(not jaxpr.constvars, "constants")
    _require(sum(e.primitive.name in _EXACT for e in jaxpr.eqns) <= 1, "operations that may be fused")
    env = dict(zip(jaxpr.invars, inputs, strict=True))
    for equation in jaxpr.eqns:
        _require(equation.primitive.name not in CALLS, "operations that may be fused")
        values = [np.asarray(v.val, v.aval.dtype) if hasattr(v, "val") else env[v] for v in equation.invars]
        env[equation.outvars[0]] = _scalar(equation.primitive, equation.params, values, equation.outvars[0].aval)
    return env[jaxpr.outvars[0]]


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.floating)


class _Value(NamedTuple):
    """A result within a unit: its number or literal, whether it depends on the draw, and its size; or the key."""

    atom: int | Literal | None
    drawn: bool
    size: int
    dtype: Any


_KEY = _Value(None, False, 1, None)


class _UnitBuilder:
    """Flattens one program into steps."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.inputs: list[tuple[bool, np.dtype[Any]]] = []
        self.steps: list[Step] = []
        self.draws = False

    def add_input(self, drawn: bool, dtype: np.dtype[Any]) -> _Value:
        """Add an input, what the unit before gave or a scalar."""
        self.inputs.append((drawn, dtype))
        return _Value(len(self.inputs) - 1, drawn, self.size if drawn else 1, dtype)

    def unit(self, made: _Value) -> Unit:
        """Return what was built."""
        assert isinstance(made.atom, int)
        drawn = tuple(d for d, _ in self.inputs)
        return Unit(drawn, tuple(t for _, t in self.inputs), tuple(self.steps), made.atom, np.dtype(made.dtype))

    def operation(self, primitive: Any, params: Mapping[str, Any], inputs: Sequence[_Value], aval: Any) -> _Value:
        """Add an operation, or those of the program that it calls."""
        name = primitive.name
        if name in CALLS:
            return self._call(params[CALLS[name]], inputs)
        if name == "random_bits":
            _require(inputs[0] is _KEY and not self.draws and aval.size == self.size, "another draw")
            self.draws = True
            return self._step(primitive, {"bit_width": params["bit_width"]}, (), True, aval)
        _require(all(v is not _KEY for v in inputs), "a use of the key")
        drawn = any(v.drawn for v in inputs)
        if name in UNCHANGED:
            _require(len(inputs) == 1 and (not drawn or aval.size == self.size), "another size")
            _require(name != "reshape" or params.get("dimensions") is None, "a transposition")
            return inputs[0]._replace(size=aval.size)
        _require(name in ELEMENTWISE, name)
        _require(aval.size == (self.size if drawn else 1), "an operation on equal elements")
        return self._step(primitive, params, [v.atom for v in inputs], drawn, aval)

    def _step(self, primitive: Any, params: Mapping[str, Any], inputs: Sequence[Any], drawn: bool, aval: Any) -> _Value:
        _require(params.get("sharding") is None, "a sharding")
        self.steps.append(Step(primitive, tuple(sorted(params.items())), tuple(inputs)))
        return _Value(-len(self.steps), drawn, aval.size, aval.dtype)

    def _call(self, closed: Any, inputs: Sequence[_Value]) -> _Value:
        jaxpr = closed.jaxpr
        _require(len(jaxpr.outvars) == 1 and not jaxpr.effects, "several results")
        env: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for v, constant in zip(jaxpr.constvars, closed.consts, strict=True):
            env[v] = _literal(constant, v.aval)

        def value(v: Any) -> _Value:
            return _literal(v.val, v.aval) if hasattr(v, "val") else env[v]

        for equation in jaxpr.eqns:
            _require(len(equation.outvars) == 1, "several results")
            out = equation.outvars[0]
            env[out] = self.operation(equation.primitive, equation.params, list(map(value, equation.invars)), out.aval)
        return value(jaxpr.outvars[0])


def _literal(value: Any, aval: Any) -> _Value:
    return _Value(Literal.of(value, aval.dtype), False, aval.size, aval.dtype)
