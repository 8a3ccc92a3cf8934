"""Run random programs on NNX models in plain Python and under lm.jit, and compare all that they give and leave behind.

    python tests/fuzz/fuzz_programs.py --programs 20000 --seed 0 [--minimize] [--lazy] [--plain]

A program is Python source: classes, ``make()``, which builds the arguments of ``f``, and ``between(w, i)``, which
changes them before call ``i``; ``bind(w)`` returns ``f``, which closes over the trainer. It is run on two equal sets of
arguments. If plain Python raises, so must lm.jit, and leave the arguments as they were; a LazyError instead of a result
is counted as refused. ``--lazy`` runs ``f`` in a lazy block instead, ``--plain`` in plain Python, which can't differ.
Exits with 1 if there was a difference.
"""

import argparse
import dataclasses
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import lazymods as lm
from lazymods.compile.shadow import compare

PRELUDE = """
from typing import Any, NamedTuple
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from jax.sharding import PartitionSpec as P

class Pair(NamedTuple):
    a: Any
    b: Any

class Block(nnx.Module):
    def __init__(self, rngs):
        self.fc = nnx.Linear(3, 3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.scale = 2
        self.table = {"a": 1, "b": 2.0}
        self.seen = nnx.Variable(jnp.zeros((), jnp.int32), tag=1)
        self.kept = nnx.Param(jnp.ones(3))
    def __call__(self, x):
        return jnp.tanh(self.fc(x)) * self.scale + self.kept[...]

class Trainer:
    def __init__(self, model):
        self.model, self.steps, self.log, self.best = model, 0, [], None

@jax.custom_vjp
def twice(x): return x * 2
twice.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 3,))
mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))

"""

# How each argument is made, in this order, and what may happen to it between two calls.
ARGUMENTS: dict[str, tuple[str, list[str]]] = {
    "x": (
        "jnp.arange(6, dtype=jnp.float32).reshape(2, 3) / 6",
        ["w['x'] = w['x'] + 1", "w['x'] = np.asarray(w['x']) - 2"],
    ),
    "model": (
        "Block(nnx.Rngs(0))",
        [
            "w['model'].scale = {0: 1, 1: 1.0, 2: True}[i % 3]",
            "w['model'].table = dict(reversed(w['model'].table.items()))",
            "w['model'].fc, w['model'].other = nnx.Linear(3, 3, rngs=nnx.Rngs(i)), w['model'].fc",
            "w['model'].norm.kernel = w['model'].fc.kernel",
            "w['model'].seen.set_metadata('tag', [2, 2.0, True][i % 3])",
            "w['model'].kept[...] = w['model'].kept[...] * 2",
            "w['model'].eval()",
            "del w['model'].kept; w['model'].kept = nnx.Param(jnp.ones(3) * i)",
        ],
    ),
    "opt": ("", []),
    "trainer": (
        "Trainer(Block(nnx.Rngs(1)))",
        ["w['trainer'].steps = float(w['trainer'].steps)", "w['trainer'].log.append(i)"],
    ),
    "state": ("nnx.state(Block(nnx.Rngs(2)), nnx.Param)", ["w['state'] = jax.tree.map(lambda v: v + 1, w['state'])"]),
    "var": (
        "nnx.Variable(jnp.ones(3), note='a')",
        ["w['var'][...] = w['var'][...] + 1", "w['var'].set_metadata('note', 1)"],
    ),
    "key": ("jax.random.key(3)", ["w['key'] = jax.random.fold_in(w['key'], i)"]),
    "n": ("2", ["w['n'] = i", "w['n'] = [1, 1.0, True][i % 3]"]),
    "lr": ("0.5", ["w['lr'] = 0.5 / (i + 1)", "w['lr'] = -0.0", "w['lr'] = np.float32(i)"]),
    "flag": ("True", ["w['flag'] = not w['flag']", "w['flag'] = np.bool_(i % 2)"]),
    "c": ("1 + 2j", ["w['c'] = w['c'] * 1j"]),
    "ns": ("np.float32(1.5)", ["w['ns'] = np.float32(i)", "w['ns'] = np.int32(i)"]),
    "na": ("np.arange(3, dtype=np.float32)", ["w['na'] = w['na'] + 1", "w['na'][0] = 7"]),
    "d": (
        "{'p': (jnp.ones(3), 2), 'q': Pair(jnp.zeros(3), [1.0])}",
        [
            "w['d'] = dict(reversed(w['d'].items()))",
            "w['d']['q'].b.append(float(i))",
            "w['d']['p'] = (w['d']['p'][0] + 1, i)",
        ],
    ),
}

