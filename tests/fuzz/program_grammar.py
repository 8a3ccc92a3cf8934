"""The grammar of random programs: what their arguments are, what changes them, and what the programs do."""

import dataclasses
import random
from collections.abc import Iterator

PRELUDE = """
from typing import Any, NamedTuple
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
import lazymods as lm
from math import copysign
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
        return jnp.arctan(self.fc(x)) * self.scale + self.kept[...]  # tanh is 1 to rounding soon, its slope is rounding

class LazyBlock(nnx.Module):
    def __init__(self, rngs):
        self.fc = lm.nn.LazyLinear(3, rngs=rngs)
        self.norm = lm.nn.LazyLayerNorm(rngs=rngs)
    def __call__(self, x):
        return self.norm(self.fc(x)) + 0.5  # no sum of 0, on which a program may decide

class Trainer:
    def __init__(self, model):
        self.model, self.steps, self.log, self.best = model, 0, [], None

@jax.custom_vjp
def twice(x): return x * 2
twice.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 3,))

@nnx.custom_vjp
def doubled(m, x): return m.fc(x) * 2
def doubled_fwd(m, x): return doubled(m, x), (m, x)
def doubled_bwd(residuals, gradient):
    (of_m, of_x), g = gradient
    m, x = residuals
    return jax.tree.map(lambda v: v + 1, of_m), g @ m.fc.kernel[...].T
doubled.defvjp(doubled_fwd, doubled_bwd)
mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))

"""

# How each argument is made, in this order. "opt" and "lopt" depend on the optimizer that was drawn.
ARGUMENTS: dict[str, str] = {
    "x": "jnp.arange(6, dtype=jnp.float32).reshape(2, 3) / 6",
    "model": "Block(nnx.Rngs(0))",
    "opt": "nnx.Optimizer(w['model'], {optimizer}, wrt=nnx.Param)",
    "lazy": "LazyBlock(nnx.Rngs(4))",
    "lopt": "lm.LazyOptimizer(w['lazy'], {optimizer}, wrt=nnx.Param)",
    "trainer": "Trainer(Block(nnx.Rngs(1)))",
    "metric": "nnx.metrics.Average()",
    "rngs": "nnx.Rngs(5)",
    "state": "nnx.state(Block(nnx.Rngs(2)), nnx.Param)",
    "var": "nnx.Variable(jnp.ones(3), note='a')",
    "key": "jax.random.key(3)",
    "n": "2",
    "lr": "0.5",
    "flag": "True",
    "c": "1 + 2j",
    "ns": "np.float32(1.5)",
    "na": "np.arange(3, dtype=np.float32)",
    "d": "{'q': Pair(jnp.zeros(3), [1.0]), 'p': (jnp.ones(3), 2)}",
}

# What may happen between two calls, number i being the next one, by the arguments that it needs.
CHANGES: tuple[tuple[str, str], ...] = (
    ("x", "w['x'] = w['x'] + 1"),
    ("x", "w['x'] = np.asarray(w['x']) - 2"),
    ("model", "w['model'].scale = {0: 1, 1: 1.0, 2: True}[i % 3]"),
    ("model", "w['model'].table = dict(reversed(w['model'].table.items()))"),
    ("model", "w['model'].fc, w['model'].other = nnx.Linear(3, 3, rngs=nnx.Rngs(i)), w['model'].fc"),
    ("model", "w['model'].norm.kernel = w['model'].fc.kernel"),
    ("model", "w['model'].seen.set_metadata('tag', [2, 2.0, True][i % 3])"),
    ("model", "w['model'].kept[...] = w['model'].kept[...] * 2"),
    ("model", "w['model'].eval()"),
    ("model", "del w['model'].kept; w['model'].kept = nnx.Param(jnp.ones(3) * i)"),
    ("model trainer", "w['model'].fc, w['trainer'].model.fc = w['trainer'].model.fc, w['model'].fc"),
    ("model trainer", "w['trainer'].model.kept = w['model'].kept"),
    ("model lazy", "w['model'].fc = w['lazy'].fc"),
    ("lazy", "w['lazy'] = LazyBlock(nnx.Rngs(i))"),
    ("trainer", "w['trainer'].steps = float(w['trainer'].steps)"),
    ("trainer", "w['trainer'].log.append(i)"),
    ("metric", "w['metric'].reset()"),
    ("rngs", "w['rngs'] = nnx.Rngs(i, dropout=i + 1)"),
    ("state", "w['state'] = jax.tree.map(lambda v: v + 1, w['state'])"),
    ("var", "w['var'][...] = w['var'][...] + 1"),
    ("var", "w['var'].set_metadata('note', 1)"),
    ("model var", "w['model'].kept = w['var']"),
    ("key", "w['key'] = jax.random.fold_in(w['key'], i)"),
    ("n", "w['n'] = i"),
    ("n", "w['n'] = [1, 1.0, True][i % 3]"),
    ("lr", "w['lr'] = 0.5 / (i + 1)"),
    ("lr", "w['lr'] = -0.0"),
    ("lr", "w['lr'] = np.float32(i)"),
    ("flag", "w['flag'] = not w['flag']"),
    ("flag", "w['flag'] = np.bool_(i % 2)"),
    ("c", "w['c'] = w['c'] * 1j"),
    ("ns", "w['ns'] = np.float32(i)"),
    ("ns", "w['ns'] = np.int32(i)"),
    ("na", "w['na'] = w['na'] + 1"),
    ("na", "w['na'][0] = 7"),
    ("d", "w['d'] = dict(reversed(w['d'].items()))"),
    ("d", "w['d']['q'].b.append(float(i))"),
    ("d", "w['d']['p'] = (w['d']['p'][0] + 1, i)"),
)

