"""The bytes of a pickle, as the readers of :mod:`pickletools` take them: ``read`` and ``readline`` of a file."""

from __future__ import annotations

from lazymods.state.files.stored import Array

MAX_LINE = 1000  # of a name in a pickle
_WINDOW = 1 << 16  # bytes that are taken out of the file at a time


class Reader:
    """Gives some bytes after the others; never more than there are.

    Args:
        data: All of them.
        position: Where to begin.
    """

    def __init__(self, data: Array, position: int) -> None:
        self.data = data
        self._begin, self._window, self._at = position, b"", 0  # a part of the data, and how far it has been read

    @property
    def position(self) -> int:
        """Where the next byte is."""
        return self._begin + self._at

    def read(self, count: int) -> bytes:
        """Return the next bytes."""
        end = self._at + count
        if end > len(self._window):
            self._begin, self._at, end = self.position, 0, count
            self._window = self.data[self._begin : self._begin + max(count, _WINDOW)].tobytes()
        out = self._window[self._at : end]
        self._at += len(out)
        return out

    def readline(self) -> bytes:
        """Return the next bytes up to the end of a line, and with it, if it is not longer than a name may be."""
        begin = self.position
        line, found, _ = self.read(MAX_LINE).partition(b"\n")
        self._at -= self.position - begin - len(line) - len(found)
        return line + found
