"""The grammar of random programs: plain Python does not differ from itself, and a planted fault is made small."""

from typing import Any

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
