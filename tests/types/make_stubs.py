"""Write the type stubs of the built-in layers: ``lazymods/nn/linear.pyi`` and its siblings.

    python tests/types/make_stubs.py

A lazy class is made at run time, so type checkers see nothing of it. Its stub derives from the Flax class, and its
constructor is the run-time signature, each argument with the type that Flax's source gives it. ``test_stubs.py`` fails
while a stub differs from what this program writes.
"""

import ast
import collections.abc
import functools
import importlib
import inspect
import sys
import textwrap
import typing
from pathlib import Path
from typing import Any

import flax.typing
import jax
from flax import nnx
from flax.nnx import filterlib

import lazymods.nn

MODULES = ("attention", "linear", "lora", "normalization", "recurrent")
FOLDER = Path(lazymods.nn.__file__).parent

# What a lazy class takes and its Flax class does not.
OWN_TYPES = {
    ("LazyEinsum", "sizes"): "Mapping[str, int]",
    ("LazyLinearGeneral", "batch_axis"): "Mapping[int, int] | Sequence[int]",
}
ABSTRACT = {"Callable", "Mapping", "Sequence"}
HEAD = '''"""The types of ``lazymods.nn.{module}``.

Written by tests/types/make_stubs.py; edit that, not this file.
"""

{imports}

'''


def stub(module: str) -> str:
    """The text of the stub of one file of layers."""
    classes = [cls for cls in map(vars(lazymods.nn).get, lazymods.nn.__all__) if cls.__module__.endswith(f".{module}")]
    body = "\n\n".join(map(_class, classes))
    return HEAD.format(module=module, imports=_imports(body)) + body


def _class(cls: Any) -> str:
    parameters = list(inspect.signature(cls).parameters.values())
    becomes = cls.cls_to_become.__name__
    lines = [f"class {cls.__name__}(LazyModuleMixin, {f'nnx.{becomes}' if hasattr(nnx, becomes) else becomes}):"]
    lines += [f"    {line}".rstrip() for line in _doc(cls, parameters)]
    lines += ["", "    def __init__(", "        self,"]
    star = False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not star:
            star = True
            lines.append("        *,")
        default = "" if p.default is p.empty else f" = {_default(p.default)}"
        lines.append(f"        {p.name}: {_type(cls, p)}{default},")
    return "\n".join([*lines, "    ) -> None: ..."]) + "\n"


def _doc(cls: Any, parameters: list[inspect.Parameter]) -> list[str]:
    """The run-time docstring up to its arguments, and the options."""
    about = inspect.cleandoc(cls.__doc__).partition("\n\nArgs:")[0]
    options = ", ".join(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    listed = textwrap.wrap(f"Options: {options}.", 116, subsequent_indent="    ")
    lines = f'"""{about}'.splitlines()
    return [*lines, "", *listed, '"""']


def _default(value: Any) -> str:
    return repr(value) if value is None or type(value) in (bool, int, float, str) else "..."


def _type(cls: Any, parameter: inspect.Parameter) -> str:
    own = OWN_TYPES.get((cls.__name__, parameter.name))
    if own is not None:
        return own
    node, names = _annotations(cls.cls_to_become)[parameter.name]
    text = _written(node, names)
    return f"{text} | None" if parameter.name in cls._lazymods_plan.optional else text


@functools.cache
def _annotations(cls: type) -> dict[str, tuple[ast.expr, dict[str, Any]]]:
    """By argument of a constructor, its annotation in the source, and the names that this may use."""
    found: dict[str, tuple[ast.expr, dict[str, Any]]] = {}
    for base in cls.__mro__:
        if "__init__" in vars(base) and base.__module__.startswith(("flax", "lazymods._gru_cell")):
            function = vars(base)["__init__"]
            tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
            assert isinstance(tree, ast.FunctionDef)
            for argument in [*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs]:
                if argument.annotation is not None:
                    found.setdefault(argument.arg, (argument.annotation, function.__globals__))
    return found


def _written(node: ast.expr, names: dict[str, Any]) -> str:
    """An annotation in names that the stub imports."""
    write = functools.partial(_written, names=names)
    match node:
        case ast.Constant():
            return repr(node.value) if node.value is not Ellipsis else "..."
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return f"{write(left)} | {write(right)}"
        case ast.List(elts=items):
            return f"[{', '.join(map(write, items))}]"
        case ast.Subscript(value=generic, slice=inner):
            items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            value = _value(generic, names)
            if value is typing.Optional:
                return f"{write(items[0])} | None"
            if value is typing.Union:
                known = list(map(write, items))
                return " | ".join([*(i for i in known if i != "None"), *(i for i in known if i == "None")])
            return f"{write(generic)}[{', '.join(map(write, items))}]"
    return _public_name(_value(node, names), ast.unparse(node))


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(node), "annotation", "eval"), dict(names))


def _public_name(value: Any, text: str) -> str:
    """How the stub writes a type: by a public name of Python, jax or flax."""
    last = text.rpartition(".")[2]
    origin = typing.get_origin(value) or value
    if value in (int, float, str, bool):
        return value.__name__
    if value is Any:
        return "Any"
    if value is jax.Array:
        return "jax.Array"
    if origin is type:
        return "type"
    if last in ABSTRACT and origin is getattr(collections.abc, last):
        return last
    if getattr(nnx, last, None) is value:
        return f"nnx.{last}[Any]" if getattr(value, "__parameters__", ()) else f"nnx.{last}"
    if getattr(flax.typing, last, None) is value:
        return last
    if getattr(filterlib, last, None) is value:
        return f"filterlib.{last}"
    raise NotImplementedError(f"no public name is known for {text} = {value!r}")


def _imports(body: str) -> str:
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    typed = used & set(vars(flax.typing)) - ABSTRACT - {"Any", "jax"}
    of_python = [_from("collections.abc", used & ABSTRACT), _from("typing", used & {"Any"})]
    of_others = ["import jax" if "jax" in used else "", "from flax import nnx", _from("flax.nnx", used & {"filterlib"})]
    own = [_from("lazymods._gru_cell", used & {"ResetAfterGRUCell"})]
    own += ["from lazymods._layer.mixin import LazyModuleMixin"]
    groups = (of_python, [*of_others, _from("flax.typing", typed)], own)
    return "\n\n".join("\n".join(filter(None, group)) for group in groups)


def _from(module: str, names: set[str]) -> str:
    line = f"from {module} import {', '.join(sorted(names))}"
    if len(line) > 120:
        line = f"from {module} import (\n" + "".join(f"    {name},\n" for name in sorted(names)) + ")"
    return line if names else ""


def main() -> None:
    """Write every stub."""
    for module in MODULES:
        importlib.import_module(f"lazymods.nn.{module}")
        path = FOLDER / f"{module}.pyi"
        path.write_text(stub(module))
        sys.stdout.write(f"{path.name}\n")


if __name__ == "__main__":
    main()
