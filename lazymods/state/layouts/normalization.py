"""Normalization layers.

What a file does not hold is the constructor's: ``epsilon`` (PyTorch: 1e-5 for all but RMSNorm, Flax: 1e-6 for most),
``momentum`` (Flax's is 1 minus PyTorch's), the number of groups. Running statistics load exactly; if the model is
trained on, Flax's ``BatchNorm`` adds the biased variance of a batch to them, PyTorch's the unbiased one.
"""

from __future__ import annotations

from lazymods.state.layouts.axes import Layout, channels_first, channels_last, check_rank
from lazymods.state.layouts.rule import Cannot, Field, Simple
from lazymods.state.layouts.site import Array, Refusal, Site


class _Features(Layout):
    """One number a feature; of several feature axes Flax has all in one axis, PyTorch as many as they are."""

    def to_flax(self, array: Array, site: Site) -> Array:
        """Flatten, channels last if ``flatten`` says so."""
        if site.sizes is None and (array.ndim < 2 or array.ndim == _rank(site)):  # as many axes as stacked layers have
            return array
        if site.sizes is None:
            raise Refusal(
                f"shape {array.shape}, several feature axes",
                "the order of these axes in the model, which the file does not hold",
                f'flatten={{"{site.prefix[:-1]}": (height, width, channels)}}  # if channels come first in PyTorch; '
                f'flatten={{"{site.prefix[:-1]}": (features,)}} if the order is the same',
            )
        if array.ndim > 1 and len(site.sizes) > 1 and array.shape != (site.sizes[-1], *site.sizes[:-1]):
            raise Refusal(
                f"shape {array.shape}, and flatten sizes {site.sizes}",
                f"shape {(site.sizes[-1], *site.sizes[:-1])} for these sizes: channels come first in PyTorch",
                "flatten={'fc': (height, width, channels)}  # the sizes of the input",
            )
        return channels_last(array.reshape(-1), site.sizes)

    def to_torch(self, array: Array, site: Site) -> Array:
        """Put into PyTorch's axes, channels first, if ``flatten`` tells them."""
        check_rank(array, 1, site)
        axes = site.get("feature_axes")
        if site.sizes is None and isinstance(axes, (tuple, list)) and len(axes) > 1:
            raise Refusal(
                f"feature_axes={tuple(axes)}, several axes in one",
                "their sizes, for PyTorch has as many axes",
                f'flatten={{"{site.prefix[:-1]}": (height, width, channels)}}  # written channels first',
            )
        if site.sizes is None:
            return array
        return channels_first(array, site.sizes).reshape(site.sizes[-1], *site.sizes[:-1])


def _rank(site: Site) -> int:
    shape = site.shape("scale")
    return len(shape if shape is not None else site.shape("bias") or ())


class _Channels(Layout):
    """One number a channel, or, after a flatten, one for each number of what was flattened."""

    def to_flax(self, array: Array, site: Site) -> Array:
        """Put channels last, if ``flatten`` says so."""
        return array if site.sizes is None or array.ndim == 0 else channels_last(array, site.sizes)

    def to_torch(self, array: Array, site: Site) -> Array:
        """Put channels first, if ``flatten`` says so."""
        return array if site.sizes is None else channels_first(array, site.sizes)


_CHANNELS = _Channels()
_FEATURES = _Features()
_SCALE, _BIAS = Field("weight", "scale", _FEATURES), Field("bias", "bias", _FEATURES)

_STATISTICS = Cannot(
    "running_mean|running_var|num_batches_tracked",
    "running statistics, by which PyTorch normalizes in eval mode",
    "track_running_stats=False: nnx.InstanceNorm normalizes by the input's own statistics",
    'rename={{"{name}": None}}  # drops it; if it is wanted: nnx.BatchNorm in place of nnx.InstanceNorm',
)

BATCH_NORM = Simple(
    Field("running_mean", "mean", _CHANNELS),
    Field("running_var", "var", _CHANNELS),
    Field("weight", "scale", _CHANNELS),
    Field("bias", "bias", _CHANNELS),
    counters=("num_batches_tracked",),
    flattens=True,
)
LAYER_NORM = Simple(_SCALE, _BIAS, flattens=True)
RMS_NORM = Simple(_SCALE, flattens=True)
GROUP_NORM = Simple(Field("weight", "scale"), Field("bias", "bias"))
INSTANCE_NORM = Simple(Field("weight", "scale"), Field("bias", "bias"), cannot=(_STATISTICS,))
