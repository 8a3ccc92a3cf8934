"""From a call to machine code, step by step, as ``jax.jit`` and ``nnx.jit`` have it: traced, lowered, compiled.

``lm.jit(f).trace(...)``, ``.lower(...)`` and ``.eval_shape(...)`` run nothing and change nothing: a lazy model stays
lazy. What ``.lower(...).compile()`` returns is called as the function is, and does to models what the function does, at
the one structure that it was made for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from lazymods import _compat
from lazymods._compat import jit as _compat_jit
from lazymods._compat import tracing
from lazymods._errors import NOT_TRACEABLE, Problem
from lazymods._objects.copies import Copies
from lazymods._objects.tokens import TokenKind, kind_of
from lazymods._objects.traced_state import TracedState, input_of, with_inputs
from lazymods._progress import telling
from lazymods._refusals import ArgumentError
from lazymods._snapshot import Snapshot
from lazymods.compile.arguments import Arguments, Splitter, is_whole
from lazymods.compile.binding import Binding
from lazymods.compile.call_plan import CallPlan
from lazymods.compile.dot import dot
from lazymods.compile.placement import spec_of
from lazymods.compile.program import Program
from lazymods.compile.replay import EffectsReplay

_MANY = (
    "In {} Python decides on the value of an array, so there is a program for each decision, and none to look at. "
    "Calls of lm.jit run them. To lower, export or abstractly evaluate one program, write the decision with "
    "jax.lax.cond or jax.numpy.where."
)


class Staged:
    """A function that can be looked at before it runs; :class:`~lazymods.compile.function.JitFunction` is one."""

    _splitter: Splitter
    _lock: Any
    bind: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Arguments, Binding]]
    make_sized: Callable[[Arguments, Binding], tuple[Program, Binding]]

    def spelled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments in the one way of giving them in which a program knows them."""
        return self._splitter.spelled(args, kwargs)[:2]

    def masked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments with None in the places of those that are static."""
        return self._splitter.masked(args, kwargs)

    @contextlib.contextmanager
    def traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Program, Binding]]:
        """Trace the function for a call; at the end all is as it was, and a lazy model is lazy."""
        with self._lock:
            arguments, call = self.bind(args, kwargs)
            before = Snapshot(*call.reach) if call.lazy else None
            try:
                yield self._made(arguments, call)
            finally:
                if before is not None:
                    before.restore()

    def _made(self, arguments: Arguments, call: Binding) -> tuple[Program, Binding]:
        try:
            return self.make_sized(arguments, call)
        except NOT_TRACEABLE as error:
            error.add_note(_MANY.format(repr(self)))
            raise

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Trace the function for some arguments, and run nothing.

        Args:
            *args: Its arguments; ``jax.ShapeDtypeStruct`` will do for arrays.
            **kwargs: Its keyword arguments.

        Returns:
            What was traced; its ``lower()`` goes on from there.

        Raises:
            jax.errors.ConcretizationTypeError: The function decides on the values of arrays: it is many programs.
        """
        try:
            with self.traced(args, kwargs) as (program, call):
                given = self._splitter.without_statics(args, kwargs)
                return Traced(self, program, call, given, _shapes(program, call))
        except Exception as error:
            _compat.hide_frames(error)
            raise

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Trace and lower the function, see :func:`lazymods.lower`; ``trace(...).lower()``."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function would, with a ``jax.ShapeDtypeStruct`` for every array, and run nothing.

        An nnx object among the results is a new one, whose Variables hold these.
        """
        try:
            with self.traced(args, kwargs) as (program, call):
                return _shapes(program, call)
        except Exception as error:
            _compat.hide_frames(error)
            raise


class _Stage:
    """What all stages know of the call.

    Attributes:
        args_info: The arguments without the static ones, a ``jax.stages.ArgInfo`` for each array.
        in_tree: Their structure.
        in_avals: The same with types for arrays.
        donate_argnums: The numbers of those arrays whose memory is used again.
    """

    def __init__(self, info: Any) -> None:
        self.args_info = info

    @property
    def _flat(self) -> list[Any]:
        return jax.tree.leaves(self.args_info, is_leaf=_is_info)

    @property
    def in_tree(self) -> Any:
        return jax.tree.structure(self.args_info, is_leaf=_is_info)

    @property
    def in_avals(self) -> Any:
        return jax.tree.map(_compat_jit.aval_of_info, self.args_info, is_leaf=_is_info)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        return tuple(number for number, info in enumerate(self._flat) if info.donated)


class Traced(_Stage):
    """A function, traced for some arguments.

    Attributes:
        jaxpr: The closed jaxpr. Its inputs are the arrays of the arguments, then the state that the function reads.
        out_info: What the function returns, a ``jax.ShapeDtypeStruct`` for every array.
    """

    def __init__(self, function: Any, program: Program, call: Binding, given: Any, out_info: Any) -> None:
        leaves = [call.leaves[n] for n in program.leaf_numbers(call.inputs)]
        donated = {id(leaves[n]) for n in program.donated}
        super().__init__(jax.tree.map(lambda value: _info(value, donated), given))
        self.out_info = out_info
        self._target = _Target(function, program, call.key)
        self._traced = program.trace(leaves)
        if program.donated:
            self.jaxpr: Any = jax.make_jaxpr(lambda leaves: program.tape(jax.tree.leaves(leaves)))(leaves)
        else:
            self.jaxpr = self._traced.jaxpr

    def lower(self, *, lowering_platforms: tuple[str, ...] | None = None) -> Lowered:
        """Lower to StableHLO, for other platforms than this one if they are named."""
        lowered = self._traced.lower(lowering_platforms=lowering_platforms)
        return Lowered(self._target, self, lowered)


class Lowered(_Stage):
    """A function at each stage from Python to machine code; what is asked for is made then.

    Attributes:
        jaxpr: The closed jaxpr. Its inputs are the arrays of the arguments, then the state that it reads.
        out_tree: The structure of what it returns.
    """

    def __init__(self, target: _Target, traced: Traced, lowered: Any) -> None:
        super().__init__(traced.args_info)
        self.jaxpr: Any = traced.jaxpr
        self.out_tree: Any = jax.tree.structure(traced.out_info)
        self._target, self._lowered = target, lowered

    @functools.cached_property
    def _compiled(self) -> Any:
        with telling("compiling"):
            return self._lowered.compile()

    @property
    def stablehlo(self) -> str:
        """The StableHLO module, as JAX hands it to XLA."""
        return self._lowered.as_text()

    @property
    def hlo(self) -> str:
        """The HLO module after XLA has optimized it for this platform."""
        return self._compiled.as_text()

    @property
    def cost(self) -> Mapping[str, float]:
        """XLA's estimates: ``flops``, ``bytes accessed`` and others that depend on the platform."""
        found = self._compiled.cost_analysis()
        return found[0] if isinstance(found, list) else found

    @property
    def memory(self) -> Any:
        """XLA's sizes in bytes: ``argument_size_in_bytes``, ``output_size_in_bytes``, ``temp_size_in_bytes``."""
        return self._compiled.memory_analysis()

    @property
    def dot(self) -> str:
        """The jaxpr as a graph for Graphviz: a text, and in a notebook its picture if Graphviz is there."""
        return dot(self.jaxpr)

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """Return the module as text, as ``jax.stages.Lowered.as_text`` does."""
        return self._lowered.as_text(dialect=dialect, debug_info=debug_info)

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """Return the module itself, as ``jax.stages.Lowered.compiler_ir`` does."""
        return self._lowered.compiler_ir(dialect=dialect)

    def cost_analysis(self) -> Any:
        """Return estimates that are made before XLA optimizes; :attr:`cost` has those of what runs."""
        return self._lowered.cost_analysis()

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Compiled:
        """Compile it with XLA; what is returned is called as the function is."""
        made = self._lowered.compile(compiler_options) if compiler_options else self._compiled
        return Compiled(self, self._target, made)

    def __repr__(self) -> str:
        return f"Lowered({len(self.jaxpr.jaxpr.eqns)} operations)"


