"""Saving to an Orbax folder: written beside the old one while the program goes on, then put in its place."""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lazymods._errors import CheckpointError, Problem
from lazymods.state.files.stored import ALIASES, texts_as_array


class PendingSave:
    """A save that goes on in the background: its values are those of the moment when it was begun.

    The interpreter does not end before the folder is complete.
    """

    def __init__(self, checkpointer: Any, staging: Path, path: Path) -> None:
        self._error: BaseException | None = None
        _wait_at_exit()
        _UNFINISHED.add(self)
        self._thread = threading.Thread(target=self._finish, args=(checkpointer, staging, path), name=f"saving {path}")
        self._thread.start()

    def _finish(self, checkpointer: Any, staging: Path, path: Path) -> None:
        try:
            checkpointer.wait_until_finished()
            if jax.process_index() == 0:
                _put_in_place(staging, path)
        except BaseException as error:
            self._error = error
            shutil.rmtree(staging, ignore_errors=True)
        finally:
            checkpointer.close()

    @property
    def done(self) -> bool:
        """Whether the folder is complete, or the save has failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the folder is complete.

        Raises:
            Exception: What the save failed with; the old folder is still there.
        """
        self._thread.join()
        _UNFINISHED.discard(self)
        if self._error is not None:
            raise self._error


_UNFINISHED: set[PendingSave] = set()  # what nobody has waited for yet


@functools.cache
def _wait_at_exit() -> None:
    """Let the interpreter wait for all saves before it ends.

    ``atexit`` comes too late: by then no executor takes work, and Orbax fails. ``threading._register_atexit``, which
    ``concurrent.futures`` itself uses (seen in Python 3.11 to 3.13), comes before that.
    """
    getattr(threading, "_register_atexit")(_wait_for_all)  # noqa: B009 - private, see above


def _wait_for_all() -> None:
    for save in list(_UNFINISHED):
        save.wait()


def begin_orbax(path: Path, arrays: Mapping[str, Any], aliases: Mapping[str, str]) -> PendingSave:
    """Begin to write a folder; return when all values have been copied from the device.

    Raises:
        CheckpointError: If Orbax cannot hold an array: one without elements.
    """
    import orbax.checkpoint as ocp

    for name, array in arrays.items():
        if np.size(array) == 0:
            got, needed = f"an array of shape {np.shape(array)}", "arrays with elements: Orbax stores no others"
            raise CheckpointError(Problem(f"{path.name}: {name}", got, needed, f"lm.save(model, '{path}.safetensors')"))
    tree = _nested(dict(arrays) | ({ALIASES: texts_as_array(aliases)} if aliases else {}))
    staging = path.with_name(f".{path.name}.saving")  # the same in every process
    checkpointer = ocp.StandardCheckpointer()
    try:
        checkpointer.save(staging, tree, force=True)
    except BaseException:
        checkpointer.close()
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return PendingSave(checkpointer, staging, path)


def _nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree of dicts by the parts of the names; a name below another one, as a key's, stays whole."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, last = name.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {}) if isinstance(node, dict) else node
        if isinstance(node, dict) and last not in node:
            node[last] = array
        else:
            tree[name] = array
    return tree


def _put_in_place(staging: Path, path: Path) -> None:
    replaced = path.with_name(f".{path.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        os.rename(path, replaced)
    os.rename(staging, path)
    shutil.rmtree(replaced, ignore_errors=True)