OPTIMIZERS = (
    "optax.sgd(0.1, momentum=0.9)",
    "optax.adam(0.1)",
    "optax.chain(optax.clip(1.0), optax.adam(0.1))",
    "optax.masked(optax.adam(0.1), lambda p: jax.tree.map(lambda v: v.ndim > 1, p))",
    "optax.multi_transform({'a': optax.sgd(0.1), 'b': optax.adam(0.1)}, "
    "lambda p: jax.tree.map(lambda v: 'a' if v.ndim > 1 else 'b', p))",
)

_LOSS = "lambda m, x: (m(x) ** 2).mean()"
# Lines of ``f``; ``y`` is an array (2, 3). By what they need.
STATEMENTS: tuple[tuple[str, str], ...] = (
    ("model", "y = model(y)"),
    ("model", "y = model.norm(y)"),
    ("model", "y = model.drop(y)"),
    ("model", "model.seen[...] += 1"),
    ("model", "model.kept[...] = model.kept[...] * 0.5 + y.mean()"),
    ("model", f"y = y - nnx.grad({_LOSS})(model, y)['fc']['bias'][...]"),
    ("model", f"v, g = nnx.value_and_grad({_LOSS})(model, y); y = y + v"),
    ("model", "y = nnx.jit(lambda m, x: m(x))(model, y)"),
    ("model", "y = nnx.remat(lambda m, x: m(x))(model, y)"),
    ("model", "y = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(model, y)"),
    ("model", "y = nnx.cond(y.sum() > 0, lambda m, x: m(x), lambda m, x: x * 2, model, y)"),
    ("model", "y, _ = nnx.scan(lambda c, m: (m.fc(c), None), in_axes=(nnx.Carry, None), length=2)(y, model)"),
    ("model", "_, y = nnx.fori_loop(0, 2, lambda i, c: (c[0], c[0].fc(c[1])), (model, y))"),
    ("model", "model.table = {k: model.table[k] for k in sorted(model.table, reverse=True)}"),
    ("model", "model.table['b'], model.table['z'] = model.table['a'], 3"),
    ("model", "model.scale = {int: float, float: bool}.get(type(model.scale), int)(model.scale)"),
    ("model", "model.seen.set_metadata('tag', float(model.seen.get_metadata()['tag']))"),
    ("model", "model.seen.set_metadata('more', y.shape)"),
    ("model", "model.extra = nnx.Param(y.mean(0))"),
    ("model", "model.more = nnx.Linear(3, 3, rngs=nnx.Rngs(7)); y = model.more(y)"),
    ("model", "model.fc.bias, model.kept = model.kept, model.fc.bias"),
    ("model", "model.twin = model.fc"),
    ("model", "if hasattr(model, 'extra'): del model.extra"),
    ("model", "if int(model.seen[...]) > 1: y = y * 3"),
    ("model", "y = y + model.table['a'] + float(model.table['b'])"),
    ("model opt", f"opt.update(model, nnx.grad({_LOSS})(model, y))"),
    ("model opt", f"nnx.jit(lambda m, o, x: o.update(m, nnx.grad({_LOSS})(m, x)))(model, opt, y)"),
    ("trainer", "trainer.steps += 1"),
    ("trainer", "trainer.log.append(trainer.steps)"),
    ("trainer", "trainer.best = y"),
    ("trainer", "y = trainer.model(y) * trainer.steps"),
    ("trainer", "if trainer.steps > 2: y = y + len(trainer.log)"),
    ("state", "y = y + state['fc']['bias'][...]"),
    ("var", "var[...] = var[...] + y.mean()"),
    ("var", "var.set_metadata('note', var.get_metadata()['note'] * 1)"),
    ("var model", "model.kept[...], var[...] = var[...], model.kept[...]"),
    ("key", "key, sub = jax.random.split(key); y = y + jax.random.normal(sub, (2, 3))"),
    ("n", "y = y * n"),
    ("n", "if n > 1: y = y - 1"),
    ("lr", "y = y * lr"),
    ("lr", "y = y + (1 if str(lr).startswith('-') else 0)"),
    ("flag", "y = y * 2 if flag else y"),
    ("c", "z = y * c; y = z.real + z.imag"),
    ("ns", "y = y * ns.astype(np.float32)"),
    ("na", "y = y + na"),
    ("d", "y = y + d['p'][0] * d['p'][1] + d['q'].a"),
    ("d", "y = y * sum(d['q'].b)"),
    ("d", "d['p'] = (y[0], d['p'][1])"),
    ("", "if y.sum() > 1: y = y * 0.5"),
    ("", "k = 0\nwhile float(abs(y).max()) > 4 and k < 3: y, k = y * 0.5, k + 1"),
    ("", "y = y + int(abs(y[0, 0]) + 0.25)"),
    ("", "y = jax.jit(lambda v: v * 2)(y)"),
    ("", "y = jax.grad(lambda v: (v ** 2).sum())(y)"),
    ("", "y = jax.vmap(jnp.sin)(y)"),
    ("", "y = jax.lax.cond(y.sum() > 0, lambda v: v + 1, lambda v: v - 1, y)"),
    ("", "y = jax.lax.fori_loop(0, 2, lambda i, v: v * 0.5, y)"),
    ("", "y = jax.lax.while_loop(lambda v: v.sum() > 9, lambda v: v * 0.5, y)"),
    ("", "y, _ = jax.lax.scan(lambda c, v: (c + v, None), y, y)"),
    ("", "y = jax.checkpoint(jnp.cos)(y)"),
    ("", "y = y + jax.grad(lambda v: twice(v).sum())(y)"),
    ("", "y = jax.shard_map(lambda v: v * 2, mesh=mesh, in_specs=P('d'), out_specs=P('d'))(y)"),
    ("n", "if n == 1: raise ValueError('one')"),
)
RESULTS = ("y", "(y, {'loss': y.mean()})", "Pair(y.sum(), [1, y])", "None", "{'f': 0.5, 'n': 3, 'y': y}")


