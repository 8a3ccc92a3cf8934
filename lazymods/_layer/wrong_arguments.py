"""What a lazy class says of arguments that it does not take: what is wrong, and the call as it was meant."""

from __future__ import annotations

import difflib
import inspect
import sys
import types
from collections.abc import Mapping
from typing import Any

from flax import nnx

from lazymods._errors import ConfigurationError, Problem, describe_call
from lazymods._layer.arguments import constructor_parameters

_PLAIN = (bool, int, float, str, tuple, type(None))
_OF_TORCH = {  # PyTorch's names, which are like no name of Flax or like another one
    **{"bias": "use_bias", "eps": "epsilon", "stride": "strides", "dropout": "dropout_rate"},
    **{"dilation": "kernel_dilation", "groups": "feature_group_count"},
    **{"out_channels": "out_features", "hidden_size": "hidden_features", "embedding_dim": "features"},
    **{"in_channels": "in_features", "input_size": "in_features"},
}


def refusal(
    name: str, cls: type, signature: inspect.Signature, args: Any, kwargs: Mapping[str, Any], error: TypeError
) -> ConfigurationError:
    """Say why a lazy class does not take arguments.

    Args:
        name: The lazy class.
        cls: The class that its layers become.
        signature: What the lazy class takes.
        args: What was given by position.
        kwargs: What was given by keyword.
        error: What binding them to the signature said.
    """
    given, sizes = _by_name(cls, signature, args, kwargs)
    given, names = _renamed(given, signature)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    unknown = [] if takes_any else [n for n in given if n not in signature.parameters]
    called = f"lm.{name}" if hasattr(sys.modules["lazymods"], name) and _is_flax(cls) else name
    needed = f"arguments as in {name}{_short(signature)}"
    if any(isinstance(a, nnx.Rngs) for a in args):
        needed = f"rngs= by its name; {needed}"
    if unknown:
        needed = f"nothing called {', '.join(f'{n}=' for n in unknown)}; {needed}"
    for wrong, right in names.items():
        needed = f"{right}= in place of {wrong}=; {needed}"
    if sizes:
        are = "they are" if len(sizes) > 1 else "it is"
        needed = f"no {', '.join(sizes)}: {are} inferred from the first input; {needed}"
    return ConfigurationError(
        Problem(name, f"{describe_call(args, dict(kwargs))} ({error})", needed, _call_line(called, signature, given))
    )


def _is_flax(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("flax", "lazymods")


def _by_name(
    cls: type, signature: inspect.Signature, args: Any, kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments by name, without sizes that are inferred, and the names of those."""
    own = [n for n, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    explicit = [n for n, p in constructor_parameters(cls).items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    # more than the lazy class takes by position: they are meant for the class that it becomes
    by_position = [a for a in args if not isinstance(a, nnx.Rngs)]
    names = own if len(by_position) <= len(own) else explicit
    given = dict(zip(names, by_position, strict=False)) | dict(kwargs)
    if len(by_position) < len(args):
        given["rngs"] = None  # shown as nnx.Rngs(0)
    taken = signature.parameters
    sizes = [n for n in given if _OF_TORCH.get(n, n) in explicit and not {n, _OF_TORCH.get(n)} & {*taken}]
    return {n: v for n, v in given.items() if n not in sizes}, sizes


def _renamed(given: dict[str, Any], signature: inspect.Signature) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments under the names that were meant, and which were renamed."""
    free = [n for n in signature.parameters if n not in given]
    names: dict[str, str] = {}
    for name in given:
        meant = _OF_TORCH.get(name)
        close = [meant] if meant in free else difflib.get_close_matches(name, free, n=1)
        close = [] if name in signature.parameters else close
        if close:
            names[name] = close[0]
            free.remove(close[0])
    return {names.get(n, n): v for n, v in given.items()}, names


def _short(signature: inspect.Signature) -> str:
    shown = [_shown(p) for p in signature.parameters.values()]
    note = "; options go by keyword" + (", rngs is required" if _needs_rngs(signature) else "")
    return f"({', '.join(shown[:6])}{', ...' if len(shown) > 6 else ''}){note}"


def _shown(p: inspect.Parameter) -> str:
    if p.kind is p.VAR_KEYWORD:
        return f"**{p.name}"
    return p.name if p.default is p.empty else f"{p.name}=..."


def _needs_rngs(signature: inspect.Signature) -> bool:
    return "rngs" in signature.parameters and signature.parameters["rngs"].default is inspect.Parameter.empty


def _call_line(name: str, signature: inspect.Signature, given: Mapping[str, Any]) -> str:
    """Write the call that was meant, with the values that were given; a name stands for one that is missing."""
    parts = []
    for p in signature.parameters.values():
        required = p.default is p.empty and p.kind is not p.VAR_KEYWORD
        if p.name == "rngs":
            if required or p.name in given:
                parts.append("rngs=nnx.Rngs(0)")
        elif required:
            parts.append(_written(p.name, given))
        elif p.name in given:
            parts.append(f"{p.name}={_written(p.name, given)}")
    return f"{name}({', '.join(parts)})"


def _written(name: str, given: Mapping[str, Any]) -> str:
    """Return a value as Python writes it, if it is short, else its name."""
    plain = name in given and isinstance(given[name], _PLAIN) and len(repr(given[name])) < 40
    return repr(given[name]) if plain else name


def check_initializers(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a function that returns an initializer, such as ``nnx.initializers.he_normal``, in the place of one.

    Raises:
        ConfigurationError: If an argument is such a function.
    """
    for argument, value in config.items():
        if isinstance(value, types.FunctionType) and vars(nnx.initializers).get(value.__name__) is value:
            if "key" not in inspect.signature(value).parameters:
                needed = "an initializer, which that function returns when it is called"
                write = f"{argument}=nnx.initializers.{value.__name__}()"
                raise ConfigurationError(Problem(name, f"{argument}={value.__name__}", needed, write))


# ---------------------------------------------------------------- infer


def check_infer(cls: type, infer: Any) -> None:
    """Check that a function ``infer`` can be called with what the class's ``__call__`` requires.

    Raises:
        ConfigurationError: If it takes no config, or other arguments than the call has.
    """
    if not any("__call__" in vars(base) for base in cls.__mro__):
        return
    try:
        signature, call = inspect.signature(infer), inspect.signature(cls.__call__)
    except (TypeError, ValueError):  # some functions that are not Python's tell no signature
        return
    parameters = list(call.parameters.values())[1:]
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
        return  # what it is called with is not known
    required = [p for p in parameters if p.default is p.empty]
    optional = [p for p in parameters if p.default is not p.empty]
    if any(_takes(signature, required + optional[:count]) for count in range(len(optional) + 1)):
        return
    asked = "".join(f", {p.name}" for p in required)
    raise ConfigurationError(
        Problem(
            f"lm.lazy({cls.__name__}, infer=...)",
            f"infer{signature}",
            f"a function of the constructor's arguments, and of the call's: {cls.__name__}.__call__ requires "
            + (", ".join(p.name for p in required) or "none"),
            f"def infer(config{asked}, *args, **kwargs): return {{...}}",
        )
    )


def _takes(infer: inspect.Signature, given: list[inspect.Parameter]) -> bool:
    """Whether ``infer`` takes a config and these arguments, some by position and the rest by name."""
    given = sorted(given, key=lambda p: p.kind)  # those by name alone come last
    positional = sum(p.kind is not p.KEYWORD_ONLY for p in given)
    for count in range(positional, -1, -1):
        try:
            infer.bind(None, *given[:count], **{p.name: p for p in given[count:]})
        except TypeError:
            continue
        return True
    return False
