"""A new jax or flax that has renamed what was private: see ``taking_away.py``, which finds the names in the source."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import lazymods as lm
from lazymods import _compat

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import taking_away  # noqa: E402  once its folder is found


def outcomes(only: str = "") -> dict[str, dict[str, str]]:
    """What works without each of the names."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / "taking_away.py"), "--only", only]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


def test_names_are_read_from_the_source() -> None:
    source = taking_away.names()
    assert {"jax._src.core.trace_ctx", "jax._src.pjit._infer_params_cached", ".swap_local", "._check_value"} <= set(
        source
    )
    assert not {".shape", ".dtype", ".append", ".get_value"} & set(source)


@pytest.mark.slow
def test_with_all_names_there_is_no_warning() -> None:
    assert outcomes("none of them") == {"nothing": dict.fromkeys((*taking_away.ESSENTIAL, *taking_away.OTHERS), "ok")}


@pytest.mark.slow
def test_without_a_name_all_but_its_feature_works() -> None:
    found = outcomes()
    assert found.keys() == {"nothing", *taking_away.names()}
    without = {name: {s: o for s, o in steps.items() if s in taking_away.ESSENTIAL} for name, steps in found.items()}
    broken = {name: steps for name, steps in without.items() if not set(steps.values()) <= {"ok", "told"}}
    assert broken == {}  # at least 95% of the names is promised
    unclear = {n: s for n, steps in found.items() for s in steps.items() if s[1] not in ("ok", "told", "refused")}
    assert unclear == {}
    lost = {name for name, steps in found.items() if steps["lm.jit"] == "refused"}
    assert lost == set()  # nnx.jit takes its place


@pytest.mark.slow
def test_what_has_no_public_way_says_name_and_versions() -> None:
    found = outcomes("jax._src.literals.TypedNdArray")["jax._src.literals.TypedNdArray"]
    assert found["lazy tensors"] == "refused"
    assert found["lm.jit"] == "told"


def test_a_state_is_saved_without_what_only_lazy_tensors_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lazymods._compat.values", None)
    monkeypatch.delitem(vars(_compat), "values", raising=False)
    for suffix in (".safetensors", ".npz", ""):
        lm.save({"a": jnp.ones(3)}, tmp_path / f"s{suffix}")
        lm.load(state := {"a": jnp.zeros(3)}, tmp_path / f"s{suffix}")
        assert state["a"].tolist() == [1, 1, 1]
