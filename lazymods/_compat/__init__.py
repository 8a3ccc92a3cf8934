"""The only place that touches private names of jax and flax.

A module for each thing that needs some. It takes them when it is imported, at the first use of one of its functions
(``_PLACES``): hot paths find nothing anew. Where a name is gone, the module's public twin takes its place (``_TWINS``),
slower, with one warning; a module without twin is a feature less: :class:`~lazymods.MissingNameError` says which name,
and which versions have it. Each module says with which versions of jax and flax its names were seen to work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lazymods._compat import finding as _finding
from lazymods._errors import MissingNameError as _MissingNameError

if TYPE_CHECKING:
    from lazymods._compat.backward_marks import mark_inputs as mark_inputs
    from lazymods._compat.backward_marks import mark_outputs as mark_outputs
    from lazymods._compat.equations import bind_equation as bind_equation
    from lazymods._compat.equations import scopes_of as scopes_of
    from lazymods._compat.fast_traces import at_trace as at_trace
    from lazymods._compat.fast_traces import current_trace as current_trace
    from lazymods._compat.fast_traces import executing as executing
    from lazymods._compat.grad_modes import Mode as Mode
    from lazymods._compat.grad_modes import close_block as close_block
    from lazymods._compat.grad_modes import open_block as open_block
    from lazymods._compat.initializers import is_jax_initializer as is_jax_initializer
    from lazymods._compat.initializers import kept_when_compiled as kept_when_compiled
    from lazymods._compat.initializers import with_modules as with_modules
    from lazymods._compat.objects import NODES as NODES
    from lazymods._compat.objects import REFERENCES as REFERENCES
    from lazymods._compat.objects import STATE as STATE
    from lazymods._compat.objects import check_without as check_without
    from lazymods._compat.objects import data_names as data_names
    from lazymods._compat.objects import declared_names as declared_names
    from lazymods._compat.objects import forget_data_name as forget_data_name
    from lazymods._compat.objects import inherit_data_names as inherit_data_names
    from lazymods._compat.objects import is_pytree as is_pytree
    from lazymods._compat.objects import laid_out_as as laid_out_as
    from lazymods._compat.objects import make_quietly as make_quietly
    from lazymods._compat.objects import mapping_of_names as mapping_of_names
    from lazymods._compat.objects import names_of as names_of
    from lazymods._compat.objects import new_object as new_object
    from lazymods._compat.objects import new_state as new_state
    from lazymods._compat.objects import own_name as own_name
    from lazymods._compat.objects import put_in_front as put_in_front
    from lazymods._compat.objects import set_attributes as set_attributes
    from lazymods._compat.objects import set_class as set_class
    from lazymods._compat.objects import set_data_names as set_data_names
    from lazymods._compat.objects import share_data_names as share_data_names
    from lazymods._compat.peeling import base_trace as base_trace
    from lazymods._compat.peeling import base_value as base_value
    from lazymods._compat.peeling import runs_at_once as runs_at_once
    from lazymods._compat.placing import device_put as device_put
    from lazymods._compat.placing import put as put
    from lazymods._compat.tracebacks import hide_frames as hide_frames
    from lazymods._compat.traces import are_concrete as are_concrete
    from lazymods._compat.traces import asked_for_gradient as asked_for_gradient
    from lazymods._compat.traces import counted as counted
    from lazymods._compat.traces import dtype_of as dtype_of
    from lazymods._compat.traces import eval_trace as eval_trace
    from lazymods._compat.traces import home_trace as home_trace
    from lazymods._compat.traces import is_tracer as is_tracer
    from lazymods._compat.traces import plain_device as plain_device
    from lazymods._compat.traces import threefry_dtype as threefry_dtype
    from lazymods._compat.traces import weak as weak
    from lazymods._compat.transforms import carrying_transforms as carrying_transforms
    from lazymods._compat.transforms import fixed_structure as fixed_structure
    from lazymods._compat.transforms import incarnations as incarnations
    from lazymods._compat.transforms import mapping_axes as mapping_axes
    from lazymods._compat.transforms import outermost as outermost
    from lazymods._compat.transforms import transforms_running as transforms_running
    from lazymods._compat.transforms import will_update as will_update
    from lazymods._compat.variables import NOT_GIVEN as NOT_GIVEN
    from lazymods._compat.variables import SET_RAW as SET_RAW
    from lazymods._compat.variables import birth_trace as birth_trace
    from lazymods._compat.variables import current_home as current_home
    from lazymods._compat.variables import default_metadata as default_metadata
    from lazymods._compat.variables import new_variable as new_variable
    from lazymods._compat.variables import raw_metadata as raw_metadata
    from lazymods._compat.variables import raw_values as raw_values
    from lazymods._compat.variables import transform_of as transform_of
    from lazymods._compat.variables import value_of as value_of
    from lazymods._compat.variables import write_variable as write_variable

_FUNCTIONS = {
    "backward_marks": "mark_inputs mark_outputs",
    "equations": "bind_equation scopes_of",
    "fast_traces": "at_trace current_trace executing",
    "grad_modes": "Mode close_block open_block",
    "initializers": "is_jax_initializer kept_when_compiled with_modules",
    "objects": "NODES REFERENCES STATE check_without data_names declared_names forget_data_name inherit_data_names "
    "is_pytree laid_out_as make_quietly mapping_of_names names_of new_object new_state own_name put_in_front "
    "set_attributes set_class set_data_names share_data_names",
    "peeling": "base_trace base_value runs_at_once",
    "placing": "device_put put",
    "tracebacks": "hide_frames",
    "traces": "are_concrete asked_for_gradient counted dtype_of eval_trace home_trace is_tracer plain_device "
    "threefry_dtype weak",
    "transforms": "carrying_transforms fixed_structure incarnations mapping_axes outermost transforms_running "
    "will_update",
    "variables": "NOT_GIVEN SET_RAW birth_trace current_home default_metadata new_variable raw_metadata raw_values "
    "transform_of value_of write_variable",
}
_PLACES = {name: module for module, names in _FUNCTIONS.items() for name in names.split()}
_TWINS = {  # and what it does
    "abstract": ("plain_abstract", "jax.eval_shape, and Flax's own initializers one by one"),
    "fast_traces": ("traces", "public functions of jax.extend.core"),
    "named_axes": ("plain_axes", "tracing kernels without the names of axes"),
    "peeling": ("plain_peeling", "compiling an operator at each call in jax.grad or jax.vmap outside of jax.jit"),
    "placing": ("plain_placing", "jax.device_put"),
    "transforms": ("any_transform", "materialize before a transform"),
}
_FEATURES = {
    "abstract": "running a model without values",
    "backward_marks": "a backward hook of a module",
    "calls": "lm.lazytensor",
    "fast_traces": "the first call of a layer",
    "grad_modes": "switching gradients off in lm.autograd",
    "jit": "lm.jit",
    "named_axes": "lm.dispatch in jax.vmap(axis_name=...) or jax.shard_map",
    "peeling": "lm.dispatch",
    "placing": "bringing arrays to a device",
    "saving": "lm.autograd.saved_tensors_hooks",
    "subclasses": "lm.jit and lm.lazytensor",
    "tracing": "lm.lazytensor, and Python decisions on array values in lm.jit,",
    "transforms": "the first call of a layer inside an nnx transform",
    "values": "lm.lazytensor",
}


def __getattr__(name: str) -> Any:
    """Find a function, or a module of this package, at its first use."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _PLACES:
        found = getattr(_module(_PLACES[name]), name)
    elif name in _FEATURES:
        found = _module(name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def _module(name: str) -> Any:
    feature = _FEATURES.get(name, "lazymods")
    try:
        return _finding.load(name, feature)
    except _MissingNameError as error:
        if name not in _TWINS:
            raise
        twin, instead = _TWINS[name]
        _finding.tell(feature, str(error.__cause__), instead)
        return _finding.load(twin, feature)
