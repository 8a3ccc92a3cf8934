"""A file or folder that takes the place of another one: whole or not at all, and only where that harms nothing.

What is written lies under a name of its own beside the target until it is complete, then takes the target's name in
one step. Everyone who looks finds the old or the new, also after a kill at any moment; of several saves to one path
the last to finish wins.

A temporary is locked by the process that writes it, and the system drops the lock when the process ends, however it
ends. So a temporary that can be locked is one that nobody writes any more: the next save of the same target removes it.
Where there are no such locks nothing is removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from lazymods._errors import CheckpointError, LazyError, Problem, SaveError, one_line
from lazymods.state.files.exchange import exchange
from lazymods.state.files.stored import printable

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

_ATTEMPTS = 100  # each failed one is another save that was faster
_CHANGED = (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
_ERROR_CODE = re.compile(r"os_error_code='(\d+)'")
_MARK = "lazymods"
_LOCK, _NEW, _OLD = "lock", "new", "old"  # what a room holds
_BINARY = getattr(os, "O_BINARY", 0)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def cannot_write(path: Path, error: Exception) -> SaveError:
    """Make the error for a save that the system, or Orbax, has failed."""
    code = error.errno if isinstance(error, OSError) else None
    told = _ERROR_CODE.search(str(error))  # tensorstore raises a ValueError with the system's number in its text
    code = int(told[1]) if told and code is None else code
    reason = os.strerror(code) if code else one_line(error)
    got = printable(f"{type(error).__name__}: {reason}", 500)
    needed = "a folder that can be written to, with room for the checkpoint; what was there before is as it was"
    line = "lm.save(model, path)  # again, or to another path"
    if code == errno.ENOENT and not os.path.isdir(path.parent):
        got, line = "a path in a folder that is not there", f"os.makedirs({str(path.parent)!r})"
    made = SaveError(Problem(printable(str(path), 5000), got, needed, line))
    made.errno = code
    return made


def refuse_target(path: Path, got: str) -> CheckpointError:
    """Make the error for a save to where something stands that it would destroy."""
    shown = printable(str(path), 5000)
    needed = "a new path, a checkpoint that load would open, or a regular file: nothing else is ever replaced"
    line = "lm.save(model, 'model.safetensors')  # or here, once what is there has been moved away by hand"
    return CheckpointError(Problem(shown, got, needed, line))


def kind_of(path: Path) -> str:
    """Say what stands under a name: ``"nothing"``, ``"file"``, ``"folder"``, or what else it is.

    A link counts as what it is: the callers have followed those that lead anywhere.
    """
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "nothing"
    for is_kind, kind in (
        (stat.S_ISREG, "file"),
        (stat.S_ISDIR, "folder"),
        (stat.S_ISLNK, "a link that leads nowhere"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if is_kind(mode):
            return kind
    return "a device"


def check_file_target(path: Path) -> None:
    """Refuse to write a file where something else stands.

    Raises:
        CheckpointError: If something is there that is no regular file.
    """
    kind = kind_of(path)
    if kind not in ("nothing", "file"):
        raise refuse_target(path, "a folder" if kind == "folder" else kind)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that takes the place of ``path`` at the end, if nothing was raised.

    It gets the mode, and if it may the owner, of the file that it replaces; a new one those that any new file gets.

    Raises:
        CheckpointError: If something is there that is no regular file.
        SaveError: If it cannot be written.
    """
    check_file_target(path)
    try:
        sweep(path)
        temporary, descriptor = _locked_file(path)
        try:
            with open(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                check_file_target(path)
                _copy_permissions(path, temporary)
                os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except LazyError:
        raise
    except OSError as error:
        raise cannot_write(path, error) from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system can: what is in its place is there, durable or not."""
    if os.name == "posix":
        with contextlib.suppress(OSError):  # a folder that this user may not list, or a file system without it
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _copy_permissions(old: Path, new: Path) -> None:
    try:
        before = os.lstat(old)
    except FileNotFoundError:
        return
    now = os.lstat(new)
    if (before.st_uid, before.st_gid) != (now.st_uid, now.st_gid) and hasattr(os, "chown"):
        with contextlib.suppress(OSError):  # only a superuser may give files away
            os.chown(new, before.st_uid, before.st_gid)
    mode = stat.S_IMODE(before.st_mode)
    if stat.S_ISREG(before.st_mode) and stat.S_ISDIR(now.st_mode):  # who may read a file may enter a folder
        mode |= (mode & 0o444) >> 2
    os.chmod(new, mode)


# ---------------------------------------------------------------- temporaries


TOKEN_LENGTH = 16


def _token() -> str:
    return secrets.token_hex(TOKEN_LENGTH // 2)


def _named(path: Path, token: str) -> Path:
    return path.with_name(f"{_prefix(path)}{token}.{_MARK}")


def _prefix(path: Path) -> str:
    return f".{path.name.encode(errors='surrogateescape')[:200].decode(errors='ignore')}."  # names end at 255 bytes


def _temporaries(path: Path) -> list[Path]:
    """Return what saves of a path have beside it, finished or not."""
    pattern = re.compile(re.escape(_prefix(path)) + rf"[0-9a-f]{{{TOKEN_LENGTH}}}\.{_MARK}")
    unseen = (FileNotFoundError, NotADirectoryError, PermissionError)
    with contextlib.suppress(*unseen), os.scandir(path.parent) as entries:
        return [Path(entry.path) for entry in entries if pattern.fullmatch(entry.name)]
    return []


def _locked_file(path: Path) -> tuple[Path, int]:
    """Make a temporary that is locked as long as its descriptor, or a copy of it, is open."""
    mode = 0o666 if kind_of(path) == "nothing" else 0o600  # at no time may more people read it than the old one
    while True:
        temporary = _named(path, _token())
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | _BINARY, mode)
        if _keep_lock(temporary, descriptor):
            return temporary, descriptor


def _keep_lock(file: Path, descriptor: int) -> bool:
    """Lock a file that has just been made; False, and it is closed, if a sweep was faster and has removed it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:  # a file system without locks: nobody else gets one either
        return True
    try:
        if os.path.samestat(os.lstat(file), os.fstat(descriptor)):
            return True
    except FileNotFoundError:
        pass
    os.close(descriptor)
    return False


def _is_dead(file: Path) -> int | None:
    """Lock a file whose writer has gone, and return the descriptor that holds the lock; None if it may be alive."""
    if fcntl is None:
        return None
    try:
        descriptor = os.open(file, os.O_RDWR | _NO_FOLLOW)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.lstat(file), status):
                return descriptor
    except OSError:  # somebody holds the lock, or has just removed the file, or there are no locks
        pass
    os.close(descriptor)
    return None