class Compiled(_Stage):
    """A function, compiled for arguments and models of one structure.

    Attributes:
        out_tree: The structure of what it returns.
    """

    def __init__(self, lowered: Lowered, target: _Target, compiled: Any) -> None:
        super().__init__(lowered.args_info)
        self.out_tree: Any = lowered.out_tree
        self._target, self._compiled = target, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, with everything that it does to models.

        Raises:
            ArgumentError: Arguments, or models that it reaches, have another structure than it was compiled for.
            TypeError: An array has another shape or dtype.
        """
        return self._target.call(self._compiled, args, kwargs)

    def as_text(self) -> str | None:
        """Return what runs as text, as ``jax.stages.Compiled.as_text`` does."""
        return self._compiled.as_text()

    def cost_analysis(self) -> Any:
        """Return XLA's estimates, as ``jax.stages.Compiled.cost_analysis`` does."""
        return self._compiled.cost_analysis()

    def memory_analysis(self) -> Any:
        """Return XLA's sizes in bytes, as ``jax.stages.Compiled.memory_analysis`` does."""
        return self._compiled.memory_analysis()

    def runtime_executable(self) -> Any:
        """Return the executable, as ``jax.stages.Compiled.runtime_executable`` does."""
        return self._compiled.runtime_executable()

    @property
    def input_shardings(self) -> Any:
        """The shardings of the program's inputs: the arrays of the arguments, then the state that it reads."""
        return self._compiled.input_shardings

    @property
    def input_formats(self) -> Any:
        """The layouts and shardings of these inputs."""
        return self._compiled.input_formats

    input_layouts = input_formats  # as nnx.jit names them

    @property
    def output_shardings(self) -> Any:
        """The shardings of the program's outputs: the arrays that are returned, then those that are written."""
        return self._compiled.output_shardings


