"""The only place that touches private names of jax and flax.

Each function names what it reaches for and the versions in which that was seen to work:
jax 0.10.2, 0.11.2, 0.12.0 and flax 0.12.8, 0.12.10, 0.12.12, unless it says otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.nnx import graphlib
from flax.nnx.transforms import iteration
from flax.typing import HashableMapping
from jax._src import config, core
from jax._src import mesh as mesh_lib
from jax._src.interpreters import pxla

STATE = "_pytree__state"  # flax: the trace in which an object was born
NODES = "_pytree__nodes"  # flax: which attributes are data


# ---------------------------------------------------------------- traces (jax)


def current_trace() -> Any:
    """Return the trace that operations now go to (``jax._src.core.trace_ctx``)."""
    return core.trace_ctx.trace


def eval_trace() -> Any:
    """Return the trace that executes operations (``jax._src.core.eval_trace``)."""
    return core.eval_trace


def at_trace(trace: Any) -> contextlib.AbstractContextManager[Any]:
    """Send operations to ``trace`` (``jax._src.core.set_current_trace``, ``trace_ctx.set_axis_env``).

    At the executing trace there are no named axes and no manual mesh axes (as inside ``shard_map``, which
    ``jax.ensure_compile_time_eval`` does not leave): what is made there is whole.
    """
    if trace is not core.eval_trace:
        return _HERE if core.trace_ctx.trace is trace else core.set_current_trace(trace)
    manual = bool(mesh_lib.get_abstract_mesh().manual_axes)
    here = core.trace_ctx.trace is trace and core.trace_ctx.axis_env is core.top_axis_env and not manual
    return _HERE if here else _executing(manual)


_HERE = contextlib.nullcontext()


@contextlib.contextmanager
def _executing(manual: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if manual:
            stack.enter_context(mesh_lib.use_abstract_mesh(mesh_lib.empty_abstract_mesh))
        stack.callback(core.trace_ctx.set_axis_env, core.trace_ctx.axis_env)
        core.trace_ctx.set_axis_env(core.top_axis_env)
        stack.enter_context(core.set_current_trace(core.eval_trace))
        yield


def birth_trace(node: Any) -> Any:
    """Return the trace in which an nnx object or Variable was born, or None if that trace has ended.

    Reads flax's ``TraceState._jax_trace`` and jax's ``OpaqueTraceState._trace_ref``, a weak reference.
    """
    state = node._trace_state if issubclass(type(node), nnx.Variable) else getattr(node, STATE).trace_state
    return state.jax_trace._trace_ref()


def home_trace(node: Any) -> Any:
    """Return the trace in which an nnx object or Variable was born, or the current one if that has ended."""
    return birth_trace(node) or current_trace()


def put(aval: Any, sharding: Any, array: np.ndarray[Any, Any]) -> jax.Array:
    """Return an array of numpy, of type ``aval``, on the one device of a sharding, uncommitted, as ``jax.jit`` does.

    Calls ``jax._src.interpreters.pxla.batched_device_put``.
    """
    return pxla.batched_device_put(aval, sharding, [array], sharding._device_assignment, committed=False)


def device_put(arrays: Sequence[np.ndarray[Any, Any]], device: Any) -> list[jax.Array]:
    """Return ``jax.device_put(array)`` of each, uncommitted, for a fifth of the price of the public function.

    Calls :func:`put` when operations are executed; in a trace, the public function. The dtypes must be ones that JAX
    has arrays of.
    """
    if core.trace_ctx.trace is not core.eval_trace:
        return jax.device_put(list(arrays))
    sharding = jax.sharding.SingleDeviceSharding(device)
    avals: dict[Any, Any] = {}
    out = []
    for array in arrays:
        kind = (array.shape, array.dtype)
        if kind not in avals:
            avals[kind] = core.ShapedArray(array.shape, array.dtype)
        out.append(put(avals[kind], sharding, array))
    return out


def bind_equation(equation: Any, inputs: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    """Run one equation of a jaxpr in the current trace (``JaxprEqn.ctx``, ``Primitive.get_bind_params``)."""
    with equation.ctx.manager:
        out = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(params))
    return out if equation.primitive.multiple_results else [out]


def plain_device() -> Any:
    """Return where operations are executed at once, uncommitted; None in a trace, in a mesh, or if one was chosen.

    Reads ``jax.config.jax_default_device`` and ``jax._src.mesh.get_abstract_mesh``.
    """
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    return jax.local_devices()[0] if executing() and default is None else None


def counted(count: Any, draws: int) -> Any:
    """Return ``count + draws`` for the counter of a random stream, made on the host where that is the same.

    A fresh process would compile the addition, for longer than a hundred layers take. It is the same for an array
    that is bound to no device, if programs run where it is.
    """
    array = isinstance(count, jax.Array) and not isinstance(count, core.Tracer)
    device = plain_device()
    if array and device and not count.committed and count.dtype == np.uint32 and not (count.shape or count.weak_type):
        if count.devices() == {device}:
            value = np.array((int(np.asarray(count)) + draws) % 2**32, np.uint32)
            return put(count.aval, count.sharding, value)
    return count + np.uint32(draws)


# ---------------------------------------------------------------- nnx transforms (flax)


def carrying_transforms(node: Any) -> list[Any]:
    """Return the tags of the nnx transforms that will carry changes of ``node`` to the object outside.

    Reads ``graphlib.GRAPH_CONTEXT.update_context_stacks`` and each context's ``inner_ref_outer_index``.
    """
    tags = []
    for tag, stack in graphlib.GRAPH_CONTEXT.update_context_stacks.items():
        if any(c.inner_ref_outer_index is not None and node in c.inner_ref_outer_index for c in stack):
            tags.append(tag)
    return tags


def fixed_structure(node: Any) -> str | None:
    """Name a running nnx transform that has ``node`` as an argument and whose arguments must keep their structure.

    Those are nnx.custom_vjp (context tags ``custom_vjp_...``) and nnx.cached_partial (contexts with a static cache).
    """
    for tag, stack in graphlib.GRAPH_CONTEXT.update_context_stacks.items():
        holding = [c for c in stack if c.inner_ref_outer_index is not None and node in c.inner_ref_outer_index]
        if holding and isinstance(tag, str) and tag.startswith("custom_vjp_"):
            return "nnx.custom_vjp"
        if any(c.static_cache for c in holding):
            return "nnx.cached_partial"
    return None


def transforms_running() -> bool:
    """Whether any nnx transform is running that carries changes (``GRAPH_CONTEXT.update_context_stacks``)."""
    return bool(graphlib.GRAPH_CONTEXT.update_context_stacks)


def asked_for_gradient() -> bool:
    """Whether ``jax.grad`` or ``jax.value_and_grad`` is looking at what it is to differentiate by, in a caller.

    Looks for the frame of ``value_and_grad_f`` in ``jax._src.api``, which checks the dtype of each of the leaves. Where
    it is not found, JAX's own error says that keys can't be differentiated by. (jax 0.10.2 and 0.12.0)
    """
    asked = sys._getframe(2)
    asking = asked.f_back
    return (
        asking is not None
        and asked.f_code.co_name == "tree_leaves"
        and asking.f_code.co_name == "value_and_grad_f"
        and asking.f_globals.get("__name__") == "jax._src.api"
    )


def mapping_axes(node: Any) -> list[Any]:
    """Return the axes over which the running nnx.vmap and nnx.pmap calls map the arguments that hold ``node``.

    Looks for the frames of ``iteration.VmapFn.__call__`` and ``PmapFn.__call__``; reads ``self.in_axes``, ``args``.
    """
    codes = {iteration.VmapFn.__call__.__code__, iteration.PmapFn.__call__.__code__}
    found = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes and "args" in frame.f_locals:
            axes, args = frame.f_locals["self"].in_axes, frame.f_locals["args"]
            each = axes if isinstance(axes, (tuple, list)) else (axes,) * len(args)
            for axis, arg in zip(each, args, strict=True):
                if any(n is node for _, n in nnx.iter_graph(arg)):
                    found += list(axis.axes) if isinstance(axis, nnx.StateAxes) else jax.tree.leaves(axis)
        frame = frame.f_back
    return [axis for axis in found if axis is not None]


# ---------------------------------------------------------------- Variables (flax)


def new_variable(cls: type[nnx.Variable[Any]], raw: Any, metadata: dict[str, Any]) -> Any:
    """Make a Variable without running its constructor (``Variable._new``)."""
    return cls._new(raw, metadata)


def value_of(variable: nnx.Variable[Any]) -> Any:
    """Return ``variable.get_value()``, without the copy if it is an array that no hook changes (``_raw_value``)."""
    ordinary = type(variable).get_value is nnx.Variable.get_value and "on_get_value" not in variable._var_metadata
    if ordinary and isinstance(variable._raw_value, jax.Array) and not isinstance(variable._raw_value, jax.Ref):
        return variable._raw_value
    return variable.get_value()


def raw_metadata(variable: nnx.Variable[Any]) -> dict[str, Any]:
    """Return a Variable's own metadata dict (``Variable._var_metadata``)."""
    return variable._var_metadata