def sweep(path: Path) -> None:
    """Remove what killed saves of a path have left beside it; first put back what one of them had moved away."""
    for left in _temporaries(path):
        kind = kind_of(left)
        if kind == "file":
            lock = _is_dead(left)
            if lock is not None:
                with contextlib.suppress(OSError):
                    left.unlink()
                os.close(lock)
        elif kind == "folder":
            _sweep_room(left, path)


def _sweep_room(folder: Path, path: Path) -> None:
    lock = _is_dead(folder / _LOCK)
    if lock is None:
        with contextlib.suppress(OSError):
            names = os.listdir(folder)
            if kind_of(folder / _LOCK) == "nothing":  # it goes last: threads of a save wrote on after it
                for name in [name for name in names if name.startswith(_NEW)]:
                    _remove(folder / name)
            os.rmdir(folder)  # killed before it had a lock in it; fails if anything is in it
        return
    try:
        if kind_of(path) == "nothing" and kind_of(folder / _OLD) != "nothing":
            os.rename(folder / _OLD, path)
        if all(name in (_LOCK, _OLD) or name.startswith(_NEW) for name in os.listdir(folder)):
            _clear(folder)
    except OSError:  # what cannot be removed harms nobody
        pass
    finally:
        os.close(lock)


# ---------------------------------------------------------------- folders