class _Target:
    """Whom a compiled program is for: a function at one structure. It holds no model."""

    def __init__(self, function: Any, program: Program, key: Any) -> None:
        self._function, self._program, self._keys = function, program, {key}

    def call(self, compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments, call = self._function.bind(args, kwargs)
        before = Snapshot(*call.reach) if call.lazy else None
        try:
            if call.lazy:
                call = self._function.sized(arguments, call)
            if call.key not in self._keys:
                raise _other_structure(self._function.name)
            plan, record = CallPlan(self._program, call), self._program.record
            outputs = compiled(*self._program.arranged(plan.leaves(list(call.values))))
            if self._program.calls_python:
                tracing.waited(outputs)
            out = self._function.replay(record, outputs, call, plan)
            if record.only_sorts and len(self._keys) == 1:  # so the next call finds the attributes in the same order
                self._keys.add(self._function.bind(args, kwargs)[1].key)
            return out
        except BaseException:
            if before is not None:
                before.restore()
            raise


def _other_structure(name: str) -> ArgumentError:
    return ArgumentError(
        Problem(
            name,
            "arguments, or models that it reaches, of another structure than those that it was lowered for",
            "the same: classes, attributes, static values and sharing, as they are when this call begins",
            "lm.lower(f, model, x).compile()  # with these; or call the function itself, which does so when it has to",
        )
    )


def _is_info(value: Any) -> bool:
    return isinstance(value, jax.stages.ArgInfo)


def _info(value: Any, donated: set[int]) -> Any:
    data = _compat_jit.key_parts(value)[0] if type(value) is _compat_jit.KEY else value
    return _compat_jit.info_of(jax.typeof(value), id(data) in donated)


def shape_of(value: Any) -> Any:
    """Return a ``jax.ShapeDtypeStruct`` for an array, and any other value as it is."""
    if isinstance(value, tuple):
        return with_inputs(value, jax.tree.map(shape_of, input_of(value)))
    if kind_of(value) is not TokenKind.ARRAY:
        return value
    return spec_of(jax.typeof(value))


def _shapes(program: Program, call: Binding) -> Any:
    """Return what a program's function returns, with shapes for arrays; nnx objects in it are copies."""
    traced_state = TracedState(call.reach, reads=program.record.reads)
    copies = Copies(traced_state)
    reach = [copies.of(value) for value in call.reach]
    for target, value in zip(call.targets, call.values_of_targets(), strict=True):
        _put(copies, target, shape_of(value))
    outputs = [shape_of(aval) for aval in program.tape.out_avals()]
    given = call.given()  # of containers that are copies: the caller's stay as they are
    given.things = [jax.tree.map(shape_of, thing, is_leaf=is_whole) for thing in given.things]
    leaf = functools.partial(call.leaf_of, program.at)
    replay = EffectsReplay(program.record, outputs, reach, given, lambda number: shape_of(leaf(number)))
    for target, out in program.record.writes:
        _put(copies, call.targets[program.at[target]], outputs[out.number])
    replay.change()
    return replay.out()


def _put(copies: Copies, target: Any, value: Any) -> None:
    """Let the copy of a target hold a value; what the function has not read of an object has no copy."""
    with contextlib.suppress(KeyError):
        if hasattr(target, "mark"):
            copies.give(target.node, target.key, value)
        else:
            copies.give(target, None, value)
