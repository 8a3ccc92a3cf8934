"""``lazy(cls, infer=...)``: a lazy twin of any nnx.Module class.

The twin's constructor binds the arguments, reads the class's own constructor (see ``config``), and gives the
object placeholders. At the first call ``infer`` tells the missing arguments, and the object becomes what
``cls(...)`` would have made of them, with the same rngs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from flax import nnx

from lazymods import _compat
from lazymods._errors import (
    NOT_TRACEABLE,
    ConfigurationError,
    LazyError,
    Problem,
    ShapeInferenceError,
    check_pickles,
    describe,
)
from lazymods._graph import STATE
from lazymods._initial import draws
from lazymods._initial.keys import is_key
from lazymods._layer import contexts, first_call, sizing, wrong_arguments
from lazymods._layer.abstract_module import AbstractModule
from lazymods._layer.arguments import Ignored, UnhashableError, constructor_parameters, exact, freeze, variadic
from lazymods._layer.building import LayerBuilder, LazyState, placeholder_shapes
from lazymods._layer.config import REFUSALS, LayerConfig, context
from lazymods._layer.mixin import LazyModuleMixin
from lazymods._layer.sizing import Infer, LazyClassSpec
from lazymods._refusals import refuse_class, wrong_argument


class _Inferred:
    """Shown in a signature in place of a default."""

    def __repr__(self) -> str:
        return "<inferred>"


INFERRED = _Inferred()


M = TypeVar("M", bound=nnx.Module)

if TYPE_CHECKING:

    class LazyClass(type, Generic[M]):
        """What ``lazy`` returns, for type checkers: a class of ``M``s, all of whose arguments go by keyword."""

        cls_to_become: type[M]

        def __call__(self, **arguments: Any) -> M: ...  # noqa: N804  self is the class

else:
    LazyClass = type


def lazy(cls: type[M], *, infer: Infer) -> LazyClass[M]:
    """Make a lazy twin of an nnx.Module class.

    Args:
        cls: Any nnx.Module class whose constructor can be traced: it may draw from ``rngs``, but not decide on
            values.
        infer: ``infer(config, *args, **kwargs)`` gets the constructor's bound arguments, defaults included, as a
            read-only mapping, and the first call's arguments, with a ``jax.ShapeDtypeStruct`` for every array. It
            returns a dict of the required constructor arguments that were not given, each an int or a tuple of ints,
            or None where the class takes that: ``{"in_features": x.shape[-1], "cond_features": None}``. An argument
            that has a default may be among them, and wins over that. A load wins over it in the same way. So what
            follows from a default counts as unknown until then. What the caller gave stays, whatever ``infer`` says.

    Returns:
        A class. Its constructor takes the arguments of ``cls`` by keyword, without those that are to be inferred.

    Raises:
        ConfigurationError: If ``infer`` does not take what the class's ``__call__`` requires.
        ArgumentError: If ``cls`` is no nnx.Module class or ``infer`` is not callable.

    Example:
        >>> import jax.numpy as jnp, lazymods as lm
        >>> from flax import nnx
        >>> LazyDense = lm.lazy(nnx.Linear, infer=lambda config, x: {"in_features": x.shape[-1]})
        >>> layer = LazyDense(out_features=5, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3))).shape, layer.kernel.shape
        ((2, 5), (3, 5))
    """
    try:
        if not (isinstance(cls, type) and issubclass(cls, nnx.Module)):
            raise wrong_argument("lm.lazy", cls, "lazy takes an nnx.Module class", "lm.lazy(MyLayer, infer=infer)")
        if not callable(infer):
            needed = "infer is a function infer(config, *args, **kwargs)"
            write = 'infer=lambda config, x: {"in_features": x.shape[-1]}'
            raise wrong_argument("lm.lazy(..., infer=...)", infer, needed, write)
        wrong_arguments.check_infer(cls, infer)
        module = sys._getframe(1).f_globals.get("__name__", __name__)  # noqa: SLF001  as collections.namedtuple does
        return make(LazyClassSpec(cls, infer), name=f"Lazy{cls.__name__}", module=module)
    except Exception as error:
        _compat.hide_frames(error)
        raise


def make(plan: LazyClassSpec, *, name: str, module: str, doc: str | None = None) -> Any:
    """Make the lazy class of a plan (the built-in layers are made with this)."""
    signature, rngs_name = _signature(plan)
    default_rngs = signature.parameters[rngs_name].default if rngs_name else None
    twin = _Twin(plan, signature, rngs_name, default_rngs)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        try:
            _construct(self, twin, args, kwargs)
        except Exception as error:
            _compat.hide_frames(error)
            raise

    def initialize_parameters(self: Any, *args: Any, **kwargs: Any) -> AbstractModule:
        """Infer the sizes from the arguments of the first call and initialize every parameter."""
        if not first_call.LOCAL.initializing and first_call.LOCAL.session is None:  # called by hand
            contexts.is_carried(self)  # or refused, where the parameters would be lost
        return sizing.initialize_parameters(self, plan, args, kwargs)

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    namespace = {
        "__module__": module,
        "__qualname__": name,
        "__doc__": doc or _doc(plan),
        "__init__": __init__,
        "__signature__": _ClassSignature(signature),
        "__reduce_ex__": _reduce,
        "initialize_parameters": initialize_parameters,
        "cls_to_become": plan.cls,
        "_lazymods_infer": lambda self, args, kwargs: sizing.infer_values(self, plan, args, kwargs),
        "_lazymods_plan": plan,
    }
    namespace |= _compat.check_without(plan.cls, LazyState.spares)
    for entry in plan.entries:
        namespace[entry] = _entry(plan, entry)
    return _compat.put_in_front(LazyModuleMixin, plan.cls, name, namespace)


class _ClassSignature:
    """The constructor's signature, for the class only: an instance's is that of its ``__call__``."""

    def __init__(self, signature: inspect.Signature) -> None:
        self.signature = signature

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        return self.signature


def _doc(plan: LazyClassSpec) -> str:
    return (
        f"{plan.cls.__name__} whose missing arguments are inferred from its first call.\n\n"
        f"Becomes {plan.cls.__module__}.{plan.cls.__qualname__}, made by lazymods.lazy."
    )


# ---------------------------------------------------------------- signature


def _signature(plan: LazyClassSpec) -> tuple[inspect.Signature, str | None]:
    """The lazy class's signature: required arguments first, options by keyword, rngs last."""
    parameters = constructor_parameters(plan.cls)
    behind = variadic(plan.cls).keyword if plan.decides else None
    if behind and "rngs" not in parameters:  # they are handed on through it, if at all
        parameters = {**parameters, "rngs": inspect.Parameter("rngs", inspect.Parameter.KEYWORD_ONLY, default=None)}
    rngs_name = "rngs" if "rngs" in parameters else None
    positional, keyword = [], []
    for name, p in parameters.items():
        if name == rngs_name or name in (plan.inferred or ()):
            continue
        if name in plan.optional:
            positional.append(p.replace(default=None))
            continue
        required = p.default is p.empty
        if required and plan.inferred is None:
            p = p.replace(kind=p.KEYWORD_ONLY, default=INFERRED)
        elif not required or p.kind is p.KEYWORD_ONLY:
            p = p.replace(kind=p.KEYWORD_ONLY)
        (keyword if p.kind is p.KEYWORD_ONLY else positional).append(p)
    for name, default in plan.options.items():
        keyword.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default))
    if rngs_name is not None:
        keyword.append(parameters[rngs_name].replace(kind=inspect.Parameter.KEYWORD_ONLY))
    if behind:
        keyword.append(inspect.Parameter(behind, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature([*positional, *keyword]), rngs_name


# ---------------------------------------------------------------- constructing


@dataclasses.dataclass(frozen=True, eq=False)
class _Twin:
    """A lazy class: its plan, its constructor's signature, which argument takes the rngs, and that one's default."""

    plan: LazyClassSpec
    signature: inspect.Signature
    rngs_name: str | None
    default_rngs: Any

    @functools.cached_property
    def remembers(self) -> bool:
        """Whether layers that are given the same arguments are configured alike, and without arrays."""
        try:
            freeze([p.default for p in self.signature.parameters.values()])
        except UnhashableError:
            return False
        return True


def _construct(layer: Any, twin: _Twin, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = type(layer).__name__
    given = dict(kwargs)
    rngs = given.pop(twin.rngs_name or "", twin.default_rngs)
    streams, modules = _streams(rngs), {}
    described = None if streams is None else tuple([(s.name, s.key.dtype, s.stream.tag) for s in streams])
    key = None if described is None else _key(name, twin, args, given, described)
    if key is None:
        layer_builder, modules = _layer_builder(name, twin, args, kwargs, described)
    else:
        layer_builder, _ = _remembered_mould(key, rngs is None, Ignored((name, twin, args, given, kwargs, described)))
    streams = streams or []
    kept = {**modules, "rngs": rngs}
    for s in streams:
        kept |= {f"rngs.{s.name}": s.stream, f"rngs.{s.name}.key": s.stream.key, f"rngs.{s.name}.count": s.stream.count}
    keys = [array for s in streams for array in (s.key, s.count)]
    checked = "_lazymods_plan" in vars(type(layer)) and _compat.is_pytree(type(layer))
    by_name = {s.name: s.stream for s in streams}
    turns = draws.take_turns(by_name, layer_builder.draws if twin.plan.decides else None)
    layer_builder.build(layer, keys, kept, checked=checked, turns=turns)
    for name, stream, _, count in streams:
        if name in layer_builder.draws:
            stream.count.set_raw_value(_compat.counted(count, layer_builder.draws[name]))
    draws.have_drawn(turns, by_name)


def _key(name: str, twin: _Twin, args: Any, given: Mapping[str, Any], described: Streams) -> Any:
    """All that a layer's configuration follows from, None if it cannot be a key; without it, each is bound anew."""
    if not twin.remembers:
        return None
    try:
        arguments = tuple(map(exact, args)), tuple([(k, exact(v)) for k, v in given.items()])
    except UnhashableError:
        return None
    return twin, name, arguments, described, context()


@functools.lru_cache(maxsize=1024)
def _remembered_mould(key: Any, without_rngs: bool, asked: Ignored) -> tuple[LayerBuilder, Any]:
    name, twin, args, given, kwargs, described = asked.value
    asked.value = None  # the cache keeps what it was asked with, but must not keep the rngs
    # kept alive: the key has their identities
    return _layer_builder(name, twin, args, kwargs, described)[0], (args, given)


def _layer_builder(
    name: str, twin: _Twin, args: Any, kwargs: Any, described: Streams | None
) -> tuple[LayerBuilder, dict[str, Any]]:
    """Configure a layer: its layer builder, and those of its arguments that are modules."""
    plan, signature = twin.plan, twin.signature
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise wrong_arguments.refusal(name, plan.cls, signature, args, kwargs, error) from error
    given = set(bound.arguments)
    bound.apply_defaults()
    _check_defaults(name)
    config = _configured(plan, bound.arguments, given)
    wrong_arguments.check_initializers(name, config)
    if plan.wraps is not None:
        refuse_class(config[plan.wraps])
    if plan.prepare is not None:
        config = plan.prepare(config)
    rngs = config.pop(twin.rngs_name, None) if twin.rngs_name else None
    if described is None:
        raise _no_rngs(name, rngs)
    structures = _structures(plan, config, given)
    modules = {k: v for k, v in config.items() if nnx.Module in type(v).__mro__}
    takes_rngs = twin.rngs_name if rngs is not None else None
    plain = {k: v for k, v in config.items() if k not in modules}
    has_default = [n for n, p in signature.parameters.items() if p.default is not p.empty and p.default is not INFERRED]
    optional = [n for n in has_default if n not in given and n not in modules and n != twin.rngs_name]

    def specify(unknown: dict[str, Any], guesses: tuple[dict[str, Any], ...]) -> LayerConfig:
        options = tuple(plan.options)
        rest = (described, takes_rngs, tuple(modules), guesses)
        left_out = tuple([n for n in optional if n not in unknown])
        return LayerConfig(
            name, plan.cls, plain, unknown, options, *rest, plan.scales, left_out if plan.decides else ()
        )

    spec, formulas = _first_that_reads(plan, specify, structures, modules)
    shapes = placeholder_shapes(spec, formulas, modules)
    spec.keep()
    return LayerBuilder(spec, formulas, shapes), modules


def _configured(plan: LazyClassSpec, arguments: Mapping[str, Any], given: set[str]) -> dict[str, Any]:
    """What a layer's class gets: what was given, and its own defaults.

    A default of a base class is not handed to ``**kwargs``, for the class may give that argument to its base itself.
    """
    config = {k: v for k, v in arguments.items() if v is not INFERRED}
    if not plan.decides:
        return config
    behind = variadic(plan.cls)
    more = config.pop(behind.keyword, {}) if behind.keyword else {}
    return {k: v for k, v in config.items() if k in given or k not in behind.behind} | more


def _check_defaults(name: str) -> None:
    """Refuse kinds of Variables that have no placeholder."""
    defaults = nnx.var_defaults()
    for kind, on in (("ref", defaults.ref), ("hijax", defaults.hijax)):
        if on:
            needed = "ordinary Variables: a placeholder is none of that kind"
            write = f"with nnx.var_defaults({kind}=False): {name}(...)"
            raise ConfigurationError(Problem(name, f"nnx.var_defaults({kind}=True)", needed, write))


class _Stream(NamedTuple):
    """A stream of rngs, with its key and counter as they are before the layer draws from it."""

    name: str
    stream: nnx.RngStream
    key: Any
    count: Any


def _streams(rngs: Any) -> list[_Stream] | None:
    """The streams of rngs; None if those are not what a layer can take."""
    if rngs is None:
        return []
    if isinstance(rngs, nnx.RngStream):
        named: Any = [("", rngs)]
    elif isinstance(rngs, nnx.Rngs):
        named = rngs.items()
    else:
        return None
    streams = [_Stream(n, s, _compat.value_of(s.key), _compat.value_of(s.count)) for n, s in named]
    return None if any([s.key.shape != () for s in streams]) else streams


def _no_rngs(name: str, rngs: Any) -> LazyError:
    got = "streams of several keys" if isinstance(rngs, (nnx.Rngs, nnx.RngStream)) else describe(rngs)
    needed, line = "an nnx.Rngs with one key a stream", f"{name}(..., rngs=nnx.Rngs(0))"
    if not isinstance(rngs, nnx.Pytree) and is_key(rngs):
        line = f"{name}(..., rngs=nnx.Rngs(key))"
    return ConfigurationError(Problem(name, f"rngs={got}", needed, line))


Streams = tuple[tuple[str, Any, str], ...]  # name, key dtype and tag of each


def _structures(plan: LazyClassSpec, config: Mapping[str, Any], given: set[str]) -> list[dict[str, Any]]:
    """What may be unknown: an int for each missing argument, unless the plan knows better.

    Of those behind ``**kwargs``, and of ``*dims``, only the constructor tells which have to be given: it is asked with
    as few as it reads with.
    """
    if plan.structure is not None:
        return [plan.structure(MappingProxyType(dict(config)))]
    if plan.inferred is not None:
        return [{n: None for n in plan.inferred if n not in config}]
    parameters, (dims, _, behind) = constructor_parameters(plan.cls), variadic(plan.cls)
    required = [n for n, p in parameters.items() if p.default is p.empty and n != "rngs" and n not in config]
    perhaps = [n for n in required if n in behind] + ([dims] if dims and dims not in given else [])
    sure = {n: None for n in required if n not in behind}
    several = (itertools.combinations(perhaps, k) for k in range(len(perhaps) + 1))
    return [sure | dict.fromkeys(names) for names in itertools.islice(itertools.chain(*several), 64)]


_SHAPES = (None, (None,), (None,) * 2, (None,) * 3, (None,) * 4)


def _first_that_reads(
    plan: LazyClassSpec, specify: Any, structures: list[dict[str, Any]], modules: dict[str, Any]
) -> Any:
    """Read the constructor; if it takes no ints for what is missing, try tuples of them."""
    guesses = [(structure, ()) for structure in structures]
    for structure in structures if plan.decides else ():
        combinations = itertools.islice(itertools.product(_SHAPES, repeat=len(structure)), 1, 125)
        tuples = [dict(zip(structure, c, strict=True)) for c in combinations]
        guesses += [(guess, tuple(tuples[i + 1 :])) for i, guess in enumerate(tuples)]
    errors: list[Exception] = []
    for guess, others in guesses:
        spec = specify(guess, others)
        try:
            return spec, spec.probe(modules) if modules else spec.formulas
        except ConfigurationError:
            raise
        except REFUSALS as e:
            errors.append(e)
    of_ints = errors[: len(structures)]  # a TypeError may tell of arguments that the class does not take so
    error = next((e for e in of_ints if not isinstance(e, TypeError)), of_ints[0])
    raise _unreadable(plan.cls, error) from error


def _unreadable(cls: type, error: Exception) -> LazyError:
    """Make the error for a constructor that cannot be read at any size."""
    name, reason = f"Lazy{cls.__name__}", str(error).strip().partition("\n")[0]
    by_hand = f"class {name}(lm.LazyModuleMixin, {cls.__name__}): ...  # with an initialize_parameters of its own"
    if isinstance(error, NOT_TRACEABLE):
        got = f"a constructor that decides on the values of arrays ({reason})"
        needed = "a constructor that can be read without values: it is traced to learn its parameters"
        return ConfigurationError(Problem(name, got, needed, by_hand))
    got = f"{cls.__name__} refuses its arguments at every size that was tried: {type(error).__name__}: {reason}"
    kind = ConfigurationError if isinstance(error, TypeError) else ShapeInferenceError
    is_flax = cls.__module__.partition(".")[0] == "flax"  # whose constructors can be read
    line = f"lm.{name}(...)  # with arguments that nnx.{cls.__name__} takes" if is_flax else by_hand
    return kind(Problem(name, got, "arguments that the class takes for some size", line))


# ---------------------------------------------------------------- methods that may be called first


def _entry(plan: LazyClassSpec, name: str) -> Any:
    """Make a method that initializes the layer if it is the first to be called."""
    inherited = getattr(plan.cls, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if STATE in vars(self):
                config = MappingProxyType(vars(self)[STATE].spec.config)
                call_args, call_kwargs = plan.entries[name](config, *args, **kwargs)
                with first_call.initialized(self, call_args, call_kwargs):
                    return inherited(self, *args, **kwargs)
            return inherited(self, *args, **kwargs)
        except Exception as error:
            _compat.hide_frames(error)
            raise

    method.__name__, method.__qualname__, method.__doc__ = name, f"{plan.cls.__name__}.{name}", inherited.__doc__
    return method


# ---------------------------------------------------------------- pickling


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle by the lazy class if it can be imported, else by the class and ``infer`` that it was made of."""
    cls = type(self)
    if "_lazymods_plan" not in vars(cls) or _found_in_module(cls):
        return object.__reduce_ex__(self, protocol)
    plan: LazyClassSpec = cls._lazymods_plan
    needed = "an infer that pickles: the class itself cannot be imported, so it is stored with its infer"
    write = f"{cls.__name__} = lm.lazy({plan.cls.__name__}, infer=infer)  # at the top of a module"
    check_pickles("infer", plan.infer, lambda: cls.__name__, needed, write)
    return _restore, (plan.cls, plan.infer, cls.__name__, cls.__module__), self.__getstate__()


def _found_in_module(cls: type) -> bool:
    """Give a class the name under which its module holds it; say whether it does."""
    namespace = vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
    if namespace.get(cls.__name__) is cls:
        return True
    for name, value in namespace.items():
        if value is cls:
            cls.__name__ = cls.__qualname__ = name
            return True
    return False


def _restore(cls: type, infer: Infer, name: str, module: str) -> Any:
    return object.__new__(_remade(cls, infer, name, module))


@functools.cache
def _remade(cls: type, infer: Infer, name: str, module: str) -> Any:
    return make(LazyClassSpec(cls, infer), name=name, module=module)