OPTIMIZERS = (  # a small eps would make a large step of what is 0 to rounding
    "optax.sgd(0.1, momentum=0.9)",
    "optax.adam(0.1, eps=0.1)",
    "optax.chain(optax.clip(1.0), optax.adam(0.1, eps=0.1))",
    "optax.masked(optax.adam(0.1, eps=0.1), lambda p: jax.tree.map(lambda v: v.ndim > 1, p))",
    "optax.multi_transform({'a': optax.sgd(0.1), 'b': optax.adam(0.1, eps=0.1)}, "
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
    ("model", "y = nnx.cond(y.sum() > 0.013, lambda m, x: m(x), lambda m, x: x * 2, model, y)"),
    ("model", "y, _ = nnx.scan(lambda c, m: (m.fc(c), None), in_axes=(nnx.Carry, None), length=2)(y, model)"),
    ("model", "_, y = nnx.fori_loop(0, 2, lambda i, c: (c[0], c[0].fc(c[1])), (model, y))"),
    ("model", "_, y, _ = nnx.while_loop(lambda c: c[2] < 2, lambda c: (c[0], c[0].fc(c[1]), c[2] + 1), (model, y, 0))"),
    ("model", "y = doubled(model, y)"),
    ("model", "y = y + nnx.grad(lambda m, x: doubled(m, x).sum())(model, y)['fc']['kernel'][...].sum()"),
    ("model n", "y = nnx.jit(lambda m, x: m(x) if n != 1 else [][0])(model, y)"),
    ("model n", "y = y + nnx.grad(lambda m: (m(y) / (n - 2 if n != 2 else 1)).sum())(model)['kept'][...]"),
    ("model trainer", "model.fc, trainer.model.fc = trainer.model.fc, model.fc"),
    ("model trainer", "trainer.model.kept = model.kept"),
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
    ("lazy", "y = lazy(y)"),
    ("lazy", f"y = y - nnx.grad({_LOSS})(lazy, y)['fc']['bias'][...]"),
    ("lazy", "y = nnx.jit(lambda m, x: m(x))(lazy, y)"),
    ("lazy", "y = nnx.remat(lambda m, x: m(x))(lazy, y)"),
    ("lazy", "y = y if lm.is_lazy(lazy) else y * 2"),
    ("model lazy", "model.fc = lazy.fc"),
    ("lazy lopt", f"lopt.update(lazy, nnx.grad({_LOSS})(lazy, y))"),
    ("metric", "metric.update(values=y)"),
    ("metric", "metric.update(values=y); y = y + metric.compute()"),
    ("rngs", "y = y + jax.random.normal(rngs(), (2, 3))"),
    ("rngs", "y = nnx.Dropout(0.5)(y, rngs=rngs)"),
    ("rngs", "y = nnx.vmap(lambda r, v: v + jax.random.normal(r(), (3,)))(rngs.fork(split=2), y)"),
    ("rngs model", "model.more = nnx.Linear(3, 3, rngs=rngs); y = model.more(y)"),
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
    ("lr", "y = y + (1 if copysign(1.0, lr) < 0 else 0)"),
    ("flag", "y = y * 2 if flag else y"),
    ("c", "z = y * c; y = z.real + z.imag"),
    ("ns", "y = y * ns.astype(np.float32)"),
    ("na", "y = y + na"),
    ("d", "y = y + d['p'][0] * d['p'][1] + d['q'].a"),
    ("d", "y = y * sum(d['q'].b)"),
    ("d", "d['p'] = (y[0], d['p'][1])"),
    ("d", "y = y + next(iter(d.values()))[0]"),
    ("d", "d['q'].b.append(y.sum())"),
    ("d", "d['r'] = {'z': y, 'a': [len(d)]}"),
    ("d", "d.pop('r', None)"),
    ("model d", "model.stash = nnx.data(d)"),
    ("", "if y.sum() > 1: y = y * 0.5"),
    ("", "k = 0\nwhile float(abs(y).max()) > 4 and k < 3: y, k = y * 0.5, k + 1"),
    ("", "y = y + int(abs(y[0, 0]) + 0.25)"),
    ("", "y = jax.jit(lambda v: v * 2)(y)"),
    ("", "y = jax.grad(lambda v: (v ** 2).sum())(y)"),
    ("", "y = jax.vmap(jnp.sin)(y)"),
    ("", "y = jax.lax.cond(y.sum() > 0.013, lambda v: v + 1, lambda v: v - 1, y)"),
    ("", "y = jax.lax.fori_loop(0, 2, lambda i, v: v * 0.5, y)"),
    ("", "y = jax.lax.while_loop(lambda v: v.sum() > 9, lambda v: v * 0.5, y)"),
    ("", "y, _ = jax.lax.scan(lambda c, v: (c + v, None), y, y)"),
    ("", "y = jax.checkpoint(jnp.cos)(y)"),
    ("", "y = y + jax.grad(lambda v: twice(v).sum())(y)"),
    ("", "y = jax.shard_map(lambda v: v * 2, mesh=mesh, in_specs=P('d'), out_specs=P('d'))(y)"),
    ("n", "if n == 1: raise ValueError('one')"),
)
RESULTS = ("y", "(y, {'loss': y.mean()})", "Pair(y.sum(), [1, y])", "None", "{'y': y, 'n': 3, 'f': 0.5}")


