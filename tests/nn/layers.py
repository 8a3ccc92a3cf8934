"""The table of layers: every lazy layer, with the options that matter, beside Flax's explicit one."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from helpers import Make, filled, spec

import lazymods as lm

bf16, f16, i32 = jnp.bfloat16, jnp.float16, jnp.int32
orthogonal, he, constant = nnx.initializers.orthogonal(), nnx.initializers.he_normal(), nnx.initializers.constant(0.25)


@dataclasses.dataclass(frozen=True)
class Row:
    """One layer in two spellings.

    Attributes:
        name: Shown as the test's name.
        family: Flax's class, or what the layer is wrapped in.
        lazy: Makes it without sizes, given the rngs.
        explicit: Makes it with them.
        args: Shapes and dtypes of a call.
        kwargs: Keyword arguments of the call.
        main: Whether it stands for its family where the whole table would take too long.
        mutates: Whether a call writes Variables: Flax refuses that of a module closed over by a transform.
        sized_by_file: Whether nothing but a load can size it.
        has_entries: Whether a state dict has entries for it.
        lazy_class: The lazy class, if the row is about one.
        of_class: Makes the layer of that class, or of a subclass.
    """

    name: str
    family: str
    lazy: Make
    explicit: Make
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    main: bool = False
    mutates: bool = False
    sized_by_file: bool = False
    has_entries: bool = True
    lazy_class: Any = None
    of_class: Callable[[Any, nnx.Rngs], Any] | None = None

    def __str__(self) -> str:
        """Name the test."""
        return self.name

    def inputs(self, seed: int = 0) -> Any:
        """Random arguments of a call."""
        return filled(self.args, seed)

    def call(self, layer: Any, seed: int = 0) -> Any:
        """Call a layer of the row."""
        return layer(*self.inputs(seed), **self.kwargs)

    def twins(self, seed: int = 0) -> tuple[Any, Any]:
        """The lazy layer and the explicit one, of equal rngs."""
        return self.lazy(nnx.Rngs(seed)), self.explicit(nnx.Rngs(seed))


def variables(model: Any) -> dict[Any, Any]:
    """Every Variable by path."""
    return {path: v for path, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)}


def twice(args: Any) -> Any:
    """The arguments of two calls, stacked along a new first axis."""
    return jax.tree.map(lambda a: jnp.stack([a, a]), args)


def row(name: str, family: str, sizes: dict[str, Any], args: tuple[Any, ...], /, *, twin: str = "",
        only_lazy: tuple[str, ...] = (), kwargs: Any = None, **options: Any) -> Row:
    """A row whose two spellings differ by the sizes alone."""
    flags = {k: options.pop(k) for k in ("main", "mutates", "has_entries", "sized_by_file") if k in options}
    lazy_cls, cls = getattr(lm, f"Lazy{twin or family}"), getattr(nnx, family, None) or getattr(lm, family)
    both = {k: v for k, v in options.items() if k not in only_lazy}
    return Row(
        name,
        family,
        lambda rngs: lazy_cls(**options, rngs=rngs),
        lambda rngs: cls(**sizes | both, rngs=rngs),
        args,
        kwargs or {},
        **flags,
        lazy_class=lazy_cls,
        of_class=lambda c, rngs: c(**options, rngs=rngs),
    )


def normal(key: Any, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    """An initializer that pickles, as Flax's own closures do not."""
    return nnx.initializers.normal(0.3)(key, shape, dtype)