class Room:
    """A folder beside the target in which a new folder is made, and which the old one leaves by.

    Attributes:
        token: What it has in its name, and no other room.
        folder: The room itself; nobody but its owner may enter it.
        new: Where the new folder is to be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        while True:
            self.token: str = _token()
            self.folder: Path = _named(path, self.token)
            os.mkdir(self.folder, 0o700)
            try:
                self._lock = os.open(self.folder / _LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR | _BINARY, 0o600)
            except FileNotFoundError:  # a sweep has taken it for one of a killed save
                continue
            if _keep_lock(self.folder / _LOCK, self._lock):
                break
        self.new: Path = new_in(path, self.token)
        self._old = self.folder / _OLD

    def put_in_place(self, check: Callable[[Path], None]) -> None:
        """Give the new folder its name.

        Args:
            check: Called with what is there; raises if it must not be replaced.

        Raises:
            CheckpointError: If it must not.
            OSError: If it cannot be moved.
        """
        for _ in range(_ATTEMPTS):
            try:
                if self._try_to_put(check):
                    sync_folder(self.path.parent)
                    return
            except OSError as error:  # another save, or the user, has just put something there or taken it away
                if error.errno not in _CHANGED or kind_of(self.new) == "nothing":
                    raise
        raise OSError(f"{_ATTEMPTS} other saves to this path were faster")

    def _try_to_put(self, check: Callable[[Path], None]) -> bool:
        if kind_of(self.path) == "nothing":
            os.rename(self.new, self.path)  # fails if a folder with anything in it has come there
            return True
        checked = os.lstat(self.path)
        is_empty = stat.S_ISDIR(checked.st_mode) and not os.listdir(self.path)
        check(self.path)
        _copy_permissions(self.path, self.new)
        if is_empty:
            os.rename(self.new, self.path)  # fails if anything has come into it
            return True
        if exchange(self.new, self.path):
            self._check_taken(checked, check)
            return True
        self._take_old()
        try:
            self._check_taken(checked, check)
            os.rename(self.new, self.path)
        except BaseException:
            if kind_of(self.path) == "nothing":
                os.rename(self._old, self.path)
            raise
        return True

    def _take_old(self) -> None:
        """Move the old one away; until the new one is there, readers find it where it is now."""
        if kind_of(self._old) != "nothing":  # of an attempt before, after which another save was faster
            _remove(self._old)
        os.rename(self.path, self._old)

    def _check_taken(self, checked: os.stat_result, check: Callable[[Path], None]) -> None:
        """See that what has been taken away is what had been checked, or else may go as well."""
        taken = self._old if kind_of(self._old) != "nothing" else self.new
        if os.path.samestat(os.lstat(taken), checked):
            return
        try:
            check(taken)
        except BaseException:
            if taken is self.new:
                exchange(self.new, self.path)
            raise

    def close(self) -> None:
        """Remove the room with what is left in it."""
        if kind_of(self._old) != "nothing" and kind_of(self.path) == "nothing":
            with contextlib.suppress(OSError):
                os.rename(self._old, self.path)
        os.close(self._lock)  # a sweep that comes now removes the same
        _clear(self.folder)


def new_in(path: Path, token: str) -> Path:
    """Return where the new folder is made, in the room of a token."""
    return _named(path, token) / _NEW


def _clear(folder: Path) -> None:
    """Remove a room; its lock goes last, so that the rest of it is known for what it is after a kill in between."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name != _LOCK:
                _remove(folder / name)
        (folder / _LOCK).unlink(missing_ok=True)
        os.rmdir(folder)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if kind_of(path) == "folder" else path.unlink()


def standing(path: Path) -> Path:
    """Return where the checkpoint of a path stands: there, or where a save that was killed has moved it."""
    for _ in range(_ATTEMPTS):
        if os.path.lexists(path):
            return path
        moved = [room / _OLD for room in _temporaries(path) if os.path.lexists(room / _OLD)]
        if moved:
            return max(moved, key=lambda old: os.lstat(old).st_mtime)
        if not os.path.lexists(path):
            return path
    return path
