"""Buffers that PyTorch's models store and that JAX's compute: masks, positions, frequencies, counters.

A load ignores those that the model has no place for, and says so. What they are is seen by their names, and by their
values where a parameter could be called so.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lazymods.state.files.stored import StoredTensor

_BY_NAME = {
    "num_batches_tracked": "a counter",
    "n_averaged": "a counter",  # of torch.optim.swa_utils.AveragedModel
    "inv_freq": "rotary frequencies",
    "original_inv_freq": "rotary frequencies",
    "cos_cached": "rotary angles",
    "sin_cached": "rotary angles",
    "relative_position_index": "indices of positions",
    "relative_coords_table": "distances of positions",
}
_MASKS = ("bias", "mask", "causal_mask", "attn_mask", "tril")


def known_buffer(name: str, tensor: Any) -> str | None:
    """Say which known buffer an entry is, or None; values are read only where the name leaves a doubt."""
    if not isinstance(tensor, StoredTensor):
        return None
    leaf = name.rpartition(".")[2]
    shape, kind = tensor.shape, tensor.dtype.kind
    if leaf in _BY_NAME:
        return _BY_NAME[leaf]
    if leaf == "masked_bias" and shape == ():
        return "the number of masked places"
    if leaf in ("position_ids", "token_type_ids") and kind in "iu" and shape:
        values = tensor.read()
        wanted = np.arange(shape[-1]) if leaf == "position_ids" else np.zeros(1)
        return "numbers of positions" if np.array_equal(values, np.broadcast_to(wanted, shape)) else None
    if leaf == "attn_mask" and len(shape) == 3 and np.isin(tensor.read().astype(np.float32), (0, -100)).all():
        return "a mask of shifted windows"
    if leaf in _MASKS and len(shape) >= 2 and shape[-1] == shape[-2] > 1 and set(shape[:-2]) <= {1}:
        return "a causal mask" if _is_causal(np.asarray(tensor.read()).reshape(shape[-2:])) else None
    return None


def _is_causal(mask: np.ndarray[Any, Any]) -> bool:
    """Whether a matrix is a causal mask: ones up to the diagonal and zeros beyond, or what is added to scores."""
    below = np.tril(np.ones(mask.shape, bool))
    if np.array_equal(mask != 0, below):
        return bool((mask[below] == 1).all())
    return bool((mask[below] == 0).all() and (mask[~below].astype(np.float64) <= -1e4).all())
