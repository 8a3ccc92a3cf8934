"""Run random programs on NNX models in plain Python and under lm.jit, and compare all that they give and leave behind.

    python tests/fuzz/fuzz_programs.py --programs 20000 --seed 0 --workers 16 [--minimize] [--refused] [--lazy]

A program (:mod:`program_grammar`) is Python source: ``make()`` builds the arguments of ``f``, ``between(w, i)`` changes
them before call ``i``, and ``bind(w)`` returns ``f``, which closes over the trainer. It is run on two equal sets of
arguments. If plain Python raises, so must lm.jit, and leave the arguments as they were. By seed, ``lm.jit`` donates,
is nested, or is called in two threads at once, each with arguments of its own. ``--lazy`` runs ``f`` in a lazy
block instead; ``--plain`` in plain Python, which can't differ.

A LazyError instead of a result is counted as refused, and a program in which rounding becomes large as unstable;
``--refused`` shows both.

Prints every difference with its seed and its program, which ``--minimize`` makes small, then one line in all. Exits
with 1 if there was a difference; a program that ends its process, or takes longer than five minutes, is one.

XLA does not optimize here, which makes the programs two times as fast; ``JAX_DISABLE_MOST_OPTIMIZATIONS=0`` undoes it.
"""

import argparse
import functools
import os
import random
import re
import sys
import threading
import time
import unittest.mock
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if __name__ == "__main__":  # its workers inherit them
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
from fuzz.program_grammar import Program, program, smaller
from fuzz.workers import spread

import lazymods as lm
from lazymods._objects.comparing import ROUNDING, Rounding
from lazymods.compile.shadow import compare


def in_a_block(f: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with lm.lazytensor.lazy():
            return f(*args, **kwargs)

    return call


MODES: dict[str, Callable[[Any], Any]] = {
    "jit": lm.jit,
    "donated": lambda f: lm.jit(f, donate_state=True),
    "nested": lambda f: lm.jit(lambda *args, **kwargs: lm.jit(f)(*args, **kwargs)),
    "threads": lm.jit,
    "lazy": in_a_block,
    "plain": lambda f: f,
}
COMPILED = ("jit", "donated", "nested", "threads")


def mode_of(seed: int) -> str:
    return random.Random(~seed).choice(COMPILED)


_ROUNDING = Rounding(1e-4, 1e-5, 5e-6)  # numbers here are around 1, and some sums of six of them cancel


class RefusedError(Exception):
    """lm.jit said no, and why."""


class UnstableError(Exception):
    """Plain Python itself gives something else after a change of the input that is rounding."""


def _called(f: Any, w: dict[str, Any], program: Program, i: int) -> tuple[Any, Exception | None]:
    given = {name: value for name, value in w.items() if name != "trainer"}
    first = dict(list(given.items())[: 1 if program.keywords[i] else None])
    rest = {k: v for k, v in given.items() if k not in first}
    try:
        return f(*first.values(), **rest), None
    except Exception as error:
        return None, error


def _replayed(space: dict[str, Any], program: Program, upto: int, failed: set[int]) -> dict[str, Any]:
    """Return the arguments before call ``upto``, in plain Python, without the calls that failed."""
    w = space["make"]()
    f = space["bind"](w)
    for i in range(upto + 1):
        space["between"](w, i)
        if i < upto and i not in failed:
            _called(f, w, program, i)
    return w


def difference(program: Program, mode: str) -> str | None:
    """Run a program both ways; what a compiled call that raises has changed is as before it.

    Returns:
        The first difference, or None.

    Raises:
        RefusedError: lm.jit refused it.
        UnstableError: There is a difference, and another rounding of ``x`` gives one in plain Python by the same call.
    """
    space: dict[str, Any] = {"__name__": "random_program"}
    exec(compile(program.source(), "<program>", "exec"), space)
    found = _difference(space, program, MODES[mode], mode in COMPILED, 2 if mode == "threads" else 1)
    if found is not None and any(_differs_by(found, _difference(space, program, _shaken(n))) for n in range(3)):
        raise UnstableError(found)
    return found


def _differs_by(found: str, shaken: str | None) -> bool:
    """Return whether a shaken run differs at the call of a difference, or before it."""
    return shaken is not None and _call_of(shaken) <= _call_of(found)


def _call_of(found: str) -> int:
    match = re.search(r"\bcall (\d+)[):]", found)
    assert match, found
    return int(match[1])


def _shaken(seed: int) -> Callable[[Any], Any]:
    """Return what makes of a function one that is called with another rounding of each number of ``x``."""

    def shaken(f: Any) -> Any:
        def call(x: Any, *args: Any, **kwargs: Any) -> Any:
            noise = np.random.default_rng(seed).uniform(-1e-6, 1e-6, np.shape(x)).astype(np.float32)
            return f(x * (1 + noise), *args, **kwargs)

        return call

    return shaken


def _difference(
    space: dict[str, Any], program: Program, run: Any, restores: bool = False, threads: int = 1
) -> str | None:
    plain, failed = space["make"](), set[int]()
    others = [space["make"]() for _ in range(threads)]
    f = space["bind"](plain)
    compiled = [run(space["bind"](w)) for w in others]
    if "trainer" not in program.names:  # else each closes over its own
        compiled = [compiled[0]] * threads
    for i in range(program.calls):
        fits = [_changed(space, w, i) for w in (plain, *others)]
        if any(fits):  # the change does not fit this model
            return None if len({*fits}) == 1 else f"call {i}: the change raised {fits}"
        want, raised = _called(f, plain, program, i)
        answers = _at_once(compiled, others, program, i)
        if isinstance(raised, lm.UninitializedError) and answers[0][1] is None:
            return None  # a lazy layer in a transform: lm.jit sizes it before
        if raised is not None and restores:
            failed.add(i)
            plain = _replayed(space, program, i, failed)
            f = space["bind"](plain)
        for w, (got, error) in zip(others, answers, strict=True):
            if (raised is None) != (error is None):
                return _of_errors(i, raised, error)
            found = _first_difference(f"call {i}", _pairs(want, plain), _pairs(got, w))
            if found is not None:
                return found
    return None


def _changed(space: dict[str, Any], w: dict[str, Any], i: int) -> str | None:
    """Do what happens before a call; return the error that this raised."""
    try:
        space["between"](w, i)
    except Exception as error:
        return repr(error)
    return None


def _at_once(functions: list[Any], worlds: list[Any], program: Program, i: int) -> list[tuple[Any, Exception | None]]:
    """Call functions at the same time, each in a thread of its own; a single one in this thread."""
    if len(functions) == 1:
        return [_called(functions[0], worlds[0], program, i)]
    gate = threading.Barrier(len(functions))

    def call(f: Any, w: Any) -> tuple[Any, Exception | None]:
        gate.wait()
        return _called(f, w, program, i)

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(call, functions, worlds))


