"""``lm.jit``: how a call runs.

The first call at a structure traces the function on copies of the user's objects (``copies``, ``trace``), compiles it
(``program``) and keeps the program in the function's cache. A lazy model is sized first, by an abstract evaluation
(``sizing``), so that there is one trace and one compilation. Every call then:

1. takes the arguments apart (``arguments``) and reads what the function reaches besides (``captures``);
2. asks each model's guard whether it is as it was, and for its values (``guards``);
3. passes them to the program, and writes back what it returns as new values of Variables.

A call like the last one takes the fast path, :meth:`JitFunction.__call__`: nothing is hashed, and arrays that the last
call took or returned are not checked again (``launch``). Any other call takes the slow path, which looks for another
program or makes one.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import jax
from flax.errors import TraceContextError

from lazymods import _compat
from lazymods._compat import jit as _compat_jit
from lazymods._counts import COUNTS
from lazymods._errors import NOT_TRACEABLE, UninitializedError
from lazymods._layer.lifecycle import LOCK
from lazymods._objects.copies import Copies, pass_reads_on
from lazymods._objects.module_attributes import wait_for_attributes
from lazymods._objects.traced_state import Reads, held_by
from lazymods._objects.within import holds_tracer
from lazymods._program_cache import Cache, CacheInfo
from lazymods._progress import telling
from lazymods._snapshot import Snapshot
from lazymods.compile.arguments import Arguments, Splitter
from lazymods.compile.before import all_or_nothing
from lazymods.compile.binding import Binding, kind_of_input
from lazymods.compile.branching import BranchingProgram
from lazymods.compile.call_plan import CallPlan, FastPath, fast_path_of
from lazymods.compile.captures import Captures
from lazymods.compile.checking import checked
from lazymods.compile.clones import call_with, refuse_changes, refuse_lazy_clones
from lazymods.compile.constants import HiddenModelError, check_constants
from lazymods.compile.explain import TraceKey, facts_of, named, note_path, note_trace
from lazymods.compile.given import Given
from lazymods.compile.outside import refuse_leaks
from lazymods.compile.paths import NoPathError
from lazymods.compile.program import MoreReadError, OtherSignatureError, Program, compile_body
from lazymods.compile.records import Effects
from lazymods.compile.replay import EffectsReplay
from lazymods.compile.sizing import has_optimizer, size
from lazymods.compile.stages import Staged
from lazymods.compile.trace import Body, NotSizedError, Place, write

_KEPT_SITUATIONS = 16  # how many lm.explain() compares with
_NO_PATH = (HiddenModelError, NotSizedError, NoPathError, *NOT_TRACEABLE)  # the last: it decides inside a trace
_TRACE, _EVAL, _FLAX = _compat_jit.TRACE, _compat_jit.EVAL, _compat_jit.FLAX
_UNLOCKED = contextlib.nullcontext()

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
Q = ParamSpec("Q")
S = TypeVar("S")


def _has_tracer(error: BaseException) -> bool:
    """Whether what the function has raised tells of an array: ``raise Diverged(loss)``, or an error that follows it."""
    chain: list[BaseException] = [error]
    for one in chain:
        if holds_tracer((one.args, vars(one))):
            return True
        chain += [e for e in (one.__cause__, one.__context__) if e is not None and e not in chain]
    return False


class JitFunction(Staged, Generic[P, R]):
    """A function compiled by :func:`lazymods.jit`."""

    is_jit = True  # asked by modules that must not import this file

    def __init__(
        self, function: Any, donate_state: bool, static_argnames: tuple[str, ...], max_paths: int, check: bool = False
    ) -> None:
        self._function = function
        self._options = (donate_state, static_argnames, max_paths, check)
        self._donate = donate_state
        self.max_paths: int = max_paths
        self._check = check or os.environ.get("LAZYMODS_CHECK") == "1"
        self._reads = Reads()
        self._splitter = Splitter(function, static_argnames)
        self._captures = Captures(function, self._reads)
        self._classes: set[type] = set()  # those of whose methods it is known that they may name models
        self._lock = threading.RLock()  # one trace at a time
        self._cache = Cache(self._forget)
        self._plans: dict[Any, CallPlan] = {}
        # A transform of NNX sorts the attributes of a model: by the key of the sorted model, its key before.
        self._aliases: dict[Any, Any] = {}
        self._fast: FastPath | None = None
        self._has_signatures = False  # then comparing shapes here is faster than letting jax.jit find out
        self._situations: collections.deque[TraceKey] = collections.deque(maxlen=_KEPT_SITUATIONS)
        named = function if hasattr(function, "__name__") else type(function)
        functools.update_wrapper(self, named, updated=())
        if named is function:  # its attributes, but not ours: those of lm.jit, or of the same name
            vars(self).update({k: v for k, v in getattr(function, "__dict__", {}).items() if not hasattr(self, k)})
        self.__wrapped__ = function

    def __deepcopy__(self, memo: dict[int, Any]) -> JitFunction[P, R]:
        """Copy the function, with the object whose method it is; the copy compiles anew."""
        return JitFunction(copy.deepcopy(self._function, memo), *self._options)

    def __copy__(self) -> JitFunction[P, R]:
        """Return a function that does the same, and compiles anew."""
        return JitFunction(self._function, *self._options)

    def __reduce__(self) -> Any:
        """Pickle by name what a module holds by name, else by the function."""
        module, name = getattr(self, "__module__", None), self.name
        found: Any = sys.modules.get(module or "")
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (JitFunction, (self._function, *self._options))

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> JitFunction[P, R]: ...

    @overload
    def __get__(
        self: JitFunction[Concatenate[S, Q], R], instance: S, owner: type | None = None
    ) -> Callable[Q, R]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Be a method of the class that it is defined in."""
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<lm.jit of {self.name}>"

    @property
    def name(self) -> str:
        """The name of the function, or the class of the module."""
        return getattr(self._function, "__qualname__", None) or type(self._function).__qualname__

    def cache_info(self) -> CacheInfo:
        """Return how many compiled signatures the function keeps, and how many it may keep."""
        return self._cache.info()

    # ------------------------------------------------------------ the fast path

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:  # noqa: C901  one frame: another costs as much as five lines
        """Call the function, compiled."""
        try:
            fast = self._fast
            if fast is None or _TRACE.value is not _EVAL or _FLAX.tmp_static_cache is not None:
                return self._call(args, kwargs)
            given = (*args, *kwargs.values()) if kwargs else args
            if [*map(type, given)] != fast.types or ((kwargs or fast.keywords) and tuple(kwargs) != fast.keywords):
                return self._call(args, kwargs)
            values = [*given[fast.arrays]] if type(fast.arrays) is slice else fast.gather(given)
            if values is None or (fast.signature is not None and [*map(kind_of_input, values)] != fast.signature):
                return self._call(args, kwargs)
            places: Any = ()
            if fast.capture_check is not None:
                found = fast.capture_check.look()
                if found is None:
                    return self._call(args, kwargs)
                models, places = found
                given += models
            variables: Any = None
            for number, kept in fast.roots:
                graph, root = kept(), given[number]
                if graph is None or graph.root() is not root:
                    return self._call(args, kwargs)
                held = graph.read(root)
                if held is None:
                    return self._call(args, kwargs)
                values += held
                variables = graph.variables if variables is None else variables + graph.variables
            if places:
                values += [held_by(node)[key] for node, key in places]
                variables = [*(variables or ()), *(Place(node, key) for node, key in places)]
            try:
                make_body = functools.partial(self._body_of, args, kwargs) if fast.plan.branches else None
                record, out = fast.plan.run(values, variables, make_body)
            except OtherSignatureError:
                self._has_signatures = True
                return self._call(args, kwargs)
            except Exception as error:  # raised while a new path was traced: nothing was done yet
                if isinstance(error, (MoreReadError, *_NO_PATH)) or _has_tracer(error):
                    return self._call(args, kwargs)
                raise
            COUNTS.hits += 1
            if record is None:
                return out
            return self.replay(record, out, self.bind(args, kwargs)[1], fast.plan)
        except Exception as error:
            _compat.hide_frames(error)
            raise

    # ------------------------------------------------------------ the slow path

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self._function(*args, **kwargs)
        if _FLAX.tmp_static_cache is not None:
            return call_with(_compat_jit.take_clones(), self, args, kwargs)
        arguments = self._splitter.split(args, kwargs)
        if _TRACE.value is not _EVAL:
            return self._call_inside(arguments, args, kwargs)
        if self._check:
            return self._checked(arguments, args, kwargs)
        return self._executed(arguments, args, kwargs)

    def _executed(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do a call around which no trace is running; what it raises holds values."""
        if self._captures.attributes():
            wait_for_attributes()
        try:
            return self._call_outside(arguments, args, kwargs)
        except Exception as error:
            if not _has_tracer(error):
                raise
        return self._plainly(arguments, args, kwargs)  # its error holds values, where that of a trace holds tracers

    def _checked(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do a call in plain Python as well; what is lazy is sized before, for both."""
        call = self._bind(arguments, whole=True)
        while self._looks_further(call):  # before the run in plain Python, which is to have copies of all models
            call = self._bind(arguments, whole=True)
        before = Snapshot(*call.reach) if call.lazy else None
        try:
            if call.lazy:
                with contextlib.suppress(*NOT_TRACEABLE):
                    self.sized(arguments, call)
                call = self._bind(arguments, whole=True)
            run = functools.partial(self._executed, arguments, args, kwargs)
            return checked(self.name, self._function, arguments, call, self._captures.attributes(), run)
        except BaseException:
            if before is not None:
                before.restore()
            raise

    def _call_outside(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do a call; the error of a trace may hold what is no value."""
        before: Snapshot | None = None
        try:
            with self._lock:
                call = self._bind(arguments)
                if call.lazy:
                    refuse_lazy_clones(self.name)
                    before = Snapshot(*call.reach)
                try:
                    plan, call = self._plan(arguments, call)
                except NOT_TRACEABLE:  # it decides on values, which a lazy model does not have
                    return self._plainly(arguments, args, kwargs)
                self._fast = self._fast_path_of(args, kwargs, arguments, call, plan)
            if plan.branches and plan.program.is_hopeless:
                return self._plainly(arguments, args, kwargs)
            try:
                record, outputs = self._run(plan, call, arguments)
            except OtherSignatureError:
                with self._lock:
                    plan, call = self._plan(arguments, call, exactly=True)
                record, outputs = self._run(plan, call, arguments)
            except MoreReadError:
                return self._call_outside(arguments, args, kwargs)
            except _NO_PATH as error:  # raised while a new path was traced
                plan.program.is_hopeless, self._fast = not isinstance(error, NotSizedError), None
                return self._plainly(arguments, args, kwargs)
            key = (call.key, call.signature()) if record.only_sorts else None
            out = self.replay(record, outputs, call, plan)
            if key is not None:
                self._note_sorted(key, self._bind(arguments))
            return out
        except BaseException:
            if before is not None:
                before.restore()
            raise

    def _plainly(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do a call for which there can be no program."""
        run = functools.partial(self._function, *args, **kwargs)
        return all_or_nothing(run, self._bind(arguments, whole=True))

    def _note_sorted(self, key: Any, after: Binding) -> None:
        """Let models whose attributes a call has sorted, as transforms of NNX do, have the program of that call."""
        found = (after.key, after.signature())
        if found != key and found[1] == key[1] and not self._captures.sees_order(after.nodes()):
            if len(self._aliases) > 4 * Cache.size:
                self._aliases.clear()
            self._aliases[found] = self._aliases.get(key, key)

    def _fast_path_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: Arguments, call: Binding, plan: CallPlan
    ) -> FastPath | None:
        fast = None if self._check else fast_path_of(args, kwargs, arguments, call, plan, self._captures)
        if fast is not None and self._has_signatures:
            fast.signature = [*map(kind_of_input, arguments.arrays)]
        return fast

    def _call_inside(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do a call in a trace that is running: as one operation of it, or by the function's Python if that decides."""
        with self._lock:
            call = self._bind(arguments)
            plan: CallPlan | None = None
            if not call.lazy:
                try:
                    plan, call = self._plan(arguments, call)
                except Exception as error:
                    if not isinstance(error, NOT_TRACEABLE) and not _has_tracer(error):
                        raise
        if plan is None or plan.branches:
            return self._plainly(arguments, args, kwargs)
        if call.captured.has_objects:
            pass_reads_on(self._reads, call.nodes())
        record, outputs = self._run(plan, call, arguments)
        return self.replay(record, outputs, call, plan)

    def _bind(self, arguments: Arguments, *, whole: bool = False) -> Binding:
        if not self._captures.is_current():
            self._captures = Captures(self._function, self._reads, self._classes)
        captured = self._captures.read(whole=whole)
        return Binding(arguments, captured, _TRACE.value is _EVAL)

    def _plan(self, arguments: Arguments, call: Binding, exactly: bool = False) -> tuple[CallPlan, Binding]:
        """Find a program for a call, or make one; making it may initialize layers, so the call may be another then."""
        quick = call.quick_key(arguments)
        plan = None if exactly or quick is None else self._plans.get(quick)
        if plan is not None and plan.program in self._cache:
            self._cache.touch(plan.program)
            return plan, call
        key = (call.key, call.signature())
        key = self._aliases.get(key, key)
        program = None if call.lazy else self._cache.get(key)
        if program is None:
            was_lazy = call.lazy
            now = self._situation(arguments, call)
            note_trace(self.name, now, self._situations, self._reads)
            self._situations.append(now)
            with LOCK if was_lazy else _UNLOCKED:  # no other thread initializes what is being traced
                program, call = self._make_any(arguments, self._bind(arguments) if was_lazy else call)
            if was_lazy:  # the program is for what it has become
                self._situations[-1] = self._situation(arguments, call)
            key = (call.key, call.signature())
            quick = call.quick_key(arguments)
            if program.can_be_kept:
                self._cache.put(key, program)
        self._cache.touch(program)
        plan = CallPlan(program, call)
        if quick is not None and program in self._cache:
            self._plans[quick] = plan
            if len(self._plans) > 4 * Cache.size:
                del self._plans[next(iter(self._plans))]
        return plan, call

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Arguments, Binding]:
        """Take the arguments of a call apart, and find the leaves of its program."""
        arguments = self._splitter.split(args, kwargs)
        return arguments, self._bind(arguments)

    def make(self, arguments: Arguments, call: Binding) -> tuple[Program, Binding]:
        """Trace the function for a call and make its program.

        Returns:
            The program, and the call without what the function has not read.
        """
        try:
            return self._make_once(arguments, call)
        except (MoreReadError, HiddenModelError, TraceContextError) as error:  # the last: of a Variable of no input
            if not (isinstance(error, MoreReadError) or self._looks_further(call)):
                raise
        return self.make(arguments, self._bind(arguments))

    def _looks_further(self, call: Binding) -> bool:
        """Look for models where the methods of all objects of a call name some; return whether there is more now."""
        known = len(self._captures.sources)
        self._classes |= {type(node) for node in call.nodes()}
        self._captures = Captures(self._function, self._reads, self._classes)
        return len(self._captures.sources) > known

    def _make_once(self, arguments: Arguments, call: Binding) -> tuple[Program, Binding]:
        whole = self._bind(arguments, whole=True) if call.captured.has_objects else call
        body = self._body(arguments, whole)
        program = compile_body(body, whole.leaves, donate=self._donate and call.executing)
        program.can_be_kept &= not arguments.statics or arguments.keeps_statics()
        refuse_leaks(body.own_trace, self.name, program.tape, body)
        check_constants(self.name, program.tape.constants, whole.captured)
        if whole is not call or call.lazy:
            call = self._bind(arguments)
        targets = [*body.targets, *(target for target, _ in body.adopted)]
        named = {*program.takes, *(target for target, _ in program.record.writes)}  # it may write what it never reads
        program.at = call.numbers_of({target: targets[target] for target in named})
        return program, call

    def _make_any(self, arguments: Arguments, call: Binding) -> tuple[Any, Binding]:
        """Do what :meth:`make` does; where Python decides on values, the program has a path for each decision."""
        try:
            return self.make_sized(arguments, call)
        except NOT_TRACEABLE:
            if call.lazy or not call.executing:
                raise
        call = self._bind(arguments)
        check = functools.partial(check_constants, self.name, captured=call.captured)
        noted = functools.partial(note_path, self.name)
        program = BranchingProgram(call.leaves, len(call.targets), self.max_paths, self.name, noted, check)
        program.at = call.numbers_of(dict(enumerate(call.targets)))
        program.is_hopeless = bool(call.references())
        return program, call

    def make_sized(self, arguments: Arguments, call: Binding) -> tuple[Program, Binding]:
        """Do what :meth:`make` does; what is lazy is sized before if it can't be initialized in the trace."""
        if call.lazy and has_optimizer(call):
            call = self.sized(arguments, call)
        try:
            return self.make(arguments, call)
        except (NotSizedError, UninitializedError, ValueError, TraceContextError) as error:
            expected = isinstance(error, (NotSizedError, UninitializedError))
            if not (call.lazy and call.executing) or not (expected or _compat_jit.is_of_another_trace(error)):
                raise
            return self.make(arguments, self.sized(arguments, self._bind(arguments)))

    def sized(self, arguments: Arguments, call: Binding) -> Binding:
        """Initialize the lazy layers that the call reaches; return the call anew."""
        if call.lazy:
            size(self._function, arguments, call, self._captures.attributes())
        return self._bind(arguments)

    def _body(self, arguments: Arguments, call: Binding) -> Body:
        def run(copies: Copies, arrays: Sequence[Any]) -> tuple[Any, Given]:
            args, kwargs = arguments.rebuild(arrays, copies.of)
            given, function = Given(args, kwargs), copies.of(self._function)
            return function(*args, **kwargs), given

        fixed = [(name, value) for name, value, known in self._captures.named(call.captured) if known]
        fixed += [(function.__qualname__, function) for function in self._captures.functions]
        reads = self._reads if call.captured.has_objects else None
        return Body(run, call.reach, call.inputs, call.targets, call.impls, reads, self._captures.attributes(), fixed)

    def _body_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Body:
        return self._body(*self.bind(args, kwargs))

    def _run(self, plan: CallPlan, call: Binding, arguments: Arguments) -> tuple[Effects, Sequence[Any]]:
        leaves = plan.leaves(list(call.values))
        program: Any = plan.program
        if not plan.branches:
            call.check_given(program.record.given)  # before anything is donated
        else:
            program = functools.partial(program, make_body=lambda: self._body(arguments, call))
        if plan.program.ran:
            done = program(leaves)
            COUNTS.hits += 1
            return done
        start = time.perf_counter()
        quiet = plan.branches or plan.program.calls_python  # then Python runs in there, which may print
        with contextlib.nullcontext() if quiet else telling(f"compiling {self.name.rpartition('.')[2]}"):
            done = program(leaves)
        plan.program.ran = True
        COUNTS.add(compiles=1, compile_time=time.perf_counter() - start)
        return done

    def replay(self, record: Effects, outputs: Sequence[Any], call: Binding, plan: CallPlan) -> Any:
        """Write what the program computed, bring about what else the function did, and return what it returned."""
        if plan.branches:
            call.check_given(record.given)
        given = None if record.is_plain else call.given()
        replay = EffectsReplay(record, outputs, call.reach, given, functools.partial(call.leaf_of, plan.program.at))
        if record.changes:
            refuse_changes(self.name, replay.changed())
        targets = [call.targets[plan.program.at[t]] for t, _ in record.writes]
        if not call.executing:
            for thing in (*(t for t in targets if not isinstance(t, Place)), *replay.changed()):
                _compat_jit.check_update(thing)
        for target, (_, out) in zip(targets, record.writes, strict=True):
            write(target, outputs[out.number])
        if record.passes_on:
            _compat_jit.Watch.mark = object()
        replay.change()
        return replay.out()

    def _forget(self, program: Any) -> None:
        """Drop every plan for a program that the cache has dropped."""
        self._plans = {k: p for k, p in self._plans.items() if p.program is not program}
        if self._fast is not None and self._fast.plan.program is program:
            self._fast = None

    def _situation(self, arguments: Arguments, call: Binding) -> TraceKey:
        """Return what a trace is for, to explain it and the next one."""
        facts = facts_of(named(self._function, arguments.leaves()), self._captures.named(call.captured))
        keys = {"the arguments": arguments.key, "what the function reaches": call.captured.key}
        return TraceKey(facts, keys, _compat_jit.trace_context())