def write_variable(variable: Any, cls: type, raw: Any, metadata: dict[str, Any]) -> None:
    """Set class, value and metadata of a Variable, from whatever trace is current (slots of ``Variable``)."""
    object.__setattr__(variable, "_raw_value", raw)
    object.__setattr__(variable, "_var_metadata", metadata)
    object.__setattr__(variable, "__class__", cls)


NOT_GIVEN: Any = 0  # for nnx.use_eager_sharding: as False, and tells what a Variable was not given from False


def default_metadata() -> dict[str, Any]:
    """Return the metadata that flax gives every Variable made now (``Variable.required_metadata``)."""
    defaults = nnx.var_defaults()
    return {"hijax": defaults.hijax, "ref": defaults.ref, "eager_sharding": nnx.using_eager_sharding()}


# ---------------------------------------------------------------- objects (flax)


def data_names(node: Any) -> dict[str, bool]:
    """Return which attributes of an nnx object are data (``Pytree._pytree__nodes``)."""
    return dict(getattr(node, NODES))


def declared_names(cls: type) -> set[str]:
    """Return the attributes of which an nnx class says itself whether they are data (``Pytree._pytree__nodes``)."""
    return set(getattr(cls, NODES))


def set_data_names(node: Any, names: dict[str, bool]) -> None:
    """Say which attributes of an nnx object are data; one mapping is shared while it is unchanged."""
    if dict(getattr(node, NODES, {})) != names or NODES not in vars(node):
        object.__setattr__(node, NODES, HashableMapping(names, copy=False))