def in_a_block(f: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with lm.lazytensor.lazy():
            return f(*args, **kwargs)

    return call


MODES: dict[str, Callable[[Any], Any]] = {
    "jit": lm.jit,
    "donated": lambda f: lm.jit(f, donate_state=True),
    "nested": lambda f: lm.jit(lambda *args, **kwargs: lm.jit(f)(*args, **kwargs)),
    "lazy": in_a_block,
    "plain": lambda f: f,
}
COMPILED = ("jit", "donated", "nested")


@dataclasses.dataclass(frozen=True)
class Program:
    """A random program; its source is :meth:`source`."""

    lines: tuple[str, ...]
    changes: tuple[tuple[int, str], ...]
    names: tuple[str, ...]
    optimizer: str
    result: str
    keywords: bool
    calls: int = 4

    def source(self) -> str:
        makes = [f"    w[{n!r}] = {self.make(n)}" for n in self.names]
        body = [f"        {part}" for line in self.lines for part in line.split("\n")]
        changes = [f"    if i == {i}: {change}" for i, change in self.changes]
        parameters = ", ".join(n for n in self.names if n != "trainer")
        head = [
            "def bind(w):",
            "    trainer = w.get('trainer')",
            f"    def f({parameters}):",
            "        y = jnp.asarray(x)",
        ]
        made = ["def make():", "    w = {}", *makes, "    return w", ""]
        end = [f"        return {self.result}", "    return f", "", "def between(w, i):", *changes, "    pass"]
        return PRELUDE + "\n".join([*made, *head, *body, *end])

    def make(self, name: str) -> str:
        return f"nnx.Optimizer(w['model'], {self.optimizer}, wrt=nnx.Param)" if name == "opt" else ARGUMENTS[name][0]


def program(seed: int) -> Program:
    """Return the program of a seed."""
    rng = random.Random(seed)
    chosen = rng.choices(STATEMENTS, k=rng.randint(1, 6))
    needed = {"x", *(n for needs, _ in chosen for n in needs.split())} | set(rng.choices(list(ARGUMENTS), k=1))
    needed |= {"model"} if "opt" in needed else set()
    names = tuple(n for n in ARGUMENTS if n in needed)
    possible = [c for n in names for c in ARGUMENTS[n][1]]
    changes = tuple((i, rng.choice(possible)) for i in range(1, 4) for _ in range(rng.randint(0, 2)))
    lines = tuple(line for _, line in chosen)
    return Program(lines, changes, names, rng.choice(OPTIMIZERS), rng.choice(RESULTS), rng.random() < 0.5)


def mode_of(seed: int) -> str:
    return random.Random(~seed).choice(COMPILED)


class RefusedError(Exception):
    """lm.jit said no, and why."""


def _called(f: Any, w: dict[str, Any], program: Program) -> tuple[Any, Exception | None]:
    given = {name: value for name, value in w.items() if name != "trainer"}
    first = dict(list(given.items())[: 1 if program.keywords else None])
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
            _called(f, w, program)
    return w


def difference(program: Program, mode: str) -> str | None:
    """Run a program both ways; what a compiled call that raises has changed is as before it.

    Returns:
        The first difference, or None.

    Raises:
        RefusedError: lm.jit refused it.
    """
    space: dict[str, Any] = {"__name__": "random_program"}
    exec(compile(program.source(), "<program>", "exec"), space)
    plain, other, failed = space["make"](), space["make"](), set[int]()
    f, compiled, restores = space["bind"](plain), MODES[mode](space["bind"](other)), mode in COMPILED
    for i in range(program.calls):
        for w in (plain, other):
            try:
                space["between"](w, i)
            except Exception as error:  # the change does not fit this model
                if w is plain:
                    return None
                return f"call {i}: the change raised {error!r}"
        want, raised = _called(f, plain, program)
        got, error = _called(compiled, other, program)
        if raised is not None and error is None:
            return f"call {i}: plain Python raised {raised!r}"
        if raised is None and isinstance(error, lm.LazyError):
            raise RefusedError(str(error))
        if raised is None and error is not None:
            return f"call {i}: raised {type(error).__name__}: {str(error)[:400]}"
        if raised is not None and restores:
            failed.add(i)
            plain = _replayed(space, program, i, failed)
            f = space["bind"](plain)
        try:
            compare(f"call {i}", _pairs(want, plain), _pairs(got, other))
        except lm.LazyError as found:
            return str(found).rpartition("\n  write")[0]
    return None


def _pairs(out: Any, w: dict[str, Any]) -> list[tuple[str, Any]]:
    return [("output", out), *[(f"argument {name}", value) for name, value in w.items()]]


def smaller(program: Program) -> Iterator[Program]:
    """Return the programs with one line, change, or call less."""
    for n in range(len(program.lines)):
        yield dataclasses.replace(program, lines=program.lines[:n] + program.lines[n + 1 :])
    for n in range(len(program.changes)):
        yield dataclasses.replace(program, changes=program.changes[:n] + program.changes[n + 1 :])
    for name in program.names:
        text = "\n".join([*program.lines, *[c for _, c in program.changes], "x" if name == "x" else ""])
        if name not in text and not (name == "model" and "opt" in program.names):
            yield dataclasses.replace(program, names=tuple(n for n in program.names if n != name))
    if program.result != "y":
        yield dataclasses.replace(program, result="y")
    if program.calls > 1:
        yield dataclasses.replace(program, calls=program.calls - 1)


def minimized(program: Program, mode: str) -> Program:
    """Return a program that still differs, and none of whose parts can be left out."""
    for less in smaller(program):
        try:
            differs = difference(less, mode) is not None
        except RefusedError:
            differs = False
        if differs:
            return minimized(less, mode)
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description="Random programs under lm.jit.")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minimize", action="store_true")
    parser.add_argument("--lazy", action="store_true")
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.programs):
        mode = "lazy" if options.lazy else "plain" if options.plain else mode_of(seed)
        made = program(seed)
        try:
            found = difference(made, mode)
        except RefusedError as refused:
            counts["refused"] += 1
            print(f"--- seed {seed} ({mode}) refused\n{refused}", flush=True)
            continue
        counts["ran" if found is None else "differences"] += 1
        if found is not None:
            made = minimized(made, mode) if options.minimize else made
            text = made.source().replace(PRELUDE, "")
            print(f"--- seed {seed} ({mode})\n{difference(made, mode) or found}\n{text}", flush=True)
        if seed % 100 == 99:
            jax.clear_caches()
    print(dict(counts))
    return 1 if counts["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())
