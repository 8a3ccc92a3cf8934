"""``open``: a checkpoint as a mapping from names to arrays, of which nothing is read before it is asked for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax

from lazymods._errors import Problem, describe
from lazymods._frames import entry
from lazymods._refusals import ArgumentError
from lazymods.state.files.opening import held, read_checkpoint
from lazymods.state.files.paths import check_path
from lazymods.state.files.stored import Array, Checkpoint, StoredTensor, printable, refuse

T = TypeVar("T")

_SHOWN = 12  # entries of a representation


class OpenCheckpoint(Mapping[str, Array]):
    """A checkpoint as a read-only mapping from the names of its tensors to numpy arrays.

    An array is read when it is asked for: a view of the mapped file where the format allows that. It may not be written
    to, and lives on when the checkpoint is closed. :func:`lazymods.load` takes the mapping as it takes the path.

    Attributes:
        checkpoint: What is known of the file without reading a value.
        metadata: Texts that the file carries, by name.
    """

    def __init__(self, path: str | os.PathLike[str], variant: str | None = None) -> None:
        check_path(path)
        self._stack = contextlib.ExitStack()
        self._is_same: Callable[[], bool] = lambda: True
        self._is_closed = False

        def hold(checkpoint: Checkpoint) -> Checkpoint:
            self._stack.close()  # of another one, which a save has replaced
            self._is_same = self._stack.enter_context(held(path))
            return checkpoint

        try:
            self.checkpoint: Checkpoint = read_checkpoint(path, hold, variant=variant)
        except BaseException:
            self._stack.close()
            raise
        tensors = self.checkpoint.tensors
        self._tensors: dict[str, StoredTensor] = {n: t for n, t in tensors.items() if isinstance(t, StoredTensor)}
        aliases = self.checkpoint.aliases
        self._tensors |= {alias: self._tensors[kept] for alias, kept in aliases.items() if kept in self._tensors}
        self.metadata: Mapping[str, str] = dict(self.checkpoint.metadata)

    def __getitem__(self, name: str) -> Array:
        """Read one tensor.

        Raises:
            KeyError: If there is no such tensor.
            ArgumentError: If the checkpoint is closed.
            CheckpointError: If its bytes are damaged, it unpacks to far more than the file holds, or it is a
                folder that another save has replaced.
        """
        tensor = self._tensors[name]
        self.checkpoint.check_unpacked([tensor])
        array = self.read(lambda _: tensor.read(), name)
        if array.flags.writeable:
            array = array.view()
            array.flags.writeable = False
        return array

    def __iter__(self) -> Iterator[str]:
        """Give the names in the file's order."""
        return iter(self._tensors)

    def __len__(self) -> int:
        """Return how many names there are."""
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        """Say whether there is a tensor of a name, without reading it."""
        return name in self._tensors

    def read(self, function: Callable[[Checkpoint], T], name: str = "") -> T:
        """Return what a function makes of the file.

        Args:
            function: The function.
            name: The tensor that it reads, for messages.

        Raises:
            ArgumentError: If the checkpoint is closed.
            CheckpointError: If it is a folder that another save has replaced.
            Exception: What the function raises.
        """
        if self._is_closed:
            what = repr(name) if name else "it"
            needed = f"an open checkpoint: {what} can't be read any more"
            where = printable(str(self.checkpoint.path))
            raise ArgumentError(Problem(where, "a checkpoint that is closed", needed, f"lm.open({where!r})"))
        try:
            return function(self.checkpoint)
        finally:
            if not self._is_same():
                got, needed = "another checkpoint, which a save has put in its place", "the one that was opened"
                raise refuse(self.checkpoint.path, got, needed, tensor=name, write="lm.open(path), again")

    def spec(self, name: str) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of a tensor, without reading it.

        Raises:
            KeyError: If there is no such tensor.
        """
        tensor = self._tensors[name]
        return jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)

    def close(self) -> None:
        """Let go of the file; arrays that were read stay."""
        self._is_closed = True
        self._stack.close()

    def __enter__(self) -> OpenCheckpoint:
        """Return itself."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        """Show the first names with their shapes and dtypes."""
        lines = [f"  {printable(name)}: {describe(t)}" for name, t in list(self._tensors.items())[:_SHOWN]]
        more = [f"  and {len(self) - _SHOWN} more"] if len(self) > _SHOWN else []
        state = ", closed" if self._is_closed else ""
        shown = repr(printable(str(self.checkpoint.path)))
        head = f"OpenCheckpoint({shown}, {self.checkpoint.format}, {len(self)} tensors{state})"
        return "\n".join([head, *lines, *more])


@entry
def open(path: str | os.PathLike[str], *, variant: str | None = None) -> OpenCheckpoint:
    """Open a checkpoint as a mapping from names to arrays, of which nothing is read before it is asked for.

    What is computed from it is loaded as a file is: ``lm.load(model, {name: ... for name in checkpoint})``.

    Args:
        path: A file or folder, as for :func:`lazymods.load`.
        variant: The variant of a folder's files, as for :func:`lazymods.load`.

    Returns:
        A read-only mapping; it is a context manager, too, and has ``.metadata`` and ``.spec(name)``.

    Raises:
        CheckpointError: If the file is not what it claims to be.
        ArgumentError: If it is no path.
        MissingFileError: If there is no such file.

    Example:
        >>> import tempfile, lazymods as lm
        >>> from flax import nnx
        >>> path = tempfile.mkdtemp() + "/layer.safetensors"
        >>> lm.save(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), path)
        >>> with lm.open(path) as checkpoint:
        ...     print(list(checkpoint), checkpoint["kernel"].shape)
        ['kernel', 'bias'] (3, 4)
    """
    return OpenCheckpoint(path, variant)
