"""Take away the private names of jax and flax, one at a time, and see what still works.

The names are read from the source of ``lazymods/_compat``: modules and what is imported from them, attributes of those,
attributes and overridden methods that nothing public has, and the texts by which ``require`` asks for some. To take one
away is to import that source with another name in its place: jax and flax themselves stay as they are, as on the day
when they rename it. Every name has a process of its own, forked from one that has imported jax and not yet used it.

By command, for all names or those that hold a text: ``python tests/compat/taking_away.py [--only trace_ctx]``.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax
import jax
import jax.core
import jax.extend.core
import jax.extend.linear_util
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy
from flax import nnx

ROOT = Path(__file__).parents[2]
COMPAT = ROOT / "lazymods" / "_compat"
ESSENTIAL = ("import", "first call", "state_dict", "save", "load", "materialize")
OTHERS = ("in jax.jit", "as an argument", "lm.jit", "lazy tensors", "no_grad")
GONE = "__gone"


# ---------------------------------------------------------------- which names

_PUBLIC_OWNERS: tuple[Any, ...] = (
    *(str, bytes, int, dict, list, set, frozenset, tuple, type, object, slice, BaseException, types.CodeType),
    *(types.FrameType, types.FunctionType, types.ModuleType, sys, threading, threading.local, weakref, weakref.ref),
    *(weakref.WeakKeyDictionary, types, __import__("contextlib"), __import__("functools"), __import__("inspect")),
    *(__import__("contextlib").ExitStack, __import__("operator"), __import__("importlib"), warnings, ast),
    *(np, np.ndarray, np.dtype, np.generic, jax, jnp, jax.lax, jax.core, jax.extend.core, jax.tree, jax.tree_util),
    *(jax.sharding, jax.sharding.Mesh, jax.sharding.AbstractMesh, jax.sharding.Sharding, jax.nn, jax.nn.initializers),
    *(jax.errors, jax.dtypes, jax.config, jax.Array, jax.ShapeDtypeStruct, jax.core.ShapedArray, jax.core.Tracer),
    *(jax.extend.core.JaxprEqn, jax.extend.core.Primitive, jax.extend.core.Jaxpr, nnx, nnx.Variable, nnx.Module, flax),
)


def _is_private(module: str) -> bool:
    """Whether a module of jax or flax is one that only its own code imports."""
    parts = module.split(".")
    if parts[0] in ("jax", "jaxlib"):
        return any(part.startswith("_") for part in parts)
    return parts[0] == "flax" and module not in ("flax", "flax.nnx")


class Source:
    """One file of ``lazymods/_compat``.

    Attributes:
        tree: Its syntax tree.
        imported: What its names stand for, of those that come from private modules.
    """

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text())
        self.imported: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                for alias in node.names:
                    dotted = f"{node.module}.{alias.name}"
                    if _is_private(node.module) or (_is_private(dotted) and dotted in _modules()):
                        self.imported[alias.asname or alias.name] = dotted

    def dotted(self, node: ast.AST) -> str | None:
        """Return what an expression stands for, if that is in a private module."""
        if isinstance(node, ast.Name):
            return self.imported.get(node.id)
        if isinstance(node, ast.Attribute):
            before = self.dotted(node.value)
            return None if before is None else f"{before}.{node.attr}"
        return None


def _modules() -> set[str]:
    """The dotted names of the modules of jax and flax."""
    return {name for name in sys.modules if name.split(".")[0] in ("jax", "jaxlib", "flax")}


def _asked(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield owner and name of what ``require``, ``getattr`` and ``hasattr`` ask for."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("require", "getattr", "hasattr")
    ):
        texts = node.args[1:] if node.func.id == "require" else node.args[1:2]
        for text in texts:
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield node.args[0], text.value


def names() -> list[str]:
    """Return all private names: ``jax._src.core.trace_ctx`` of a module, ``.manager`` of any object."""
    sources = [Source(path) for path in sorted(COMPAT.glob("*.py"))]
    own = set().union(*[_defined(ast.parse(path.read_text())) for path in (ROOT / "lazymods").rglob("*.py")])
    known = own.union(*[[n for n in dir(owner) if not n.startswith("_")] for owner in _PUBLIC_OWNERS])
    found = set()
    for source in sources:
        for dotted in source.imported.values():
            found |= {dotted, dotted.rpartition(".")[0]}
        for node in ast.walk(source.tree):
            found |= {f".{name}" for _, name in _asked(node) if node.func.id == "require" or name not in known}  # type: ignore[attr-defined]
            if isinstance(node, ast.Attribute):
                dotted = source.dotted(node)
                if dotted is not None and source.dotted(node.value) in _modules():
                    found.add(dotted)
                elif node.attr not in known:
                    found.add(f".{node.attr}")
            if isinstance(node, ast.ClassDef) and node.bases:
                found |= {f".{n.name}" for n in node.body if isinstance(n, ast.FunctionDef) and _overrides(n.name)}
    dunder = {name for name in found if name.startswith(".__")}
    return sorted(found - dunder - {"jax._src", "jax", "flax.nnx", "flax", "._getframe"})


def _defined(tree: ast.AST) -> set[str]:
    """Return the names that a file of lazymods defines."""
    own = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                own.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self" | "cls")):
                own.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
    return own


def _overrides(name: str) -> bool:
    """Whether a method takes the place of one of jax or flax."""
    owners = (jax.core.Trace, jax.core.Tracer, nnx.Pytree)
    return name in ("process_call", "process_shard_map") or any(hasattr(owner, name) for owner in owners)


# ---------------------------------------------------------------- taking one away


class _Renaming(ast.NodeTransformer):
    """Puts another name in the place of one."""

    def __init__(self, name: str, source: Source) -> None:
        self.name, self.source = name, source

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        module = node.module or ""
        if module == self.name or module.startswith(self.name + "."):
            node.module = module.replace(self.name, self.name + GONE, 1)
        for alias in node.names:
            if f"{module}.{alias.name}" == self.name:
                alias.asname = alias.asname or alias.name
                alias.name += GONE
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        dotted = self.source.dotted(node)
        in_module = dotted is not None and self.source.dotted(node.value) in _modules()
        if dotted == self.name or (self.name == f".{node.attr}" and not in_module):
            node.attr += GONE
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if self.name == f".{node.name}":
            node.name += GONE
        self.generic_visit(node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and self.name == f".{node.value}":
            return ast.copy_location(ast.Constant(node.value + GONE), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        for owner, name in _asked(node):
            if f"{self.source.dotted(owner)}.{name}" == self.name:
                for text in node.args[1:]:
                    if isinstance(text, ast.Constant) and text.value == name:
                        text.value = name + GONE
        self.generic_visit(node)
        return node


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports ``lazymods._compat`` with a name renamed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if not fullname.startswith("lazymods._compat"):
            return None
        last = fullname.removeprefix("lazymods._compat").lstrip(".")
        file = COMPAT / f"{last or '__init__'}.py"
        if not file.exists():
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=str(file), is_package=not last)
        if not last:
            spec.submodule_search_locations = [str(COMPAT)]
        spec.loader_state = file
        return spec

    def exec_module(self, module: Any) -> None:
        file = module.__spec__.loader_state
        source = Source(file)
        tree = ast.fix_missing_locations(_Renaming(self.name, source).visit(source.tree))
        exec(compile(tree, str(file), "exec"), vars(module))


# ---------------------------------------------------------------- what works then


class Trial:
    """What a user does, with the values of Flax's own layers to compare with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)

    @property
    def lm(self) -> Any:
        import lazymods

        return lazymods

    def lazy(self) -> Any:
        rngs = nnx.Rngs(0)
        parts = [self.lm.LazyLinear(5, rngs=rngs), self.lm.LazyBatchNorm(rngs=rngs), jnp.tanh]
        return nnx.Sequential(*parts, self.lm.LazyLinear(2, rngs=rngs))

    @staticmethod
    def explicit() -> Any:
        rngs = nnx.Rngs(0)
        return nnx.Sequential(
            nnx.Linear(4, 5, rngs=rngs), nnx.BatchNorm(5, rngs=rngs), jnp.tanh, nnx.Linear(5, 2, rngs=rngs)
        )

    def expect(self) -> None:
        """Write what Flax's own layers give."""
        model = self.explicit()
        loss = nnx.jit(_step)(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), self.x)
        first = self.explicit()
        out = first(self.x)
        leaves = {f"{i}": np.asarray(v) for i, v in enumerate(jax.tree.leaves(nnx.state(self.explicit(), nnx.Param)))}
        after = {f"after {i}": np.asarray(v) for i, v in enumerate(jax.tree.leaves(nnx.state(model, nnx.Param)))}
        arrays: dict[str, Any] = {"out": out, "loss": loss, **leaves, **after}
        np.savez(self.folder / "expected.npz", **arrays)

    def run(self) -> dict[str, str]:
        """Return what became of each thing: ok, or the class and the text of the error."""
        outcomes = {}
        with np.load(self.folder / "expected.npz") as file:
            self.want = dict(file)
        for step in (*ESSENTIAL, *OTHERS):
            try:
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    getattr(self, "do_" + step.replace(" ", "_").replace(".", "_"))()
                bad = [str(w.message) for w in told if not _is_clear(str(w.message))]
                outcomes[step] = f"warning: {bad[0]}" if bad else "told" if told else "ok"
            except Exception as error:
                clear = type(error).__name__ == "MissingNameError" and _is_clear(str(error))
                outcomes[step] = "refused" if clear else f"{type(error).__name__}: {error}"
                if os.environ.get("TAKING_AWAY_TRACEBACK"):
                    import traceback

                    outcomes[step] += traceback.format_exc()
        return outcomes

    def check(self, model: Any, after: str = "") -> None:
        leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
        assert len(leaves) == 6
        for i, leaf in enumerate(leaves):
            np.testing.assert_allclose(leaf, self.want[f"{after}{i}"], rtol=1e-5, atol=1e-6)

    def do_import(self) -> None:
        assert self.lm.LazyLinear

    def do_first_call(self) -> None:
        self.model = self.lazy()
        np.testing.assert_allclose(self.model(self.x), self.want["out"], rtol=1e-5, atol=1e-6)
        self.check(self.model)
        assert type(self.model.layers[0]) is nnx.Linear

    def do_state_dict(self) -> None:
        entries = self.lm.state_dict(self.model)
        assert list(entries)[:2] == ["layers.0.kernel", "layers.0.bias"] and len(entries) == 8
        assert self.lm.state_dict(self.lazy())["layers.0.kernel"].shape == (None, 5)

    def do_save(self) -> None:
        self.lm.save(self.model, self.folder / f"{os.getpid()}.safetensors")
        held = safetensors.numpy.load_file(self.folder / f"{os.getpid()}.safetensors")
        np.testing.assert_array_equal(held["layers.0.kernel"], self.model.layers[0].kernel[...])

    def do_load(self) -> None:
        model = self.lazy()
        self.lm.load(model, self.folder / f"{os.getpid()}.safetensors")
        assert type(model.layers[0]) is nnx.Linear
        self.check(model)

    def do_materialize(self) -> None:
        model = self.lazy()
        report = self.lm.infer_shapes(model, jax.ShapeDtypeStruct((3, 4), jnp.float32))
        assert report.output.shape == (3, 2)
        self.lm.materialize(model, jax.ShapeDtypeStruct((3, 4), jnp.float32))
        self.check(model)

    def do_in_jax_jit(self) -> None:
        model = self.lazy()
        model.eval()
        jax.jit(lambda x: model(x))(self.x)
        self.check(model)

    def do_as_an_argument(self) -> None:
        model = self.lazy()
        nnx.jit(lambda model, x: model(x))(model, self.x)
        self.check(model)

    def do_no_grad(self) -> None:
        def f(x: Any) -> Any:
            with self.lm.autograd.no_grad():
                y = jax.vmap(self.lm.autograd.enable_grad(lambda v: v * v))(x)
                z = jax.nn.relu(x)
            return (x * y + x * z).sum()

        want = 3 * self.x**2 + np.maximum(self.x, 0)
        for gradient in (jax.grad(f), jax.grad(jax.jit(f))):
            np.testing.assert_allclose(gradient(self.x), want, rtol=1e-5)

    def do_lm_jit(self) -> None:
        model = self.explicit()
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        step = self.lm.jit(_step)
        np.testing.assert_allclose(step(model, optimizer, self.x), self.want["loss"], rtol=1e-5)
        self.check(model, "after ")
        scale = self.lm.jit(lambda model, x: model(x) * 0)
        assert not np.any(scale(model, self.x)) and not np.any(scale(model, self.x))

    def do_lazy_tensors(self) -> None:
        with self.lm.lazytensor.lazy():
            y = jnp.tanh(jnp.asarray(self.x)) * 2
            total = float((y @ jnp.ones(4)).sum())
            grown = jnp.add(y, 1)
        np.testing.assert_allclose(total, (np.tanh(self.x) * 2).sum(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(grown, np.tanh(self.x) * 2 + 1, rtol=1e-5)


def _step(model: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def _is_clear(text: str) -> bool:
    """Whether a text names what is gone, and the versions installed and tested."""
    return GONE in text and f"jax {jax.__version__}" in text and f"flax {flax.__version__}" in text and "tested" in text


def _in_child(work: Callable[[], Any], out: Path) -> int:
    child = os.fork()
    if child == 0:
        try:
            out.write_text(json.dumps(work()))
        except BaseException as error:
            out.write_text(json.dumps({"process": f"{type(error).__name__}: {error}"}))
        finally:
            os._exit(0)
    return child


def _without(name: str, folder: Path) -> dict[str, str]:
    sys.meta_path.insert(0, _Finder(name))
    return Trial(folder).run()


def main() -> None:
    """Print, for each name, what became of each step, as a line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", f"{folder}/cache")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        os.waitpid(_in_child(Trial(Path(folder)).expect, Path(folder) / "expect"), 0)
        waiting = ["nothing", *[name for name in names() if options.only in name]]
        running: dict[int, str] = {}
        while waiting or running:
            while waiting and len(running) < options.processes:
                name = waiting.pop(0)
                running[_in_child(lambda name=name: _without(name, Path(folder)), Path(folder) / f"{name}.json")] = name
            child, status = os.wait()
            name = running.pop(child)
            held = Path(folder) / f"{name}.json"
            outcome = json.loads(held.read_text()) if held.exists() else {"process": f"ended with {status}"}
            print(json.dumps([name, outcome]), flush=True)


if __name__ == "__main__":
    main()