def _first_difference(name: str, want: list[tuple[str, Any]], got: list[tuple[str, Any]]) -> str | None:
    try:
        with unittest.mock.patch.dict(ROUNDING, float32=_ROUNDING):
            compare(name, want, got)
    except lm.LazyError as found:
        return str(found).rpartition("\n  write")[0]
    return None


def _of_errors(i: int, raised: Exception | None, error: Exception | None) -> str:
    if isinstance(error, lm.LazyError):
        raise RefusedError(str(error))
    if error is None:
        return f"call {i}: plain Python raised {raised!r}"
    return f"call {i}: raised {type(error).__name__}: {str(error)[:400]}"


def _pairs(out: Any, w: dict[str, Any]) -> list[tuple[str, Any]]:
    return [("output", out), *[(f"argument {name}", value) for name, value in w.items()]]


def minimized(program: Program, mode: str) -> Program:
    """Return a program that still differs, and none of whose parts can be left out."""
    for less in smaller(program):
        try:
            differs = difference(less, mode) is not None
        except (RefusedError, UnstableError):
            differs = False
        if differs:
            return minimized(less, mode)
    return program


class Outcome(NamedTuple):
    """What came of a seed: ``kind`` is "ran", "refused", "unstable" or "differs"."""

    kind: str
    text: str = ""


_CLEARED = 200  # programs after which a process forgets what it has compiled
_done = 0


def outcome(seed: int, mode: str | None = None, minimize: bool = False) -> Outcome:
    """Run the program of a seed."""
    global _done
    _done += 1
    if _done % _CLEARED == 0:
        jax.clear_caches()
    made, mode = program(seed), mode or mode_of(seed)
    try:
        found = difference(made, mode)
        if found is None:
            return Outcome("ran")
        if minimize:
            made = minimized(made, mode)
            found = difference(made, mode) or found
    except RefusedError as refused:
        return Outcome("refused", f"--- seed {seed} ({mode}) refused\n{refused}")
    except UnstableError as unstable:
        return Outcome("unstable", f"--- seed {seed} ({mode}) unstable\n{unstable}")
    return Outcome("differs", f"--- seed {seed} ({mode})\n{found}\n{made.own_source()}")


def main() -> int:
    """Run the programs that the command line asks for."""
    parser = argparse.ArgumentParser(description="Random programs under lm.jit.")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="how many processes")
    parser.add_argument("--minimize", action="store_true", help="make programs that differ small")
    parser.add_argument("--refused", action="store_true", help="show what was refused")
    parser.add_argument("--mode", choices=MODES, help="left out, one of those of lm.jit by seed")
    parser.add_argument("--lazy", dest="mode", action="store_const", const="lazy")
    parser.add_argument("--plain", dest="mode", action="store_const", const="plain")
    options = parser.parse_args()
    start, counts, failed = time.monotonic(), Counter[str](), list[int]()
    do = functools.partial(outcome, mode=options.mode, minimize=options.minimize)
    seeds = range(options.seed, options.seed + options.programs)
    found = ((s, do(s)) for s in seeds) if options.workers == 1 else spread(do, seeds, options.workers)
    for seed, result in found:
        if isinstance(result, Exception):
            result = Outcome("differs", f"--- seed {seed}\n{result}\n{program(seed).own_source()}")
        counts[result.kind] += 1
        if result.kind == "differs" or (result.kind != "ran" and options.refused):
            print(result.text, flush=True)
        if result.kind == "differs":
            failed.append(seed)
    took = time.monotonic() - start
    ended = f"{counts['differs']} differences{f' (seeds {sorted(failed)})' if failed else ''}"
    print(
        f"{options.programs} programs in {took:.0f} s: {counts['ran']} ran, {counts['refused']} refused, "
        f"{counts['unstable']} unstable, {ended}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