def forget_data_name(node: Any, name: str) -> None:
    """Say nothing any more of whether an attribute of an nnx object is data."""
    if name in getattr(node, NODES):
        set_data_names(node, {k: v for k, v in data_names(node).items() if k != name})


def share_data_names(node: Any, names: HashableMapping[str, bool]) -> None:
    """Say which attributes of an nnx object are data, by a mapping that others share: it is never changed."""
    object.__setattr__(node, NODES, names)


def mapping_of_names(names: dict[str, bool]) -> HashableMapping[str, bool]:
    """Return what :func:`share_data_names` takes."""
    return HashableMapping(names, copy=False)


def new_object(cls: type, data: Mapping[str, Any] | None = None, static: Mapping[str, Any] | None = None) -> Any:
    """Make an nnx object without running its constructor, as ``nnx.Pytree``'s metaclass begins to.

    Args:
        cls: Its class.
        data: Attributes that are data.
        static: Attributes that are not.
    """
    node = object.__new__(cls)
    object.__setattr__(node, STATE, nnx.pytreelib.PytreeState())
    object.__setattr__(node, NODES, getattr(cls, NODES))
    if data is not None and static is not None:
        vars(node).update(static, **data)
        set_data_names(node, data_names(node) | dict.fromkeys(static, False) | dict.fromkeys(data, True))
    return node


