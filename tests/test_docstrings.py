"""The examples in the docstrings run and print what they say, each with the imports that it shows."""

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import jax
import pytest

import lazymods

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules() -> Iterator[str]:
    yield lazymods.__name__
    for module in pkgutil.walk_packages(lazymods.__path__, f"{lazymods.__name__}."):
        yield module.name


def examples() -> Iterator[doctest.DocTest]:
    finder = doctest.DocTestFinder()
    for name in modules():
        for test in finder.find(importlib.import_module(name), name, globs={"__name__": name}):
            if test.examples:
                yield test


TESTS = sorted(examples(), key=lambda test: test.name)


def test_no_example_is_overlooked():
    written = sum(text.count(">>> ") for text in map(inspect.getsource, map(importlib.import_module, modules())))
    assert written > 0
    assert sum(len(test.examples) for test in TESTS) == written


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.name)
def test_example(test: doctest.DocTest):
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # as users have them
        result = runner.run(test, out=said.append, clear_globs=False)
    assert result.attempted == len(test.examples) > 0
    assert result.failed == 0, "".join(said)