@dataclasses.dataclass(frozen=True)
class Program:
    """A random program; its source is :meth:`source`."""

    lines: tuple[str, ...]
    changes: tuple[tuple[int, str], ...]
    names: tuple[str, ...]
    optimizer: str
    result: str
    keywords: tuple[bool, ...]
    calls: int = 4

    def source(self) -> str:
        """Return the whole module."""
        return PRELUDE + self.own_source()

    def own_source(self) -> str:
        """Return what the program does not have in common with all others."""
        makes = [f"    w[{n!r}] = {ARGUMENTS[n].replace('{optimizer}', self.optimizer)}" for n in self.names]
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
        return "\n".join([*made, *head, *body, *end])


def program(seed: int) -> Program:
    """Return the program of a seed."""
    rng = random.Random(seed)
    chosen = rng.choices(STATEMENTS, k=rng.randint(1, 6))
    needed = {"x", *(n for needs, _ in chosen for n in needs.split())} | set(rng.choices(list(ARGUMENTS), k=1))
    needed |= {"model"} if "opt" in needed else set()
    needed |= {"lazy"} if "lopt" in needed else set()
    names = tuple(n for n in ARGUMENTS if n in needed)
    possible = [change for needs, change in CHANGES if needed.issuperset(needs.split())]
    changes = tuple((i, rng.choice(possible)) for i in range(1, 4) for _ in range(rng.randint(0, 2)))
    lines = tuple(line for _, line in chosen)
    keywords = tuple(rng.random() < 0.3 for _ in range(4))
    return Program(lines, changes, names, rng.choice(OPTIMIZERS), rng.choice(RESULTS), keywords)


def smaller(program: Program) -> Iterator[Program]:
    """Return the programs with one line, change, or call less."""
    for n in range(len(program.lines)):
        yield dataclasses.replace(program, lines=program.lines[:n] + program.lines[n + 1 :])
    for n in range(len(program.changes)):
        yield dataclasses.replace(program, changes=program.changes[:n] + program.changes[n + 1 :])
    for name in program.names:
        text = "\n".join([*program.lines, *[c for _, c in program.changes], "x" if name == "x" else ""])
        needed = {"model": "opt", "lazy": "lopt"}.get(name)
        if name not in text and needed not in program.names:
            yield dataclasses.replace(program, names=tuple(n for n in program.names if n != name))
    if program.result != "y":
        yield dataclasses.replace(program, result="y")
    if program.calls > 1:
        yield dataclasses.replace(program, calls=program.calls - 1)