def check_without(cls: type, spared: Callable[[Any, str], bool]) -> dict[str, Any]:
    """Return methods for a subclass of ``cls`` that spare some attributes of a new object flax's check of each.

    Flax searches every value for arrays, which takes longer than to make the object. Overrides ``_check_value`` of
    ``nnx.Pytree``; ``check_pytree``, which runs when a constructor returns, calls it without a ``new_status``.
    """

    def check_value(self: Any, key: str, value: Any, new_status: Any) -> None:
        if new_status is not None or not spared(self, key):
            cls._check_value(self, key, value, new_status)  # type: ignore[attr-defined]

    return {"_check_value": check_value}


def set_class(node: Any, cls: type) -> None:
    """Change an object's class so that its GraphDef equals that of an object constructed as ``cls``."""
    object.__setattr__(node, "__class__", cls)


def set_attributes(node: Any, attributes: dict[str, Any]) -> None:
    """Give an object all its attributes at once: other threads see the old ones or the new ones, whole."""
    object.__setattr__(node, "__dict__", dict(attributes))


def put_in_front(front: type, cls: type, name: str, namespace: dict[str, Any]) -> Any:
    """Make a class as if its bases were ``(front, cls)`` whose instances can become ``cls``, whatever bases that has.

    Python lets an object change between classes of one layout, and takes the layout from the first base. So that is
    ``cls`` here, and the order in which methods are found is given by a metaclass. ``front`` has ``nnx.Module`` as its
    only base, and ``cls`` is one.
    """

    def mro(self: type) -> list[type]:
        return [self, front, *cls.__mro__] if self.__bases__ == (cls, front) else type.mro(self)

    return _make_class(cls, name, (cls, front), namespace, mro)


def laid_out_as(target: type, cls: type) -> Any:
    """Return a subclass of ``cls`` whose instances can become ``target``, a base of it; ``cls`` itself if they can.

    They can't if ``target`` has a base in front of ``nnx.Module``, as ``class Lazy(LazyModuleMixin, Target)`` has its
    layout of ``LazyModuleMixin``: see :func:`put_in_front`.
    """
    if _LAID_OUT not in vars(cls):
        setattr(cls, _LAID_OUT, cls if _can_become(cls, target) else _laid_out(target, cls))
    return vars(cls)[_LAID_OUT]


_LAID_OUT = "_lazymods__laid_out"


def _can_become(cls: type, target: type) -> bool:
    try:
        made = object.__new__(cls)
    except TypeError:  # an abstract class: whoever makes an object of it is told
        return True
    try:
        set_class(made, target)
    except TypeError:
        return not issubclass(cls, target)  # it says so when the time comes
    return True


def _laid_out(target: type, cls: type) -> Any:
    def mro(self: type) -> list[type]:
        return [self, *cls.__mro__] if self.__bases__ == (target, cls) else type.mro(self)

    def reduce(self: Any, protocol: Any) -> Any:
        return _new_of, (cls,), self.__getstate__()  # as an object of the class that has a name

    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    namespace |= {"cls_to_become": target, "__reduce_ex__": reduce}
    return _make_class(cls, cls.__name__, (target, cls), namespace, mro)


def _new_of(cls: Any) -> Any:
    return cls.__new__(cls)


def _make_class(cls: type, name: str, bases: Any, namespace: dict[str, Any], mro: Any) -> Any:
    """Make a class with that order of methods, and without what an ``__init_subclass__`` of users gave it anew."""
    kind = type(cls)
    meta: Any = type(kind.__name__, (kind,), {"mro": mro, "__module__": kind.__module__})
    made = meta(name, bases, namespace, pytree=is_pytree(cls))
    for attribute in vars(made).keys() - namespace.keys():
        own = attribute.startswith(("__", "_pytree__", "_lazymods", "_abc_")) or attribute == "cls_to_become"
        if not own and hasattr(cls, attribute):
            delattr(made, attribute)
    return made