def by_shape(key: Any, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    """An initializer of the user's own: it knows the layout, and draws twice."""
    first, second = jax.random.split(key)
    return jax.random.normal(first, shape, dtype) / len(shape) + jax.random.uniform(second, shape, dtype)


def from_numpy(key: Any, shape: Any, dtype: Any = jnp.float32) -> Any:
    """An initializer that computes outside of JAX."""
    return np.linspace(-1, 1, int(np.prod(shape))).reshape(shape).astype(dtype)


three = {"in_features": 3}
LINEAR = [
    row("linear", "Linear", three, (spec(2, 3),), out_features=4, main=True),
    row("linear-vector", "Linear", three, (spec(3),), out_features=4, use_bias=False),
    row("linear-inits", "Linear", three, (spec(2, 5, 1, 3),), out_features=4, kernel_init=he, bias_init=normal),
    row("linear-own-init", "Linear", three, (spec(2, 3),), out_features=4, kernel_init=by_shape, bias_init=by_shape),
    row("linear-numpy-init", "Linear", three, (spec(2, 3),), out_features=4, kernel_init=from_numpy),
    row("linear-orthogonal", "Linear", three, (spec(2, 3),), out_features=4, kernel_init=orthogonal,
        bias_init=constant),
    row("linear-bf16-params", "Linear", three, (spec(2, 3),), out_features=4, param_dtype=bf16, dtype=jnp.float32),
    row("linear-f16", "Linear", three, (spec(2, 3, dtype=f16),), out_features=4, param_dtype=f16, bias_init=normal),
    row("linear-computes-in-bf16", "Linear", three, (spec(2, 3),), out_features=4, dtype=bf16),
    row("linear-precision", "Linear", three, (spec(2, 3, dtype=bf16),), out_features=4, param_dtype=bf16,
        use_bias=False, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32),
    row("linear-metadata", "Linear", three, (spec(2, 3),), out_features=4, kernel_metadata={"role": "k"},
        bias_metadata={"role": "b", "steps": 3}),
    row("linear-with-metadata", "Linear", three, (spec(2, 3),), out_features=4,
        kernel_init=nnx.with_metadata(he, role="k")),
    row("linear-general", "LinearGeneral", three, (spec(2, 3),), out_features=(2, 2), main=True),
    row("linear-general-axes", "LinearGeneral", {"in_features": (3, 4)}, (spec(2, 3, 4),), out_features=4,
        axis=(-2, -1), bias_init=normal),
    row("linear-general-first-axis", "LinearGeneral", {"in_features": 3}, (spec(2, 3, 4),), out_features=4, axis=1,
        use_bias=False),
    row("linear-general-batch-axis", "LinearGeneral", {"in_features": 6, "batch_axis": {0: 2}}, (spec(2, 3, 6),),
        out_features=4, batch_axis=(0,), only_lazy=("batch_axis",)),
    row("linear-general-batch-axes", "LinearGeneral", {"in_features": 2, "batch_axis": {0: 2, 1: 3}},
        (spec(2, 3, 2),), out_features=4, batch_axis=(0, 1), only_lazy=("batch_axis",), bias_init=normal),
    row("linear-general-given-batch", "LinearGeneral", {"in_features": (6,)}, (spec(2, 3, 6),), out_features=(2, 2),
        batch_axis={0: 2}),
    row("einsum", "Einsum", {"kernel_shape": (2, 6, 4)}, (spec(3, 5, 6),), einsum_str="nta,hab->nthb",
        sizes={"h": 2, "b": 4}, only_lazy=("sizes",)),
    row("einsum-bias", "Einsum", {"kernel_shape": (3, 4)}, (spec(2, 3),), einsum_str=" nd, df -> nf", sizes={"f": 4},
        only_lazy=("sizes",), bias_shape=(4,), bias_init=normal, main=True),
    row("einsum-ellipsis", "Einsum", {"kernel_shape": (3, 4)}, (spec(2, 5, 3),), einsum_str="...d,df->...f",
        sizes={"f": 4}, only_lazy=("sizes",)),
    row("einsum-no-new-letter", "Einsum", {"kernel_shape": (3, 4)}, (spec(2, 3, 4),), einsum_str="bij,ij->bi",
        sizes={}, only_lazy=("sizes",)),
    row("embed", "Embed", {}, (spec(6, dtype=i32),), num_embeddings=6, features=4, main=True),
    row("embed-bf16", "Embed", {}, (spec(6, dtype=i32),), num_embeddings=6, features=4, param_dtype=bf16,
        embedding_init=constant),
    row("embed-one", "Embed", {}, (spec(6, dtype=i32),), num_embeddings=1, features=4, dtype=f16,
        embedding_metadata={"role": "table"}),
    row("embed-no-sizes", "Embed", {"num_embeddings": 6, "features": 4}, (spec(6, dtype=i32),), sized_by_file=True),
    row("embed-no-rows", "Embed", {"num_embeddings": 6}, (spec(6, dtype=i32),), features=4, sized_by_file=True),
]

CONV = [
    row("conv", "Conv", three, (spec(2, 8, 3),), out_features=4, kernel_size=(3,), main=True),
    row("conv-int-size", "Conv", three, (spec(2, 8, 3),), out_features=4, kernel_size=3, padding=2, bias_init=normal),
    row("conv-strided", "Conv", three, (spec(2, 9, 9, 3),), out_features=4, kernel_size=(3, 3), strides=2,
        padding="VALID", use_bias=False),
    row("conv-groups", "Conv", {"in_features": 6}, (spec(2, 8, 6),), out_features=4, kernel_size=(3,),
        feature_group_count=2),
    row("conv-depthwise", "Conv", {"in_features": 6}, (spec(2, 8, 6),), out_features=12, kernel_size=(3,),
        feature_group_count=6, kernel_init=orthogonal),
    row("conv-dilated", "Conv", three, (spec(2, 8, 3),), out_features=4, kernel_size=(3,), kernel_dilation=2,
        input_dilation=2, padding=[(1, 2)]),
    row("conv-causal", "Conv", three, (spec(2, 8, 3),), out_features=4, kernel_size=(3,), padding="CAUSAL"),
    row("conv-circular", "Conv", three, (spec(2, 9, 9, 3),), out_features=4, kernel_size=(3, 3), strides=(1, 2),
        padding="CIRCULAR"),
    row("conv-mask", "Conv", three, (spec(2, 8, 3),), out_features=4, kernel_size=(3,),
        mask=jnp.tril(jnp.ones((3, 3, 4)))),
    row("conv-two-batch-axes", "Conv", three, (spec(2, 2, 8, 3),), out_features=4, kernel_size=(3,)),
    row("conv1d", "Conv", three, (spec(2, 8, 3),), twin="Conv1d", out_features=4, kernel_size=3),
    row("conv2d-unbatched", "Conv", three, (spec(6, 6, 3),), twin="Conv2d", out_features=4, kernel_size=(3, 3)),
    row("conv3d", "Conv", three, (spec(1, 4, 4, 4, 3),), twin="Conv3d", out_features=2, kernel_size=(2, 2, 2)),
    row("conv-transpose", "ConvTranspose", three, (spec(2, 5, 3),), out_features=4, kernel_size=(3,), main=True),
    row("conv-transpose-strided", "ConvTranspose", three, (spec(2, 5, 5, 3),), out_features=4, kernel_size=(3, 3),
        strides=(2, 2), use_bias=False),
    row("conv-transpose-flipped", "ConvTranspose", three, (spec(2, 5, 5, 3),), out_features=4, kernel_size=(3, 3),
        transpose_kernel=True, padding="VALID"),
    row("conv-transpose-circular", "ConvTranspose", three, (spec(2, 5, 3),), out_features=4, kernel_size=(3,),
        strides=(2,), padding="CIRCULAR", bias_init=normal),
    row("conv-transpose-dilated", "ConvTranspose", three, (spec(2, 5, 3),), out_features=4, kernel_size=(3,),
        kernel_dilation=2, padding=1, mask=jnp.tril(jnp.ones((3, 3, 4)))),
    row("conv-transpose1d", "ConvTranspose", three, (spec(2, 5, 3),), twin="ConvTranspose1d", out_features=4,
        kernel_size=(3,)),
    row("conv-transpose2d", "ConvTranspose", three | {"kernel_size": (3, 3)}, (spec(5, 5, 3),),
        twin="ConvTranspose2d", out_features=4, kernel_size=3, only_lazy=("kernel_size",)),
    row("conv-transpose3d", "ConvTranspose", three, (spec(1, 3, 3, 3, 3),), twin="ConvTranspose3d", out_features=2,
        kernel_size=(2, 2, 2)),
]

four = {"num_features": 4}
NORM = [
    row("batch-norm", "BatchNorm", {"num_features": 6}, (spec(4, 6),), mutates=True),
    row("batch-norm-eval", "BatchNorm", {"num_features": 3}, (spec(2, 4, 4, 3),), use_running_average=True, main=True,
        bias_init=normal, scale_init=normal),
    row("batch-norm-at-call", "BatchNorm", four, (spec(2, 4),), use_running_average=None,
        kwargs={"use_running_average": True}),
    row("batch-norm-axis-1", "BatchNorm", {"num_features": 3}, (spec(2, 3, 4),), axis=1, momentum=0.5, mutates=True),
    row("batch-norm-plain", "BatchNorm", four, (spec(3, 4),), use_bias=False, use_scale=False, epsilon=1e-3,
        use_fast_variance=False, mutates=True),
    row("batch-norm-bf16", "BatchNorm", four, (spec(3, 4),), use_scale=False, param_dtype=bf16, dtype=jnp.float32,
        scale_metadata={"role": "s"}, bias_metadata={"role": "b"}, mutates=True),
    row("batch-norm1d", "BatchNorm", {"num_features": 5}, (spec(4, 7, 5),), twin="BatchNorm1d", momentum=0.9,
        mutates=True),
    row("batch-norm1d-flat", "BatchNorm", {"num_features": 5}, (spec(4, 5),), twin="BatchNorm1d", mutates=True),
    row("batch-norm2d", "BatchNorm", {"num_features": 3}, (spec(2, 4, 4, 3),), twin="BatchNorm2d", mutates=True),
    row("batch-norm3d", "BatchNorm", {"num_features": 3}, (spec(2, 2, 3, 4, 3),), twin="BatchNorm3d", mutates=True),
    row("layer-norm", "LayerNorm", {"num_features": 6}, (spec(2, 3, 6),), main=True),
    row("layer-norm-axes", "LayerNorm", {"num_features": 12}, (spec(2, 3, 4),), feature_axes=(-2, -1),
        reduction_axes=(1, 2), bias_init=normal, scale_init=normal),
    row("layer-norm-axis-1", "LayerNorm", {"num_features": 3}, (spec(2, 3, 4),), feature_axes=1, reduction_axes=-1,
        use_bias=False, param_dtype=bf16, dtype=jnp.float32),
    row("layer-norm-plain", "LayerNorm", four, (spec(2, 4),), use_bias=False, use_scale=False, has_entries=False),
    row("rms-norm", "RMSNorm", {"num_features": 6}, (spec(2, 6),), epsilon=1e-5, scale_init=normal, main=True),
    row("rms-norm-axes", "RMSNorm", {"num_features": 12}, (spec(2, 3, 4),), feature_axes=(1, 2), reduction_axes=(1, 2)),
    row("rms-norm-plain", "RMSNorm", four, (spec(2, 4),), use_scale=False, has_entries=False),
    row("group-norm", "GroupNorm", {"num_features": 6}, (spec(2, 4, 6),), num_groups=3, main=True, scale_init=normal),
    row("group-norm-size", "GroupNorm", {"num_features": 6}, (spec(2, 4, 4, 6),), num_groups=None, group_size=2),
    row("group-norm-32", "GroupNorm", {"num_features": 64}, (spec(2, 64),), use_bias=False),
    row("group-norm-plain", "GroupNorm", four, (spec(2, 4, 4),), num_groups=2, use_bias=False, use_scale=False,
        has_entries=False),
    row("instance-norm", "InstanceNorm", {"num_features": 3}, (spec(2, 5, 3),), main=True, bias_init=normal),
    row("instance-norm-axes", "InstanceNorm", {"num_features": 12}, (spec(2, 3, 5, 4),), feature_axes=(1, -1),
        use_bias=False),
    row("instance-norm-plain", "InstanceNorm", four, (spec(2, 5, 4),), use_bias=False, use_scale=False,
        has_entries=False),
    row("instance-norm1d", "InstanceNorm", {"num_features": 3}, (spec(2, 5, 3),), twin="InstanceNorm1d",
        use_scale=False),
    row("instance-norm2d", "InstanceNorm", {"num_features": 3}, (spec(2, 4, 4, 3),), twin="InstanceNorm2d"),
    row("instance-norm3d", "InstanceNorm", {"num_features": 2}, (spec(2, 3, 3, 3, 2),), twin="InstanceNorm3d"),
]

eight = {"in_features": 8}
queries, keys = spec(2, 5, 8), spec(2, 6, 4)
ATTENTION = [
    row("attention", "MultiHeadAttention", eight, (queries,), num_heads=2, decode=False, main=True),
    row("attention-sizes", "MultiHeadAttention", eight, (queries,), num_heads=2, qkv_features=4, out_features=6,
        decode=False, use_bias=False),
    row("attention-other-keys", "MultiHeadAttention", eight | {"in_kv_features": 4}, (queries, keys), num_heads=2,
        decode=False, out_kernel_init=orthogonal, out_bias_init=constant),
    row("attention-values", "MultiHeadAttention", eight | {"in_kv_features": 4}, (queries, keys, keys), num_heads=2,
        decode=False, kwargs={"is_causal": True}),
    row("attention-given-keys", "MultiHeadAttention", eight, (queries, keys), num_heads=2, in_kv_features=4,
        decode=False),
    row("attention-normalized", "MultiHeadAttention", eight, (queries,), num_heads=2, decode=False, normalize_qk=True,
        query_ln_scale_metadata={"role": "q"}),
    row("attention-grouped", "MultiHeadAttention", eight, (queries,), num_heads=4, num_kv_heads=2, decode=False),
    row("attention-dropout", "MultiHeadAttention", eight, (queries,), num_heads=2, decode=False, dropout_rate=0.5,
        deterministic=False, mutates=True),
    row("attention-dropout-off", "MultiHeadAttention", eight, (queries,), num_heads=2, decode=False, dropout_rate=0.5,
        keep_rngs=False, kwargs={"deterministic": True}),
]

base = {
    "ready": lambda rngs: nnx.Linear(3, 4, rngs=rngs),
    "lazy": lambda rngs: lm.LazyLinear(4, rngs=rngs),
}


def adapter(name: str, lazy_base: str) -> Row:
    """LoRA around a base module, lazy or ready."""
    return Row(
        name,
        "LoRA",
        lambda rngs: lm.LazyLoRA(2, 4, base_module=base[lazy_base](rngs), b_initializer=normal, rngs=rngs),
        lambda rngs: nnx.LoRA(3, 2, 4, base_module=base["ready"](rngs), b_initializer=normal, rngs=rngs),
        (spec(2, 3),),
    )


LORA = [
    row("lora", "LoRA", three, (spec(2, 3),), lora_rank=2, out_features=4, b_initializer=normal, main=True),
    row("lora-params", "LoRA", three, (spec(2, 3),), lora_rank=2, out_features=4, lora_param_type=nnx.Param,
        a_initializer=by_shape, a_metadata={"role": "a"}),
    adapter("lora-lazy-base", "lazy"),
    adapter("lora-ready-base", "ready"),
    row("lora-linear", "LoRALinear", three, (spec(2, 3),), out_features=4, lora_rank=2, b_initializer=normal,
        main=True),
    row("lora-linear-options", "LoRALinear", three, (spec(2, 3),), out_features=4, lora_rank=2, use_bias=False,
        kernel_init=orthogonal, lora_param_dtype=bf16, lora_dtype=jnp.float32),
]

one_carry, two_carries = (spec(2, 4), spec(2, 3)), ((spec(2, 4), spec(2, 4)), spec(2, 3))
CELLS = [
    row("simple-cell", "SimpleCell", three, one_carry, hidden_features=4, main=True),
    row("simple-cell-residual", "SimpleCell", three, one_carry, hidden_features=4, residual=True,
        activation_fn=jax.nn.relu, bias_init=normal),
    row("lstm-cell", "LSTMCell", three, two_carries, hidden_features=4, main=True),
    row("lstm-cell-bf16", "LSTMCell", three, two_carries, hidden_features=4, param_dtype=bf16, dtype=jnp.float32,
        bias_init=normal),
    row("optimized-lstm-cell", "OptimizedLSTMCell", three, two_carries, hidden_features=4, main=True),
    row("gru-cell", "GRUCell", three, one_carry, hidden_features=4, main=True),
    row("gru-cell-options", "GRUCell", three, one_carry, hidden_features=4, gate_fn=jax.nn.hard_sigmoid,
        kernel_init=he, bias_init=normal, kernel_metadata={"role": "k"}),
    row("reset-after-gru-cell", "ResetAfterGRUCell", three, one_carry, hidden_features=4, main=True),
    row("reset-after-gru-cell-options", "ResetAfterGRUCell", three, one_carry, hidden_features=4,
        activation_fn=jax.nn.relu, param_dtype=bf16, recurrent_kernel_init=he, dtype=jnp.float32, bias_init=normal,
        bias_metadata={"role": "b"}),
]


def rnn(name: str, cell: str, *, main: bool = False, **options: Any) -> Row:
    """A cell inside nnx.RNN, which draws from a stream for the carry at every call."""
    lazy_cls, cls = getattr(lm, f"Lazy{cell}"), getattr(nnx, cell, None) or getattr(lm, cell)
    return Row(
        name,
        "RNN",
        lambda rngs: nnx.RNN(lazy_cls(4, rngs=rngs), **options),
        lambda rngs: nnx.RNN(cls(3, 4, rngs=rngs), **options),
        (spec(2, 5, 3),),
        main=main,
        mutates=True,
    )


RNNS = [
    rnn("rnn-simple", "SimpleCell", time_major=True, reverse=True),
    rnn("rnn-lstm", "LSTMCell", return_carry=True),
    rnn("rnn-optimized-lstm", "OptimizedLSTMCell", unroll=2),
    rnn("rnn-gru", "GRUCell", main=True),
    rnn("rnn-reset-after-gru", "ResetAfterGRUCell", reverse=True, keep_order=True),
    Row(
        "bidirectional",
        "Bidirectional",
        lambda r: nnx.Bidirectional(nnx.RNN(lm.LazyGRUCell(4, rngs=r)), nnx.RNN(lm.LazyLSTMCell(4, rngs=r)), rngs=r),
        lambda r: nnx.Bidirectional(nnx.RNN(nnx.GRUCell(3, 4, rngs=r)), nnx.RNN(nnx.LSTMCell(3, 4, rngs=r)), rngs=r),
        (spec(2, 5, 3),),
        main=True,
        mutates=True,
    ),
]

INNER: dict[str, tuple[Make, Make, Any]] = {
    "linear": (base["lazy"], base["ready"], spec(2, 3)),
    "conv": (lambda r: lm.LazyConv(4, (3,), rngs=r), lambda r: nnx.Conv(3, 4, (3,), rngs=r), spec(2, 8, 3)),
    "ready": (base["ready"], base["ready"], spec(2, 3)),
    "attention": (lambda r: lm.LazyMultiHeadAttention(2, decode=False, rngs=r),
                  lambda r: nnx.MultiHeadAttention(2, 8, decode=False, rngs=r), spec(2, 5, 8)),
    "net": (lambda r: nnx.Sequential(lm.LazyLinear(4, rngs=r), jax.nn.relu, lm.LazyLinear(2, rngs=r)),
            lambda r: nnx.Sequential(nnx.Linear(3, 4, rngs=r), jax.nn.relu, nnx.Linear(4, 2, rngs=r)), spec(2, 3)),
}


def wrapped(family: str, inner: str, suffix: str = "", **options: Any) -> Row:
    """WeightNorm or SpectralNorm around a layer; both write the layer's kernel at every call."""
    lazy_inner, explicit_inner, x = INNER[inner]
    lazy_cls, cls = getattr(lm, f"Lazy{family}"), getattr(nnx, family)
    name = "weight-norm" if family == "WeightNorm" else "spectral-norm"
    return Row(
        f"{name}-{inner}{suffix}",
        family,
        lambda rngs: lazy_cls(lazy_inner(rngs), rngs=rngs, **options),
        lambda rngs: cls(explicit_inner(rngs), rngs=rngs, **options),
        (x,),
        main=inner == "linear" and not suffix,
        mutates=True,
        lazy_class=lazy_cls,
        of_class=lambda c, rngs: c(lazy_inner(rngs), rngs=rngs, **options),
    )


WRAPPED = [
    wrapped("WeightNorm", "linear"),
    wrapped("WeightNorm", "conv", scale_init=constant),
    wrapped("WeightNorm", "ready"),
    wrapped("WeightNorm", "attention", feature_axes=(-2, -1)),
    wrapped("WeightNorm", "net", feature_axes=None),
    wrapped("WeightNorm", "linear", "-no-scale", use_scale=False, epsilon=1e-6),
    wrapped("SpectralNorm", "linear"),
    wrapped("SpectralNorm", "conv", n_steps=2),
    wrapped("SpectralNorm", "ready", epsilon=1e-6),
    wrapped("SpectralNorm", "attention"),
    wrapped("SpectralNorm", "net"),
    wrapped("SpectralNorm", "linear", "-fixed", update_stats=False, error_on_non_matrix=True),
]

TABLE = [*LINEAR, *CONV, *NORM, *ATTENTION, *LORA, *CELLS, *RNNS, *WRAPPED]
MAIN = [r for r in TABLE if r.main]
# layers whose call writes Variables in other ways than those of MAIN do
WRITERS = [r for r in TABLE if r.name in ("batch-norm", "attention-dropout", "weight-norm-net", "spectral-norm-net")]
