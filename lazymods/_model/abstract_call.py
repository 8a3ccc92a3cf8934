"""An abstract run of a model: which layer sees which shapes.

A :class:`AbstractCall` copies the model into a trace and calls the copy there. Nothing is executed and the model itself
is not touched. It copies all that the call can reach, as ``lm.jit`` does: also layers that functions, partials, bound
methods and plain objects hold, to which no attribute of Flax's leads. A lazy layer that is reached tells its sizes, and
gets traced zeros in place of parameters, so that the run goes on. Layers that are first met inside a nested transform,
as the cell of ``nnx.RNN`` in its scan, cannot change there: the run goes on as far as it can, and starts again with
those initialized from the start.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lazymods import _compat, _graph
from lazymods._errors import (
    NOT_TRACEABLE,
    LazyError,
    Problem,
    ShapeInferenceError,
    UninitializedError,
    describe_call,
    located,
    one_line,
)
from lazymods._graph import HOOKS, STATE, Path, dotted
from lazymods._initial.keys import is_key
from lazymods._initial.pending import InitSource, PendingInit
from lazymods._layer import contexts, first_call, lifecycle, structure
from lazymods._layer.asked import SIZE_LINE
from lazymods._model import hooks
from lazymods._model.called import CallArguments, Called
from lazymods._objects.copies import Copies
from lazymods._objects.traced_state import TracedState
from lazymods._refusals import refuse_no_model

INDEX = _compat.own_name("index")

Producers = dict[int, tuple[str, Sequence[Any], dict[str, Any]]]  # name, operands and parameters, by the result's id


@dataclasses.dataclass
class LayerCall:
    """A lazy layer that the run reached.

    Attributes:
        layer: The layer of the model.
        args: Shapes and dtypes of the arguments of its first call.
        kwargs: Those of its keyword arguments.
        values: The constructor arguments inferred; None for a layer written by hand.
    """

    layer: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: dict[str, Any] | None = None


@dataclasses.dataclass
class Call:
    """A call of a module during the run: shapes and dtypes of arguments and output.

    Attributes:
        module: The module of the copy, while the call runs.
        stacked: Whether the module that was called is one of those that the copy holds as a stack.
        sized: Whether it is a lazy layer that was sized in this call; its hooks and its class both ask for that.
    """

    path: Path
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    module: Any = None
    stacked: bool = False
    sized: bool = False


class AbstractCall:
    """One abstract run.

    Args:
        model: The model, or a method of it; it is left as it is.
        args: Arrays, specs and anything else that its call takes.
        kwargs: Keyword arguments.
        run: What is run instead of the model's call: it gets the copies and the arguments. ``model`` is then a list of
            what it reaches.
        look: Called at each call of a module with its path, the traced arguments, and what made each traced value.

    Attributes:
        called: What it calls.
        model: The model.
        hidden: nnx objects that the call can reach and that Flax does not see, by their path; not what is in those.
        everything: The model, and what is hidden.
        visits: The lazy layers that were reached, in the order in which they were.
        calls: The first call of each module, in order.
        output: Shapes and dtypes of the output.
        finished: A copy of the model with every visited layer initialized, of values without a value.
    """

    def __init__(
        self,
        model: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[..., Any] | None = None,
        look: Callable[[Path, Sequence[Any], Producers], None] | None = None,
    ) -> None:
        if run is None:
            refuse_no_model(model, args)
        self.called = Called(model)
        self.model, self._look = self.called.model, look
        model = self.model
        self._producers: Producers = {}
        self._call_copy = run
        self.inputs = first_call.as_specs((args, kwargs))
        self._arguments = CallArguments(*self.inputs)
        self.roots = [model, *self._arguments.modules]  # a call's arguments may be lazy as well
        self._traced_state = TracedState(self.roots)
        hidden = hidden_nodes(self.roots, self._traced_state)
        self.roots += [node for _, node in hidden]
        self.hidden = [(path[1:], node) for path, node in hidden if path[0] == 0]
        self.everything = [model, *(node for _, node in self.hidden)]
        self._paths = [*((n,) for n in range(len(self.roots) - len(hidden))), *(path for path, _ in hidden)]
        self.lazy = [((*self._paths[path[0]], *path[1:]), n) for path, n in _graph.lazy_nodes(self.roots)]
        self.visits: dict[int, LayerCall] = {}
        self.calls: dict[Path, Call] = {}
        self.output: Any = None
        self.finished: Any = None
        self._early: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._stack: list[Call] = []
        self._root: Any = None
        self._copies: Any = None

    # ------------------------------------------------------------ running

    def run(self) -> AbstractCall:
        """Run the model.

        Raises:
            ShapeInferenceError: If a layer cannot be sized, or the forward fails on these shapes.
        """
        while True:
            self.visits, self.calls, self._stack = {}, {}, []
            self._producers.clear()
            known = len(self._early)
            try:
                with self._active():
                    self._run()
            except Exception as error:
                self._size_copies()
                if len(self._early) == known:
                    self._tell_of_untouched(error)
                    raise
            if len(self._early) == known:
                return self

    @property
    def follows_calls(self) -> bool:
        """Whether it is known which module is being called: not in the run of a function."""
        return self._call_copy is None

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        previous = first_call.LOCAL.session
        first_call.LOCAL.session = self
        try:
            yield
        finally:
            first_call.LOCAL.session = previous

    def _run(self) -> None:
        def traced(given: dict[int, Any]) -> Any:
            self._root = _compat.weak(_compat.current_trace())
            copies = self._copies = Copies(self._traced_state)
            variables = list(map(copies.of, self._traced_state.variables))
            _fill_abstract(variables)
            _forget_keys(variables)
            self._prepare()
            args, kwargs = self._arguments.put_together(given, list(map(copies.of, self._arguments.modules)))
            output = self._call(self.called.of(copies.of(self.model)), args, kwargs)
            if self.called.is_method:  # which is not followed
                self.calls[()] = Call((), *self.inputs, output=first_call.as_specs(output))
            _finish(list(map(copies.of, self.roots)))
            self.finished = copies.of(self.model)
            return _arrays_only(output)

        producers = None if self._look is None else self._producers
        self.output = _compat.abstract.call_abstractly(traced, self._arguments.arrays, producers)

    def twin(self, node: Any) -> Any:
        """Return the copy of an nnx object in the last run."""
        return self._copies.of(node)

    def nodes(self) -> list[tuple[Path, Any]]:
        """Return every nnx object of the model by its path, and those that are hidden by the one that they have."""
        found = _graph.nodes(self.model)
        return found + [((*top, *path), node) for top, held in self.hidden for path, node in _graph.nodes(held)]

    def nodes_of_finished(self) -> list[tuple[Path, Any]]:
        """Return the same of :attr:`finished`."""
        found = _graph.nodes(self.finished)
        hidden = [((*top, *path), n) for top, held in self.hidden for path, n in _graph.nodes(self.twin(held))]
        return found + hidden

    def _call(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if self._call_copy is not None:
                return self._call_copy(self._copies, *args, **kwargs)
            return model(*args, **kwargs)
        except LazyError:
            raise
        except NOT_TRACEABLE as error:
            got = "a forward that decides on the values of arrays"
            needed = "shapes and dtypes alone: there are no values in an abstract run"
            raise ShapeInferenceError(Problem(self._where(), got, needed, "model(x), once")) from error
        except (ValueError, TypeError) as error:
            if not self.follows_calls:
                raise  # what one of the layers refused was told at its call
            call = self._stack[-1] if self._stack else Call((), args, kwargs)
            is_refusal = _is_of_jax(error) or first_call.refuses_input(call.module, error)  # as in a first call
            if not is_refusal:  # the model's own words, or those of a layer that was ready
                error.add_note(f"in an abstract run of the model, at {self._where()}")
                raise
            needed, line = f"an input that the layer takes; it says: {one_line(error)}", "lm.materialize(model, x)"
            if not call.args and not call.kwargs:
                needed = f"the arguments of a call, or specs of them: their shapes tell the sizes ({one_line(error)})"
                line = SIZE_LINE
            else:
                line += "  # with another input"
            got = describe_call(call.args, call.kwargs)
            raise ShapeInferenceError(Problem(self._where(), got, needed, line)) from error
        except Exception as error:
            error.add_note(f"in an abstract run of the model, at {self._where()}")
            raise

    def _where(self) -> str:
        call = self._stack[-1] if self._stack else None
        return _own_name(self.model) if call is None else located(dotted(call.path), _own_name(call.module))

    def _prepare(self) -> None:
        """Number the lazy layers of the copy, follow its calls, and initialize what must be from the start."""
        for index, (_, node) in enumerate(self.lazy):
            object.__setattr__(self.twin(node), INDEX, index)
        for path, node in self.nodes() if self.follows_calls else ():
            if isinstance(node, nnx.Module) and callable(node):
                self._follow(self.twin(node), path)
        for index, (args, kwargs) in self._early.items():
            self.initialize(self.twin(self.lazy[index][1]), args, kwargs)

    def _follow(self, node: Any, path: Path) -> None:
        def enter(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            specs = first_call.as_specs((args, kwargs))
            if self._look is not None:
                self._look(path, [*args, *kwargs.values()], self._producers)
            self._stack.append(Call(path, *specs, module=node, stacked=called is not node and _is_slice(called, node)))

        def leave(_: Any, args: tuple[Any, ...], output: Any) -> None:
            call = self._stack.pop()
            call.output, call.module = first_call.as_specs(output), None  # in a trace it may be a copy of that
            self.calls.setdefault(path, call)

        hooks.register_forward_pre_hook(node, enter, prepend=True, with_kwargs=True)
        hooks.register_forward_hook(node, leave)

    # ------------------------------------------------------------ lazy layers

    def initialize(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Size a lazy layer of the copy; at a further call, check that the sizes are the same.

        Raises:
            ShapeInferenceError: If they differ, or do not follow from the arguments.
            UninitializedError: If the layer is no part of the model.
        """
        call = self._stack[-1] if self._stack else None
        if call is not None and call.module is layer:
            if call.sized:
                return
            call.sized = True
        index = vars(layer).get(INDEX)
        birth = _compat.birth_trace(layer)
        if index is None and birth is _compat.eval_trace():
            got = "a lazy layer that is no part of the model, reached by its forward"
            needed = "every lazy layer as an attribute of the model, so that it can be sized with it"
            write = "self.layer = layer  # in the model's __init__"
            raise UninitializedError(Problem(_own_name(layer), got, needed, write))
        args, kwargs = first_call.as_specs((args, kwargs))
        if index is None:  # made during the run
            self._fill(layer, args, kwargs)
        elif index in self.visits:
            self._compare(layer, self.visits[index], args, kwargs)
        elif birth is not self._root():
            self._early[index] = (args, kwargs)
            if contexts.empty_slots(layer):
                self._fill(layer, args, kwargs)  # the copy that the transform made
        else:
            self.visits[index] = visit = LayerCall(self.lazy[index][1], args, kwargs)
            visit.values = self._fill(layer, args, kwargs)

    def _fill(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        with _compat.at_trace(_compat.birth_trace(layer)):
            abstract = first_call.run_initialize_parameters(layer, args, kwargs)
            if abstract is not None:
                lifecycle.merge_attributes(layer, abstract)
            if abstract is None or structure.has_other_slots(vars(layer)[STATE].spec, abstract):
                self._follow_new(layer)
        return None if abstract is None else dict(abstract.values)

    def _follow_new(self, layer: Any) -> None:
        """Follow the calls of what a layer of the model has at its sizes only, or has made when it was initialized."""
        index = vars(layer).get(INDEX)
        root, *above = self.lazy[index][0] if index is not None else (None,)
        for path, node in _graph.nodes(layer) if root == 0 else ():
            if path and isinstance(node, nnx.Module) and callable(node) and HOOKS not in vars(node):
                self._follow(node, (*above, *path))

    def _size_copies(self) -> None:
        """Size the lazy layers that were copied from one that the run has reached, as it was: for the next run.

        A copy that is averaged into is never called. What it is averaged with has the shapes that it needs.
        """
        reached = [(path, self.visits[i]) for i, (path, _) in enumerate(self.lazy) if i in self.visits]
        for index, (path, layer) in enumerate(self.lazy):
            if index in self.visits or index in self._early:
                continue
            alike = [(_common_end(path, p), v) for p, v in reached if _are_copies(layer, v.layer)]
            nearest = [v for n, v in alike if n == max(n for n, _ in alike)]
            if nearest and all((v.args, v.kwargs) == (nearest[0].args, nearest[0].kwargs) for v in nearest):
                self._early[index] = (nearest[0].args, nearest[0].kwargs)

    def _tell_of_untouched(self, error: Exception) -> None:
        """Name the models of which a function had reached no layer when it failed: it may need their values."""
        models: dict[Path, list[int]] = {}
        for index, (path, layer) in enumerate(self.lazy):
            if _graph.has_uninitialized_params(layer):
                models.setdefault(path[:2], []).append(index)
        left = [found[-1] for found in models.values() if not any(i in self.visits or i in self._early for i in found)]
        if left and not self.follows_calls and not isinstance(error, LazyError):
            names = [_graph.place(self.lazy[i][1], _own_name(self.lazy[i][1])) for i in left]
            error.add_note(
                f"no layer of these models had been called: {', '.join(sorted(names))}, ...; if it is for want of "
                "their values, lm.materialize(model, x) before"
            )

    def _compare(self, layer: Any, visit: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        infer = getattr(type(layer), "_lazymods_infer", None)
        if visit.values is None or infer is None:
            return  # written by hand, or with an initialize_parameters of its own
        values = infer(layer, args, kwargs)
        if values != visit.values:
            first = describe_call(visit.args, visit.kwargs)
            got = f"{describe_call(args, kwargs)} ({_show(values)}) after {first} ({_show(visit.values)})"
            needed = "the same sizes at every call: its parameters have one shape"
            write = "self.other = lm.LazyLinear(features, rngs=rngs)  # a layer of its own for each width"
            raise ShapeInferenceError(Problem(_graph.place(layer, _own_name(layer)), got, needed, write))


def _common_end(a: Path, b: Path) -> int:
    """How many steps two paths have in common at their ends."""
    same = [x == y for x, y in zip(reversed(a), reversed(b), strict=False)]
    return [*same, False].index(False)


def _are_copies(layer: Any, other: Any) -> bool:
    """Whether two lazy layers were made alike, of the same keys, as a layer and its copy are: so are their values."""
    mine, others = _recipes(layer), _recipes(other)
    return bool(mine) and mine == others and all(pending.is_static for pending in mine.values())


def _recipes(layer: Any) -> dict[Path, PendingInit]:
    return {e.path: e.value.pending for e in _graph.entries(layer) if _graph.is_placeholder(e.value)}


def _is_slice(called: Any, node: Any) -> bool:
    """Whether what a transform calls holds values of lower rank than the module that it was made from."""

    def ranks(module: Any) -> int:
        return sum(len(getattr(v.get_raw_value(), "shape", None) or ()) for v in _graph.variables(module))

    return ranks(called) < ranks(node)


def _finish(copies: list[Any]) -> None:
    """Let every layer that was initialized become its class."""
    for _, node in _graph.nodes(copies):
        vars(node).pop(INDEX, None)
        if HOOKS in vars(node):
            del vars(node)[HOOKS]
            _compat.set_class(node, hooks.unhooked_class(type(node)))
    for _, node in _graph.lazy_nodes(copies):
        if not contexts.empty_slots(node):
            lifecycle.settle(node, None)


def _is_of_jax(error: Exception) -> bool:
    """Whether JAX itself raised an error, as it does where shapes do not fit, or the call that a hook made failed."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in ("jax", "jaxlib", "numpy", "lazymods")


def _show(values: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in values.items())


def _own_name(node: Any) -> str:
    return hooks.unhooked_class(type(node)).__name__


def _fill_abstract(variables: list[nnx.Variable[Any]]) -> None:
    """Give traced zeros to Variables that nnx.eval_shape made abstract, and arrays of JAX to those that hold numpy's.

    A program has arrays of JAX as well where a Variable holds one of numpy, which nobody can write a tracer to.
    """
    for variable in variables:
        raw = variable.get_raw_value()
        if isinstance(raw, jax.ShapeDtypeStruct):
            if is_key(raw):
                variable.set_raw_value(jnp.broadcast_to(jax.random.key(0), raw.shape))
            else:
                variable.set_raw_value(jax.lax.full(raw.shape, 0, raw.dtype))
        elif isinstance(raw, np.ndarray):
            with _compat.at_trace(_compat.eval_trace()):
                array = jax.device_put(raw)
            variable.set_raw_value(array)


def _forget_keys(variables: list[nnx.Variable[Any]]) -> None:
    """Let placeholders that were built under a transform carry no keys: nothing is drawn, and nnx.grad refuses them."""
    for variable in variables:
        if _graph.is_placeholder(variable) and not variable.pending.is_static:
            pending = variable.pending
            source = InitSource(None) if isinstance(pending.source, InitSource) else pending.source
            marks = _compat.abstract.zeros(pending.stacking.marks, np.float32)
            variable.set_raw_value(PendingInit(source, *pending.static()[1:], keys=(marks,)))


def hidden_nodes(roots: list[Any], traced_state: TracedState) -> list[tuple[Path, Any]]:
    """Return the nnx objects that are reached from some roots, but by no attribute, item or pytree that Flax sees.

    Args:
        roots: Where to start.
        traced_state: The traced state of these roots.

    Returns:
        Each with its path: the number of the root, then attributes, names of variables in closures and the like. What
        such an object holds itself is left out.
    """
    known = {id(node) for _, node in _graph.nodes(roots)}
    found = []
    for node, path in zip(traced_state.nodes, traced_state.places, strict=True):
        if isinstance(node, nnx.Pytree) and id(node) not in known:
            found.append((path, node))
            known |= {id(inner) for _, inner in _graph.nodes(node)}
    return found


def _arrays_only(output: Any) -> Any:
    """Let JAX return what the model returned: arrays, and nothing for what is not."""
    return jax.tree.map(lambda v: v if isinstance(v, (jax.Array, np.ndarray, int, float, complex)) else None, output)
