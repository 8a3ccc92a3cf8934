"""Linear maps, convolutions and embeddings without input sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from lazymods._layer.factory import make
from lazymods._layer.sizing import LazyClassSpec, NotInferableError
from lazymods._refusals import wrong_argument
from lazymods.nn._shapes import Config, axes_over, check_divides, check_rank, last_axis, rank_of, size_at

# ---------------------------------------------------------------- Linear


def _linear(config: Config, inputs: Any, *_: Any, **__: Any) -> dict[str, Any]:
    return {"in_features": last_axis(inputs)}


LazyLinear = make(
    LazyClassSpec(nnx.Linear, _linear, ("in_features",), scales=("out_features",)),
    name="LazyLinear",
    module=__name__,
    doc="""A linear map without ``in_features``; becomes ``nnx.Linear``.

    Inferred: ``in_features``, the last axis of the input ``(..., in_features)``.

    Args:
        out_features: The number of output features.
        **options: Those of ``nnx.Linear``, by keyword.
        rngs: The random streams; keys are drawn at construction, as ``nnx.Linear`` draws them.

    Raises:
        ShapeInferenceError: At the first call, if the input has no axes or no features.

    Example:
        >>> import jax.numpy as jnp, lazymods as lm
        >>> from flax import nnx
        >>> layer = lm.LazyLinear(4, rngs=nnx.Rngs(0))
        >>> layer.kernel
        UninitializedParameter(shape=(?, 4), dtype=float32)
        >>> layer(jnp.ones((2, 3))).shape, layer.in_features, type(layer).__name__
        ((2, 4), 3, 'Linear')
    """,
)


def _linear_general(config: Config, inputs: Any, *_: Any, **__: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"in_features": tuple(size_at(inputs, a) for a in _axes(config["axis"]))}
    if _unsized(config["batch_axis"]):
        found["batch_axis"] = {a: size_at(inputs, a) for a in config["batch_axis"]}
    return found


def _linear_general_structure(config: Config) -> dict[str, Any]:
    unknown: dict[str, Any] = {"in_features": (None,) * len(_axes(config["axis"]))}
    if _unsized(config["batch_axis"]):
        unknown["batch_axis"] = dict.fromkeys(config["batch_axis"])
    return unknown


def _axes(axis: Any) -> tuple[int, ...]:
    return (axis,) if isinstance(axis, int) else tuple(axis)


def _unsized(batch_axis: Any) -> bool:
    return not isinstance(batch_axis, Mapping) and len(batch_axis) > 0


def _linear_general_prepare(config: dict[str, Any]) -> dict[str, Any]:
    batch_axis = config["batch_axis"]
    return config | {"batch_axis": batch_axis if isinstance(batch_axis, Mapping) else _axes(batch_axis)}


LazyLinearGeneral = make(
    LazyClassSpec(
        nnx.LinearGeneral, _linear_general, ("in_features",), _linear_general_structure, prepare=_linear_general_prepare
    ),
    name="LazyLinearGeneral",
    module=__name__,
    doc="""A linear map over several axes without ``in_features``; becomes ``nnx.LinearGeneral``.

    Inferred: ``in_features``, the input's sizes at ``axis``; the sizes at ``batch_axis`` if that is a tuple of axes.

    Args:
        out_features: The number of output features, or one number an axis.
        axis: The axis or axes to transform, the last by default.
        batch_axis: Leading axes that have kernels of their own: a tuple of axes, or a mapping of axis to size.
        **options: Those of ``nnx.LinearGeneral``, by keyword.
        rngs: The random streams.

    Raises:
        ShapeInferenceError: At the first call, if the input lacks one of the axes.
    """,
)


# ---------------------------------------------------------------- Einsum


def _einsum_letters(config: Config) -> tuple[str, str]:
    left = config["einsum_str"].replace(" ", "").split("->")[0].split(",")
    if len(left) != 2:
        needed = "einsum_str has two operands, the input and the kernel"
        write = 'lm.LazyEinsum("...a,ab->...b", sizes={"b": 4}, rngs=rngs)'
        raise wrong_argument("LazyEinsum", config["einsum_str"], needed, write)
    return left[0], left[1]


def _einsum_input_sizes(config: Config, inputs: Any) -> dict[str, Any]:
    """Sizes of the letters of the input, an ellipsis standing for any number of axes."""
    letters, _ = _einsum_letters(config)
    before, dots, after = letters.partition("...")
    rank = rank_of(inputs)
    if rank < len(before) + len(after) or (not dots and rank != len(letters)):
        raise NotInferableError(
            f"an array with the axes {letters!r} of einsum_str", f"layer(x)  # with x of {len(letters)} axes"
        )
    tail = tuple(inputs.shape)[rank - len(after) :]
    sizes: dict[str, Any] = {}
    for letter, size in [*zip(before, inputs.shape, strict=False), *zip(after, tail, strict=True)]:
        if sizes.setdefault(letter, size) != size:
            raise NotInferableError(
                f"one size for {letter!r}, not {sizes[letter]} and {size}", "layer(x)  # with an input whose axes agree"
            )
    return sizes


def _einsum(config: Config, inputs: Any, einsum_str: str | None = None, **_: Any) -> dict[str, Any]:
    if einsum_str is not None:  # the call's own equation goes first, as in Flax
        config = {**config, "einsum_str": einsum_str}
    found = _einsum_input_sizes(config, inputs)
    kernel = _einsum_letters(config)[1]
    for letter in kernel:
        given = config["sizes"].get(letter, found.get(letter))
        if given is None:
            raise NotInferableError(
                f"a size for {letter!r}, which the input does not carry", f"sizes={{{letter!r}: ...}}"
            )
        if found.get(letter, given) != given:
            raise NotInferableError(
                f"size {given} for {letter!r}, as given, not {found[letter]}", "layer(x)  # with an input of that size"
            )
    return {"kernel_shape": tuple(config["sizes"].get(c, found.get(c)) for c in kernel)}


def _einsum_structure(config: Config) -> dict[str, Any]:
    _, kernel = _einsum_letters(config)
    return {"kernel_shape": tuple(config["sizes"].get(c) for c in kernel)}


LazyEinsum = make(
    LazyClassSpec(nnx.Einsum, _einsum, ("kernel_shape",), _einsum_structure, options={"sizes": {}}),
    name="LazyEinsum",
    module=__name__,
    doc="""An einsum with a learned kernel whose shape follows from the input; becomes ``nnx.Einsum``.

    Inferred: ``kernel_shape``, the size of every kernel letter that the input carries.

    Args:
        einsum_str: The equation, ``"input,kernel->output"``.
        sizes: Sizes of the kernel letters that the input does not carry, by letter.
        **options: Those of ``nnx.Einsum``, by keyword.
        rngs: The random streams.

    Raises:
        ShapeInferenceError: At the first call, if the input's axes do not fit the equation or a size is missing.

    Example:
        >>> import jax.numpy as jnp, lazymods as lm
        >>> from flax import nnx
        >>> layer = lm.LazyEinsum("nd,df->nf", sizes={"f": 4}, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3))).shape, layer.kernel.shape
        ((2, 4), (3, 4))
    """,
)


# ---------------------------------------------------------------- convolutions


def _kernel_rank(config: Config) -> int:
    size = config["kernel_size"]
    return 1 if isinstance(size, int) else len(tuple(size))


def _conv(config: Config, inputs: Any, *_: Any, **__: Any) -> dict[str, Any]:
    rank = _kernel_rank(config)
    if rank_of(inputs) < rank + 1:
        raise NotInferableError(
            f"an array of at least {rank + 1} axes: {rank} of space, then features",
            f"layer(x)  # with x of shape (batch, {', '.join(['space'] * rank)}, features)",
        )
    features = last_axis(inputs)
    check_divides(config.get("feature_group_count", 1), features, "feature_group_count")
    return {"in_features": features}


def _conv_nd(rank: int) -> Callable[..., dict[str, Any]]:
    def infer(config: Config, inputs: Any, *_: Any, **__: Any) -> dict[str, Any]:
        check_rank(inputs, (rank + 1, rank + 2), axes_over(rank) + ", the batch axis optional")
        return _conv(config, inputs)

    return infer


def _conv_prepare(name: str, rank: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def prepare(config: dict[str, Any]) -> dict[str, Any]:
        size = config["kernel_size"]
        if isinstance(size, int):
            return config | {"kernel_size": (size,) * rank}
        if len(tuple(size)) != rank:
            needed = f"kernel_size has {rank} entries"
            raise wrong_argument(name, size, needed, f"lm.{name}(out_features, {(3,) * rank}, rngs=rngs)")
        return config

    return prepare


_CONV_DOC = """A {kind} without ``in_features``{rank}; becomes ``nnx.{target}``.

    Inferred: ``in_features``, the last axis of the input ``{axes}``.

    Args:
        out_features: The number of output features.
        kernel_size: The size of the kernel{size}.
        **options: Those of ``nnx.{target}``, by keyword.
        rngs: The random streams.

    Raises:
        ShapeInferenceError: At the first call, if the input has another rank, no features, or features that
            ``feature_group_count`` does not divide.
    """


def _make_conv(cls: type, name: str, rank: int | None = None) -> Any:
    kind: str = "transposed convolution" if cls is nnx.ConvTranspose else "convolution"
    axes = "(batch, space..., features)" if rank is None else axes_over(rank)
    doc = _CONV_DOC.format(
        kind=kind,
        rank="" if rank is None else f" over {rank} axes, whose input's rank is checked",
        target=cls.__name__,
        axes=axes,
        size=", one number an axis" if rank is None else ", one number an axis or one for all",
    )
    infer = _conv if rank is None else _conv_nd(rank)
    prepare = None if rank is None else _conv_prepare(name, rank)
    plan = LazyClassSpec(cls, infer, ("in_features",), prepare=prepare, scales=("out_features",))
    return make(plan, name=name, module=__name__, doc=doc)


LazyConv = _make_conv(nnx.Conv, "LazyConv")
LazyConv1d = _make_conv(nnx.Conv, "LazyConv1d", 1)
LazyConv2d = _make_conv(nnx.Conv, "LazyConv2d", 2)
LazyConv3d = _make_conv(nnx.Conv, "LazyConv3d", 3)
LazyConvTranspose = _make_conv(nnx.ConvTranspose, "LazyConvTranspose")
LazyConvTranspose1d = _make_conv(nnx.ConvTranspose, "LazyConvTranspose1d", 1)
LazyConvTranspose2d = _make_conv(nnx.ConvTranspose, "LazyConvTranspose2d", 2)
LazyConvTranspose3d = _make_conv(nnx.ConvTranspose, "LazyConvTranspose3d", 3)


# ---------------------------------------------------------------- Embed


def _embed_structure(config: Config) -> dict[str, Any]:
    return {n: None for n in ("num_embeddings", "features") if config[n] is None}


def _embed(config: Config, *_: Any, **__: Any) -> dict[str, Any]:
    missing = [n for n in ("num_embeddings", "features") if config[n] is None]
    if missing:
        raise NotInferableError(
            f"{' and '.join(missing)}: the indices do not tell how large the table is",
            "lm.LazyEmbed(num_embeddings, features, rngs=rngs)  # or load the table from a checkpoint",
        )
    return {}


LazyEmbed = make(
    LazyClassSpec(
        nnx.Embed,
        _embed,
        (),
        _embed_structure,
        entries={"attend": lambda config, query, **kwargs: ((query,), {})},
        optional=("num_embeddings", "features"),
    ),
    name="LazyEmbed",
    module=__name__,
    doc="""An embedding that is not initialized before it is used; becomes ``nnx.Embed``.

    Inferred: nothing from the input. Sizes are given, or read from a checkpoint; a table that is loaded is never
    initialized.

    Args:
        num_embeddings: The number of rows; None if a checkpoint tells.
        features: The number of columns; None if a checkpoint tells.
        **options: Those of ``nnx.Embed``, by keyword.
        rngs: The random streams.

    Raises:
        ShapeInferenceError: At the first call, if a size is neither given nor loaded.
    """,
)
