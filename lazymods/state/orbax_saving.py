"""Saving to an Orbax folder: written beside the old one while the program goes on, then put in its place."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lazymods._errors import CheckpointError, LazyError, Problem, SaveError, describe
from lazymods._spread import on_host
from lazymods.state.files import orbax, replacing
from lazymods.state.files.json_text import texts_as_array
from lazymods.state.files.paths import check_orbax_path
from lazymods.state.files.stored import MAX_NAME_BYTES, NOTES, printable


class PendingSave:
    """A save that goes on in the background: its values are those of the moment when it was begun.

    The interpreter does not end before the folder is complete.
    """

    def __init__(self, checkpointer: Any, work: _Work, path: Path) -> None:
        self._error: BaseException | None = None
        _wait_at_exit()
        _UNFINISHED.add(self)
        self._thread = threading.Thread(target=self._finish, args=(checkpointer, work, path), name=f"saving {path}")
        self._thread.start()

    def _finish(self, checkpointer: Any, work: _Work, path: Path) -> None:
        try:
            with contextlib.ExitStack() as ending:
                ending.callback(work.close)
                ending.callback(_WRITING.release)
                try:
                    checkpointer.wait_until_finished()
                finally:
                    checkpointer.close()  # which raises once more what the save has failed by
                work.put_in_place()
        except LazyError as error:
            self._error = error
        except Exception as error:
            self._error = replacing.cannot_write(path, error)
            self._error.__cause__ = error
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        """Whether the folder is complete, or the save has failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the folder is complete.

        Raises:
            CheckpointError: If the save has failed; the old folder is still there.
        """
        self._thread.join()
        _UNFINISHED.discard(self)
        if self._error is not None:
            raise self._error


_UNFINISHED: set[PendingSave] = set()  # what nobody has waited for yet

_WRITING = threading.Lock()
"""Held by the save that Orbax writes: it numbers its saves for the whole process, and of two at once (seen with Orbax
0.12) each waits for ever for the other's threads. Any thread may release it."""


@functools.cache
def _wait_at_exit() -> None:
    """Let the interpreter wait for all saves before it ends.

    ``atexit`` comes too late: by then no executor takes work, and Orbax fails. ``threading._register_atexit``, which
    ``concurrent.futures`` itself uses (seen in Python 3.11 to 3.13), comes before that.
    """
    getattr(threading, "_register_atexit")(_wait_for_all)  # noqa: B009 - private, see above


def _wait_for_all() -> None:
    with contextlib.ExitStack() as waiting:  # also for those after one that has failed
        for save in list(_UNFINISHED):
            waiting.callback(save.wait)


def check_target(path: Path) -> None:
    """Refuse to write a folder where something stands that is neither a checkpoint nor a regular file.

    Raises:
        CheckpointError: If it would be lost: another folder, also one with a checkpoint and other things in it; or if
            Orbax takes no such path.
    """
    check_orbax_path(path)
    while True:
        before = _identity(path)
        kind = replacing.kind_of(path)
        try:
            got = kind if kind not in ("nothing", "file", "folder") else None
            got = orbax.refuse_to_replace(path) if kind == "folder" else got
        except OSError:
            if before == _identity(path):
                raise
            continue
        if got is None:
            return
        if before == _identity(path):
            raise replacing.refuse_target(path, got)
        # another save has put its folder there meanwhile, and has removed what was looked at


def _identity(path: Path) -> tuple[int, ...] | None:
    """Return what differs once something else stands at a path, or what stands there has changed."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def begin_orbax(path: Path, arrays: Mapping[str, Any], notes: Mapping[str, Mapping[str, str]]) -> PendingSave:
    """Begin to write a folder; return when all values have been copied from the device.

    Raises:
        CheckpointError: If there is no array; if something stands there that would be lost; or if it cannot be written.
    """
    check_target(path)
    import orbax.checkpoint as ocp

    if not arrays:
        got = "nothing: the state has no array and no number"
        needed = "an array: Orbax stores no folder without one"
        raise CheckpointError(Problem(printable(path.name), got, needed, _as_npz(path)))
    written = {name: _for_all(array) for name, array in arrays.items()}
    tree = _nested(written | {key: texts_as_array(texts) for key, texts in notes.items()})
    work = None
    _WRITING.acquire()  # until the folder is written, in the background as well
    try:
        work = _Work(path)
        checkpointer = ocp.StandardCheckpointer()
        try:
            checkpointer.save(work.new, tree)
        except BaseException:
            checkpointer.close()
            raise
    except BaseException as error:
        _WRITING.release()
        if work is not None:
            work.close()
        if isinstance(error, LazyError) or not isinstance(error, Exception):
            raise
        raise replacing.cannot_write(path, error) from error
    return PendingSave(checkpointer, work, path)


def _for_all(array: Any) -> Any:
    """Return an array as Orbax takes it from several processes: one that each has for itself as the first one's."""
    is_own = jax.process_count() > 1 and isinstance(array, jax.Array) and array.is_fully_addressable
    return on_host(array) if is_own else array