def are_concrete(arrays: Iterable[Any]) -> bool:
    """Whether all of them are arrays with values, none a tracer."""
    return not any(isinstance(x, core.Tracer) for x in arrays)


def weak(trace: Any) -> Any:
    """Return a weak reference to a trace (``Trace._weakref``)."""
    return trace._weakref


def is_pytree(cls: type) -> bool:
    """Whether instances of an nnx class are JAX pytrees (``Pytree._pytree__is_pytree``)."""
    return cls._pytree__is_pytree  # type: ignore[attr-defined]


def inherit_data_names(cls: type) -> None:
    """Let a class know the data attributes of all its bases: ``Pytree.__init_subclass__`` takes those of the first."""
    names: dict[str, bool] = {}
    for base in reversed(cls.__mro__):
        names.update(vars(base).get(NODES, {}))
    setattr(cls, NODES, HashableMapping(names, copy=False))


# ---------------------------------------------------------------- values and programs (jax)


def is_tracer(value: Any) -> bool:
    """Whether a value is a tracer (``jax._src.core.Tracer``)."""
    return isinstance(value, core.Tracer)


def dtype_of(value: Any) -> Any:
    """Return the dtype that JAX gives a value, also where it is a typed Python scalar (``jax._src.core.typeof``)."""
    return core.typeof(value).dtype


def executing() -> bool:
    """Whether operations are executed at once, outside of any mesh (``jax._src.mesh.get_abstract_mesh``)."""
    return core.trace_ctx.trace is core.eval_trace and mesh_lib.get_abstract_mesh().empty


def kept_when_compiled() -> contextlib.AbstractContextManager[None]:
    """Let JAX's persistent cache, if the user has switched it on, keep also what is compiled within a second.

    ``jax._src.config.persistent_cache_min_compile_time_secs`` as a context of this thread. (jax 0.10.2 and 0.12.0)
    """
    return config.persistent_cache_min_compile_time_secs(0.0)


@functools.cache
def threefry_dtype() -> Any:
    """Return the dtype of threefry keys."""
    with at_trace(eval_trace()):
        return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype


@functools.cache
def _sampling() -> frozenset[Any]:
    """Code of the initializers of JAX that draw once, at their shape, and multiply by a scalar."""
    own = jax.nn.initializers
    made = (own.normal(), own.truncated_normal(), own.uniform(), own.variance_scaling(1.0, "fan_in", "normal"))
    return frozenset(init.__code__ for init in made)  # type: ignore[attr-defined]


def is_jax_initializer(init: Any) -> bool:
    """Whether an initializer was defined by JAX, so that its result depends on nothing but its arguments.

    By the name of the module, ``jax._src.nn.initializers``. (jax 0.10.2 and 0.12.0)
    """
    return getattr(init, "__module__", None) in ("jax._src.nn.initializers", "jax.nn.initializers")


def with_modules(init: Any, **modules: Any) -> Callable[..., Any] | None:
    """Return an initializer of JAX's own that draws once and multiplies, with others in place of modules that it uses.

    None if ``init`` is not one of those. Reads ``__code__``, ``__closure__`` and ``__globals__`` of the functions in
    ``jax._src.nn.initializers``, which know ``jax.random`` as ``random`` and ``jax.numpy`` as ``jnp``. (jax 0.10.2 and
    0.12.0)
    """
    if getattr(init, "__code__", None) not in _sampling() or not init.__globals__.keys() >= modules.keys():
        return None
    names = {**init.__globals__, **modules}
    return types.FunctionType(init.__code__, names, init.__name__, init.__defaults__, init.__closure__)
