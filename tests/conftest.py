"""Strict settings for every test: no silent promotion of ranks or dtypes; warnings are errors (pyproject).

A plain run takes a sample of the cases of each large table, another one on each minor version of Python. The others
are marked ``exhaustive``. CI takes a larger sample; what is left out there too is marked ``rare`` as well, and
``python -m pytest -m ""`` takes all. A table of which some cases are asked for by name is taken as it is. ``-m quick``
takes the first case of the first tests of each file.

Two thirds of the time is XLA's, so a program is compiled once in a run and read from a folder when it is met again.
Each process has a folder of its own, below ``LAZYMODS_TEST_PROGRAMS`` if that is set: JAX writes to it without a lock.
"""

import atexit
import collections
import contextlib
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "LAZYMODS_TEST_PROGRAMS" not in os.environ:  # workers are children of this process, and find it there
    os.environ["LAZYMODS_TEST_PROGRAMS"] = tempfile.mkdtemp(prefix="lazymods-programs-")
    atexit.register(shutil.rmtree, os.environ["LAZYMODS_TEST_PROGRAMS"], ignore_errors=True)

import jax
import pytest

import lazymods as lm

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
_PROGRAMS = os.path.join(os.environ["LAZYMODS_TEST_PROGRAMS"], os.environ.get("PYTEST_XDIST_WORKER", "main"))
jax.config.update("jax_compilation_cache_dir", _PROGRAMS)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

SAMPLE = 1  # cases of a table
IN_CI = 4
QUICK = 2  # tests of a file
KEPT = 25  # tests after which a process forgets their programs
_kept: list[str] = []
TORCH_SEED = 67280421310721  # PyTorch's own, in a fresh process


def _draw_as_alone() -> None:
    """Let PyTorch draw what it draws in a process of its own, whatever was collected or run before."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(TORCH_SEED)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """A module's own tensors do not depend on other modules."""
    if isinstance(collector, pytest.Module):
        _draw_as_alone()


@pytest.hookimpl(tryfirst=True)  # fixtures draw as well
def pytest_runtest_setup() -> None:
    """A test's tensors do not depend on other tests."""
    _draw_as_alone()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what a plain run and a quick run leave out."""
    tables: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        tables[item.nodeid.partition("[")[0]].append(item)
    of_file = collections.Counter[str]()
    for name, cases in tables.items():
        file = name.partition("::")[0]
        if of_file[file] < QUICK and cases[0].get_closest_marker("slow") is None:
            of_file[file] += 1
            cases[0].add_marker("quick")
        plain, in_ci = sample(len(cases), SAMPLE), sample(len(cases), IN_CI)
        for i, case in enumerate(cases):
            if i not in plain:
                case.add_marker("exhaustive")
                if i not in in_ci:
                    case.add_marker("rare")


@pytest.hookimpl(trylast=True)  # when the fixtures are gone
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Forget what JAX keeps of some files' tests: every full garbage collection, and lm.jit needs some, looks at it.

    To forget takes half a second, so it is done after a number of tests.
    """
    _kept.append(item.nodeid)
    if len(_kept) >= KEPT and (nextitem is None or nextitem.path != item.path):
        _kept.clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def _as_on_a_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where there is a GPU, compare gradients without its short products, and call kernels that are for a CPU."""
    folder = request.path.parent.name if jax.default_backend() != "cpu" else ""
    with contextlib.ExitStack() as stack:
        if folder in ("autograd", "dispatch", "nn"):  # for all threads
            before = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
            stack.callback(jax.config.update, "jax_default_matmul_precision", before)
            jax.config.update("jax_default_matmul_precision", "highest")
        if folder == "dispatch":
            stack.enter_context(jax.default_device(jax.devices("cpu")[0]))
        yield


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """Let arrays and numbers of all types meet, as outside of this suite: optax counts in integers, for one."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(autouse=True)
def _lines_to_write(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever error a test meets, each line to write of it is Python, or a pip command."""
    from helpers import is_pasteable

    wrong, plain = [], lm.LazyError.__init__

    def checked(self: lm.LazyError, *problems: Any, heading: str = "") -> None:
        plain(self, *problems, heading=heading)
        wrong.extend(p.write for p in problems if not is_pasteable(p.write))

    monkeypatch.setattr(lm.LazyError, "__init__", checked)
    yield
    assert not wrong


def sample(count: int, most: int) -> range:
    """Return at most so many numbers below a count, spread evenly."""
    step = -(-count // most)
    return range(sys.version_info.minor % step, count, step)
