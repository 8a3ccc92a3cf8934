"""Orbax's own restore, array by array: each process reads what its devices hold."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from lazymods.state.files.orbax import OrbaxArray, calling_tensorstore


def restore(arrays: Sequence[OrbaxArray], shardings: Sequence[Any]) -> list[jax.Array]:
    """Restore arrays of one folder onto devices, each with the dtype that it has in the folder.

    No process waits for another one.

    Args:
        arrays: The arrays.
        shardings: Where each goes.

    Raises:
        CheckpointError: If one cannot be read, or the folder has been replaced meanwhile.
    """
    import orbax.checkpoint as ocp

    handlers = ocp.type_handlers
    held = arrays[0].held
    folder: Any = held.folder  # Orbax's own kind of path does as well
    infos = [
        handlers.ParamInfo(
            name=array.name,
            parent_dir=folder,
            is_ocdbt_checkpoint=array.has_store,
            use_zarr3=bool(array.options.get("use_zarr3")),
            raise_array_data_missing_error=bool(array.options.get("store_array_data_equal_to_fill_value")),
            ts_context=array.context,
        )
        for array in arrays
    ]
    wanted = [
        ocp.ArrayRestoreArgs(sharding=sharding, global_shape=array.shape)
        for array, sharding in zip(arrays, shardings, strict=True)
    ]
    names = ", ".join(array.name for array in arrays[:3]) + (", ..." if len(arrays) > 3 else "")
    with calling_tensorstore(held.path, names), ThreadPoolExecutor(1) as pool:
        # in a thread of its own: this one may have an event loop, as in a notebook
        restored = pool.submit(asyncio.run, handlers.ArrayHandler().deserialize(infos, wanted)).result()
    held.check()
    return list(restored)
