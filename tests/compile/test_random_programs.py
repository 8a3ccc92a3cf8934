"""The grammar of random programs: plain Python does not differ from itself, and a planted fault is made small."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from fuzz import fuzz_programs as fuzz
from fuzz.program_grammar import OPTIMIZERS, Program, program

import lazymods as lm


@pytest.mark.parametrize("seed", range(12))
def test_plain_python_does_not_differ_from_itself(seed: int) -> None:
    assert fuzz.difference(program(seed), "plain") is None


def test_a_program_is_the_same_for_a_seed_and_differs_between_seeds() -> None:
    assert program(3) == program(3)
    assert len({program(seed).source() for seed in range(50)}) > 45


FAULTS: dict[str, Any] = {
    "stale number": lambda f: lambda x, n, *rest: f(x, 2, *rest),
    "lost effect": lambda f: lambda *args: args[0] * 2.0,
    "refusal by another error": lambda f: lambda *args: 1 / 0,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_made_small(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fuzz.MODES, "plain", FAULTS[fault])
    made = Program(("y = y * n", "y = jnp.sin(y)"), ((1, "w['n'] = 5"),), ("x", "n"), OPTIMIZERS[0], "y", (False,) * 4)
    assert fuzz.difference(made, "plain") is not None
    small = fuzz.minimized(made, "plain")
    assert len(small.lines) <= 1
    assert fuzz.difference(small, "plain") is not None


def test_a_refusal_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(f: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise lm.LazyError

        return call

    monkeypatch.setitem(fuzz.MODES, "plain", refuses)
    with pytest.raises(fuzz.RefusedError):
        fuzz.difference(Program((), (), ("x",), OPTIMIZERS[0], "y", (False,) * 4), "plain")


# ---------------------------------------------------------------- random programs

_DRAWS = ("random.normal", "drop(", "Dropout", "rngs=rngs")  # XLA takes half a second to compile what draws
_STEPS = ("opt.update", "o.update")
_TOGETHER = 10
_MODES = ("jit", "donated", "nested")


def small(seed: int) -> Program:
    """Return the program of a seed without most of what makes it slow."""
    made = program(seed)
    return dataclasses.replace(made, lines=made.lines[:2], calls=3)


def seeds(count: int, slow: int) -> list[int]:
    """Return the first seeds whose small programs have so many slow lines."""
    found = []
    for seed in itertools.count():
        if sum(word in line for line in small(seed).lines for word in (*_DRAWS, *_STEPS)) == slow:
            found.append(seed)
            if len(found) == count:
                return found
    raise AssertionError


QUICK, SLOW, THREADED = seeds(270, 0), seeds(15, 1), seeds(285, 0)[270:]
SEEDS = [(seed, _MODES[seed % 3]) for seed in QUICK + SLOW] + [(seed, "threads") for seed in THREADED]


@pytest.fixture(scope="module")
def _as_users_have_it() -> Iterator[None]:
    """Let numbers be promoted, as they are unless it is forbidden, and XLA not optimize."""
    changed = {
        "jax_numpy_rank_promotion": "allow",
        "jax_numpy_dtype_promotion": "standard",
        "jax_disable_most_optimizations": True,
    }
    before = {name: jax.config.values[name] for name in changed}
    for name, value in changed.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("_as_users_have_it")
@pytest.mark.parametrize("start", range(0, len(SEEDS), _TOGETHER))
def test_random_programs_do_what_plain_python_does(start: int) -> None:
    found = {(seed, mode): fuzz.difference(small(seed), mode) for seed, mode in SEEDS[start : start + _TOGETHER]}
    assert {key: said for key, said in found.items() if said is not None} == {}


@pytest.mark.usefixtures("_as_users_have_it")
@pytest.mark.parametrize("seed", range(12))
def test_lazy_blocks_do_what_plain_python_does(seed: int) -> None:
    assert fuzz.difference(small(seed), "lazy") is None
