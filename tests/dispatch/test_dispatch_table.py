"""The table that registrations make, for every valid set of them: by facts written down once, and by PyTorch itself."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest

import lazymods as lm

BACKENDS = ["CPU", "XLA", "FPGA", "Lazy"]  # those of PyTorch's own check of its table
AUTOGRAD = ["AutogradCPU", "AutogradXLA", "AutogradOther", "AutogradLazy"]
ALIASES = ["CompositeExplicitAutograd", "Autograd", "CompositeImplicitAutograd"]
OF = dict(zip(BACKENDS, AUTOGRAD, strict=True)) | {
    **{"CUDA": "AutogradCUDA", "TPU": "AutogradTPU", "Meta": "AutogradMeta"}
}

# What of a backend, its Autograd key and the aliases is registered: what the backend runs, and its Autograd key.
# b: the backend, a: its Autograd key, E, A, I: the aliases in the order above; '?': ambiguous, for AutogradOther alone.
FACTS = """
-     - -
b     b -
a     - a
E     E -
A     - A
I     I I
ba    b a
bE    b -
bA    b A
bI    b -?
aE    E a
aA    - a
aI    I a
EA    E A
AI    I I
baE   b a
baA   b a
baI   b a
bEA   b A
bAI   b A?
aEA   E a
aAI   I a
baEA  b a
baAI  b a
"""
KINDS = {"E": "default backend kernel", "A": "autograd kernel", "I": "math kernel", "b": "kernel", "a": "kernel"}


def facts() -> dict[str, tuple[str, str]]:
    rows = [line.split() for line in FACTS.split("\n") if line]
    return {"" if name == "-" else name: (backend, autograd) for name, backend, autograd in rows}


def sets() -> Iterator[tuple[str, ...]]:
    """Every set of keys that PyTorch lets one register."""
    for choice in itertools.product([False, True], repeat=11):
        keys = tuple(itertools.compress([*BACKENDS, *AUTOGRAD, *ALIASES], choice))
        if not {ALIASES[0], ALIASES[2]} <= set(keys):
            yield keys


def kernel(key: str) -> Any:
    return (min, max) if key.startswith("Autograd") else min


def operator(keys: tuple[str, ...]) -> lm.dispatch.Operator:
    op = lm.dispatch.Operator("op")
    for key in keys:
        op.register(key, kernel(key))
    return op


def told(keys: tuple[str, ...], backend: str) -> tuple[tuple[str | None, str], tuple[str | None, str]]:
    """What the facts say of a backend and of its Autograd key."""
    names = {"b": backend, "a": OF[backend], "E": ALIASES[0], "A": ALIASES[1], "I": ALIASES[2]}
    of_backend, of_autograd = facts()["".join(letter for letter, key in names.items() if key in keys)]
    if of_autograd.endswith("?"):
        if backend == "FPGA":
            return (names[of_backend], KINDS[of_backend]), (None, "ambiguous autogradother")
        of_autograd = of_autograd[:-1]
    return (
        (None, "missing") if of_backend == "-" else (names[of_backend], KINDS[of_backend]),
        (None, "backend fallback") if of_autograd == "-" else (names[of_autograd], KINDS[of_autograd]),
    )


def test_every_valid_set_follows_the_facts() -> None:
    count = 0
    for keys in sets():
        table = operator(keys).dispatch_table()
        for backend, autograd in OF.items():
            assert (table[backend], table[autograd]) == told(keys, backend), (keys, backend)
        count += 1
    assert count == 3 * 2**9


@pytest.mark.parametrize("backend", ["CUDA", "TPU", "Meta"])
def test_other_backends_follow_them_as_well(backend: str) -> None:
    for choice in itertools.product([False, True], repeat=5):
        keys = tuple(itertools.compress([backend, OF[backend], *ALIASES], choice))
        if not {ALIASES[0], ALIASES[2]} <= set(keys):
            table = operator(keys).dispatch_table()
            assert (table[backend], table[OF[backend]]) == told(keys, backend), keys


def test_pytorch_computes_the_same() -> None:
    """By the Python face of its own dispatcher."""
    dispatcher = pytest.importorskip("torch._python_dispatcher").PythonDispatcher
    for keys in sets():
        torch = dispatcher()
        torch.register(list(keys))
        lines = [re.match(r"(\w+)\s+(\S+) \[(.*)\]$", line) for line in torch.dispatchTable().splitlines()]
        del torch  # it owns the name
        theirs = {line[1]: (line[2].removeprefix("fn_"), line[3]) for line in lines if line}
        ours = operator(keys).dispatch_table()
        for key in [*BACKENDS, *AUTOGRAD]:
            mine = ours[key]
            if key not in theirs:  # what it shows of a fallback has no name
                assert mine.key is None and mine.kind == ("backend fallback" if key in AUTOGRAD else "missing")
            elif mine.kind == "ambiguous autogradother":
                assert theirs[key] == ("ambiguous_autogradother", mine.kind)
            else:
                assert theirs[key] == (mine.key, mine.kind), (keys, key)


# ---------------------------------------------------------------- as text


def test_it_prints_one_line_a_key() -> None:
    op = operator(("CPU", "Autograd"))
    assert str(op.dispatch_table()).splitlines()[:3] == [
        "CPU            CPU [kernel]",
        "AutogradCPU    Autograd [autograd kernel]",
        "CUDA           [missing]",
    ]
    assert str(op.registrations()) == "CPU       min\nAutograd  (min, max)"
    assert str(op.keys()).splitlines() == list(op.keys())
    assert repr(op) == "Operator('op', registered: CPU, Autograd)"
    assert str(lm.dispatch.Operator("none").registrations()) == "registrations of none: nothing"


def test_it_renders_in_a_notebook_and_escapes() -> None:
    op = lm.dispatch.Operator("a<b")
    op.register("CPU", lambda x: x)
    html: Any = op.registrations()
    text = html._repr_html_()
    assert "registrations of a&lt;b" in text and "&lt;lambda&gt;" in text and "<lambda>" not in text
    assert text.count("<tr>") == 1