class _Work:
    """The new folder of a save: the first process makes it and puts it in its place; all of them write to it.

    Attributes:
        new: Where it is made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._room: replacing.Room | None = None
        if jax.process_count() == 1:
            self._room = _make_room(path)
            self.new: Path = self._room.new
            return
        self._number = next(_NUMBERS)
        self._meet("begins", f"a call of lm.save for {printable(str(path))} in every process, in the same order")
        failed = None
        if jax.process_index() == 0:
            try:
                self._room = _make_room(path)
            except OSError as error:
                failed = error
        token = _told_by_the_first(self._room.token if self._room is not None else "")
        if not token:
            raise failed or OSError("the first process could not make a folder beside the target")
        self.new = replacing.new_in(path, token)

    def put_in_place(self) -> None:
        """Give the folder its name; in every process it is there afterwards.

        Raises:
            CheckpointError: If it cannot be put there, or another process is gone.
        """
        if jax.process_count() == 1:
            self._put()
            return
        needed = "the first process, which gives the folder its name"
        try:
            if self._room is not None:
                self._put()
        finally:
            self._meet("ends", needed)
            is_left = self.new.exists()  # in the first one's room, which it has kept
            self._meet("has ended", needed)
        if is_left and self._room is None:
            raise OSError("the first process could not put the folder in its place; it says why")

    def _put(self) -> None:
        if self._room is not None:
            self._room.put_in_place(check_target)
            self.close()

    def close(self) -> None:
        """Remove the room with what is left in it."""
        if self._room is not None:
            self._room.close()
            self._room = None

    def _meet(self, what: str, needed: str) -> None:
        """Wait for all processes, and not for ever.

        Raises:
            SaveError: If one does not come.
        """
        import orbax.checkpoint as ocp

        wait = ocp.multihost.get_barrier_sync_fn()
        try:
            wait(key=f"lazymods_save_{self._number}_{what}", timeout_ms=int(MISSING_AFTER * 1000))
        except Exception as error:
            count = jax.process_count()
            got = f"a process that is missing where the save {what}: {MISSING_AFTER} s were not enough for all {count}"
            where, line = printable(str(self._path), 5000), "lm.save(model, path)  # in every process"
            raise SaveError(Problem(where, got, needed, line)) from error


MISSING_AFTER = 300.0
"""How many seconds a save waits for a process that has not come."""

_NUMBERS = itertools.count()  # of this process's saves, with others; they count alike


def _make_room(path: Path) -> replacing.Room:
    path.parent.mkdir(parents=True, exist_ok=True)
    replacing.sweep(path)
    return replacing.Room(path)


def _told_by_the_first(token: str) -> str:
    """Return the token of the first process to all of them; every save has its own."""
    from jax.experimental import multihost_utils

    raw = np.frombuffer(token.encode().ljust(replacing.TOKEN_LENGTH), np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(raw))).decode().strip()


def orbax_problem(path: Path, name: str, array: Any) -> Problem | None:
    """Say why Orbax cannot hold an array, such as one without elements, if so."""
    missing = _missing_in_orbax(name, array)
    return None if missing is None else Problem(printable(f"{path.name}: {name}"), *missing, _as_npz(path))


def _as_npz(path: Path) -> str:
    return f"lm.save(model, '{printable(str(path))}.npz')"


def _missing_in_orbax(name: str, array: Any) -> tuple[str, str] | None:
    """Say why Orbax can't store an array, or we not find it again, and what it needs; None if they can."""
    import tensorstore

    if np.size(array) == 0:
        return f"an array of shape {np.shape(array)}", "arrays with elements: Orbax stores no others"
    is_name = all(name.split(".")) and "\0" not in name and orbax.stays_inside(name)
    if name in NOTES or len(name.encode()) > MAX_NAME_BYTES or not is_name:
        needed = "a name that a folder can have, of parts with a dot between each two"
        return f"the name {printable(repr(name))}", needed
    try:
        tensorstore.dtype(array.dtype.name)
    except (TypeError, ValueError):
        return describe(array), "an array of a dtype that tensorstore has"
    return None


def _nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree of dicts by the parts of the names.

    A name below that of another array, as a key's ``key.impl``, stays whole; so does one that ends in ``value``, for a
    reader takes that level for the one that ``nnx.State`` has below each Variable.
    """
    tree: dict[str, Any] = {}
    for name, array in sorted(arrays.items(), key=lambda item: item[0].count(".")):
        *parents, last = name.split(".")
        if last == orbax.VALUE:
            tree[name] = array
            continue
        node = tree
        for part in parents:
            node = node.setdefault(part, {}) if isinstance(node, dict) else node
        if isinstance(node, dict) and last not in node:
            node[last] = array
        else:
            tree[name] = array
    return tree
