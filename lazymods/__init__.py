"""Flax NNX layers that size themselves."""

import importlib
from typing import TYPE_CHECKING, Any

from lazymods._errors import CheckpointError as CheckpointError
from lazymods._errors import ConfigurationError as ConfigurationError
from lazymods._errors import LazyError as LazyError
from lazymods._errors import MissingFileError as MissingFileError
from lazymods._errors import MissingNameError as MissingNameError
from lazymods._errors import PendingAttributeError as PendingAttributeError
from lazymods._errors import SaveError as SaveError
from lazymods._errors import SerializationError as SerializationError
from lazymods._errors import ShapeInferenceError as ShapeInferenceError
from lazymods._errors import StateDictError as StateDictError
from lazymods._errors import UninitializedError as UninitializedError
from lazymods._graph import has_uninitialized_params as has_uninitialized_params
from lazymods._graph import is_lazy as is_lazy
from lazymods._graph import uninitialized_paths as uninitialized_paths
from lazymods._gru_cell import ResetAfterGRUCell as ResetAfterGRUCell
from lazymods._layer.factory import lazy as lazy
from lazymods._layer.mixin import LazyModuleMixin as LazyModuleMixin
from lazymods._layer.placeholder import UninitializedBuffer as UninitializedBuffer
from lazymods._layer.placeholder import UninitializedParameter as UninitializedParameter
from lazymods._layer.placeholder import UninitializedVariable as UninitializedVariable
from lazymods.nn import *  # noqa: F403  the names of lazymods.nn are public here as well

if TYPE_CHECKING:
    from lazymods import autograd as autograd
    from lazymods import dispatch as dispatch
    from lazymods import lazytensor as lazytensor
    from lazymods import nn as nn
    from lazymods import rules as rules
    from lazymods._counts import metrics as metrics
    from lazymods._model.hooks import RemovableHandle as RemovableHandle
    from lazymods._model.hooks import register_forward_hook as register_forward_hook
    from lazymods._model.hooks import register_forward_pre_hook as register_forward_pre_hook
    from lazymods._model.hooks import register_load_state_dict_post_hook as register_load_state_dict_post_hook
    from lazymods._model.hooks import register_load_state_dict_pre_hook as register_load_state_dict_pre_hook
    from lazymods._model.hooks import register_state_dict_post_hook as register_state_dict_post_hook
    from lazymods._model.hooks import register_state_dict_pre_hook as register_state_dict_pre_hook
    from lazymods._model.inference import infer_shapes as infer_shapes
    from lazymods._model.inference import materialize as materialize
    from lazymods._model.optimizer import LazyOptimizer as LazyOptimizer
    from lazymods._model.report import LayerRow as LayerRow
    from lazymods._model.report import ParameterShape as ParameterShape
    from lazymods._model.report import ShapeReport as ShapeReport
    from lazymods._model.summary import summary as summary
    from lazymods._program_cache import CacheInfo as CacheInfo
    from lazymods._program_cache import set_cache_size as set_cache_size
    from lazymods._refusals import ArgumentError as ArgumentError
    from lazymods.autograd.freezing import trainable as trainable
    from lazymods.compile.constants import HiddenModelError as HiddenModelError
    from lazymods.compile.decorator import jit as jit
    from lazymods.compile.explain import Explanation as Explanation
    from lazymods.compile.explain import explain as explain
    from lazymods.compile.export import export as export
    from lazymods.compile.function import JitFunction as JitFunction
    from lazymods.compile.lowering import Lowered as Lowered
    from lazymods.compile.lowering import lower as lower
    from lazymods.compile.persistent import set_compilation_cache as set_compilation_cache
    from lazymods.nn.stack import Stack as Stack
    from lazymods.porting.parity import parity as parity
    from lazymods.porting.report import ParityReport as ParityReport
    from lazymods.porting.report import ParityRow as ParityRow
    from lazymods.state import LoadResult as LoadResult
    from lazymods.state.checkpoint import load as load
    from lazymods.state.exporting import export_torch as export_torch
    from lazymods.state.load_state_dict import load_state_dict as load_state_dict
    from lazymods.state.opened import OpenCheckpoint as OpenCheckpoint
    from lazymods.state.opened import open as open
    from lazymods.state.orbax_saving import PendingSave as PendingSave
    from lazymods.state.state_dict import state_dict as state_dict
    from lazymods.state.writing import save as save

__version__ = "0.1.0"

# Hooks and what works on whole models are imported when they are first used: an import costs next to nothing.
_ON_FIRST_USE = {
    "RemovableHandle": "lazymods._model.hooks",
    "register_forward_hook": "lazymods._model.hooks",
    "register_forward_pre_hook": "lazymods._model.hooks",
    "register_load_state_dict_post_hook": "lazymods._model.hooks",
    "register_load_state_dict_pre_hook": "lazymods._model.hooks",
    "register_state_dict_post_hook": "lazymods._model.hooks",
    "register_state_dict_pre_hook": "lazymods._model.hooks",
    "ArgumentError": "lazymods._refusals",
    "CacheInfo": "lazymods._program_cache",
    "Explanation": "lazymods.compile.explain",
    "HiddenModelError": "lazymods.compile.constants",
    "JitFunction": "lazymods.compile.function",
    "explain": "lazymods.compile.explain",
    "jit": "lazymods.compile.decorator",
    "export": "lazymods.compile.export",
    "Lowered": "lazymods.compile.lowering",
    "lower": "lazymods.compile.lowering",
    "metrics": "lazymods._counts",
    "set_compilation_cache": "lazymods.compile.persistent",
    "set_cache_size": "lazymods._program_cache",
    "LayerRow": "lazymods._model.report",
    "LazyOptimizer": "lazymods._model.optimizer",
    "LoadResult": "lazymods.state",
    "ParityReport": "lazymods.porting.report",
    "ParityRow": "lazymods.porting.report",
    "parity": "lazymods.porting.parity",
    "ParameterShape": "lazymods._model.report",
    "PendingSave": "lazymods.state.orbax_saving",
    "ShapeReport": "lazymods._model.report",
    "Stack": "lazymods.nn.stack",
    "export_torch": "lazymods.state.exporting",
    "infer_shapes": "lazymods._model.inference",
    "load": "lazymods.state.checkpoint",
    "load_state_dict": "lazymods.state",
    "materialize": "lazymods._model.inference",
    "open": "lazymods.state.opened",
    "OpenCheckpoint": "lazymods.state.opened",
    "save": "lazymods.state.writing",
    "state_dict": "lazymods.state",
    "summary": "lazymods._model.summary",
    "trainable": "lazymods.autograd.freezing",
}


_PARTS = ("autograd", "dispatch", "lazytensor", "rules")  # imported when they are first used, as modules


if not TYPE_CHECKING:  # to a type checker, a name that is missing is an error

    def __getattr__(name: str) -> Any:
        if name in _PARTS:
            return importlib.import_module(f"lazymods.{name}")
        if name not in _ON_FIRST_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(_ON_FIRST_USE[name]), name)
        except MissingNameError as error:
            if name != "jit":
                raise
            value = importlib.import_module("lazymods.compile.plain").jit_without(error)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """List the public names: not what this file imports for itself, nor the modules in which the names live."""
    here = [name for name, value in globals().items() if not name.startswith("_") and _is_own(value)]
    return sorted({*here, *_ON_FIRST_USE, *_PARTS, "nn", "__version__"})


def _is_own(value: object) -> bool:
    return getattr(value, "__module__", "").partition(".")[0] == __name__
