"""Strict settings for every test: no silent promotion of ranks or dtypes; warnings are errors (pyproject).

A plain run takes a sample of the cases of each large table, another one on each minor version of Python. The others
are marked ``exhaustive``. CI takes a larger sample; what is left out there too is marked ``rare`` as well, and
``python -m pytest -m ""`` takes all. A table of which some cases are asked for by name is taken as it is. ``-m quick``
takes the first case of the first tests of each file.
"""

import collections
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

SAMPLE = 3  # cases of a table
IN_CI = 20
QUICK = 3  # tests of a file


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


def sample(count: int, most: int) -> range:
    """Return at most so many numbers below a count, spread evenly."""
    step = -(-count // most)
    return range(sys.version_info.minor % step, count, step)
