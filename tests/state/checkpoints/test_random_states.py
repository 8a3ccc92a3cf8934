"""A few of the many random states that tests/fuzz/fuzz_states.py saves and loads."""

from pathlib import Path

import pytest
from fuzz.random_states import fault

STATES = 150


@pytest.mark.slow
def test_states_come_back_or_are_refused_by_name(tmp_path: Path) -> None:
    outcomes = [fault(1, number, tmp_path) for number in range(STATES)]
    assert [f"state {i}: {told}" for i, (told, _) in enumerate(outcomes) if told] == []
    assert sum(refused for _, refused in outcomes) < STATES / 3  # most are saved
