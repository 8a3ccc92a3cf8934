"""Equal blocks one after the other, as one: see :class:`Stack`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, SupportsIndex

from flax import nnx

from lazymods import _compat, _graph
from lazymods._errors import Problem
from lazymods._frames import entry
from lazymods._graph import LOCAL, TOGETHER
from lazymods._layer import blocks as _blocks
from lazymods._layer import contexts, first_call, lifecycle, ties
from lazymods._refusals import ArgumentError
from lazymods._snapshot import Snapshot
from lazymods.nn._scan import BlockCall, Remat


class Stack(nnx.Module):
    """Equal blocks, each called on the output of the one before, that are traced and compiled as one.

    Behaves as ``nnx.List([make_block(rngs) for _ in range(n)])`` whose blocks are called in turn: the same initial
    values, random keys, statistics and gradients, and the names of that list in state dicts and checkpoints
    (``blocks.3.fc.kernel``), so that a checkpoint of either loads into the other. But the parameters of all blocks
    lie in one array each, with an axis of the layers in front, and a program calls the block in a ``jax.lax.scan``: it
    is traced and compiled once, however many there are. Lazy layers in a block are sized once.

    ``stack.blocks_as_one`` is the block that holds the values of all layers, ``blocks.blocks_as_one.fc.kernel`` in
    ``nnx.state``. Rules for shardings see ``blocks.fc.kernel`` with the axis of the layers in front, so that this can
    be sharded too. A gradient has that shape as well: what an optimizer does to an array as a whole (LAMB, Adafactor,
    Muon) it does to all layers at once.

    Inferred: what the lazy layers in a block infer, from the input of the first one.

    Args:
        make_block: Called with ``rngs`` for each block, in order; returns a module, whose call takes what the block
            before returns: arrays of one structure, shape and dtype. The blocks may differ in the values of their
            Variables alone.
        n: How many blocks, at least one.
        remat: Whether the backward pass computes each block again, so that what it needs is kept for one at a time; or
            a policy of ``jax.checkpoint_policies`` that says what of a block is kept.
        rngs: Random streams, for ``make_block``.

    Raises:
        ArgumentError: If ``n`` is no positive number, or a block no module.
        LazyError: If the blocks differ in more than values.

    Example:
        >>> import jax.numpy as jnp, lazymods as lm
        >>> from flax import nnx
        >>> stack = lm.Stack(lambda rngs: lm.LazyLinear(8, rngs=rngs), 3, rngs=nnx.Rngs(0))
        >>> stack(jnp.ones((2, 8))).shape, stack.blocks_as_one.kernel.shape
        ((2, 8), (3, 8, 8))
        >>> list(lm.state_dict(stack))
        ['0.kernel', '0.bias', '1.kernel', '1.bias', '2.kernel', '2.bias']
    """

    @entry
    def __init__(
        self, make_block: Callable[[Any], Any], n: SupportsIndex, *, remat: Remat = False, rngs: Any
    ) -> None:
        try:
            self.n: int = operator.index(n)
        except TypeError:
            self.n = 0
        if self.n < 1:
            write = "lm.Stack(make_block, 12, rngs=rngs)"
            raise ArgumentError(Problem("n=", repr(n), "a number of blocks, at least one", write))
        if isinstance(make_block, nnx.Module):
            raise _no_maker(f"a {type(make_block).__name__}")
        self.remat: Remat = remat if callable(remat) else bool(remat)
        before = ties.Before()
        made = [make_block(rngs) for _ in range(self.n)]
        wrong = [b for b in made if not (isinstance(b, nnx.Module) and callable(b))]
        if wrong:
            raise _no_maker(f"a function that returns a {type(wrong[0]).__name__}")
        kept = [rngs] if isinstance(rngs, nnx.Pytree) else []
        whole, shared = _blocks.join(made, kept, outside=before.held_by(made))
        self.shared: tuple[tuple[Any, ...], ...] = shared
        self.blocks_as_one: Any = whole

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Call all blocks in turn.

        Args:
            x: What the first block takes: an array, or a pytree of arrays.
            *args: What each block gets besides, the same for all of them.
            **kwargs: Keyword arguments, likewise.

        Returns:
            What the last block returns.

        Raises:
            ShapeInferenceError: If a block returns something of another structure, shape or dtype than it takes, or a
                lazy layer cannot be sized.
            UninitializedError: If the stack is lazy, and a transform would lose its parameters.
            LazyError: If a call changes what can't be carried from one block to the next.
        """
        try:
            if LOCAL.session is not None or not _graph.lazy_nodes(self.blocks_as_one):
                return self._run(x, args, kwargs)
            with lifecycle.LOCK:
                before = Snapshot(self)
                try:
                    self._size(x, args, kwargs)
                    return self._run(x, args, kwargs)
                except BaseException:
                    before.restore()
                    raise
        except Exception as error:
            _compat.hide_frames(error)
            raise

    def _run(self, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shared = [_graph.at(self.blocks_as_one, path) for path in self.shared]
        return BlockCall(self.blocks_as_one, self.n, shared, args, kwargs, self.remat).run(x)

    def _size(self, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Initialize the lazy layers that a call reaches."""
        from lazymods._model import inference  # on first use, as all that works on whole models

        given = first_call.as_specs(((x, *args), kwargs))
        with _compat.at_trace(_compat.home_trace(self.blocks_as_one)):
            inference.initialize_called(self, *given)

    # ------------------------------------------------------------ the blocks

    def __len__(self) -> int:
        """Return the number of blocks."""
        return self.n

    def __iter__(self) -> Iterator[Any]:
        """Go through the blocks; each is a copy, as ``stack[i]``."""
        return iter(self._blocks())

    def __getitem__(self, i: Any) -> Any:
        """Return a block, or a list of them for a slice: copies, whose changes the stack does not see.

        What all blocks share, such as rngs that each keeps, is shared with the copy as well. :meth:`each` changes
        the blocks of the stack, and ``stack[i] = block`` one of them.

        Raises:
            IndexError: If there is no such block.
        """
        return self._blocks()[i]

    def __setitem__(self, i: Any, block: Any) -> None:
        """Let a block have the values of another of its structure.

        Raises:
            IndexError: If there is no such block.
            LazyError: If it differs from the others in more than values.
        """
        blocks = self._blocks()
        blocks[operator.index(i)] = block
        self._take(blocks)

    def each(self, function: Callable[[Any], Any]) -> None:
        """Call a function with each block, in order, and keep what it changes in it.

        Args:
            function: Gets a block; what it returns is not used.

        Raises:
            LazyError: If the blocks differ in more than values afterwards.

        Example:
            >>> import lazymods as lm
            >>> from flax import nnx
            >>> stack = lm.Stack(lambda rngs: nnx.Linear(8, 8, rngs=rngs), 3, rngs=nnx.Rngs(0))
            >>> stack.each(lambda block: block.set_attributes(use_bias=False))
        """
        before = ties.Before()
        blocks = self._blocks()
        for block in blocks:
            function(block)
        self._take(blocks, before.held_by(blocks))

    def _blocks(self) -> list[Any]:
        return _blocks.parts_of(self.blocks_as_one, self.n, self.shared)

    def _take(self, blocks: list[Any], outside: dict[int, str] | None = None) -> None:
        with _compat.at_trace(_compat.home_trace(self)):
            kept = [_graph.at(self.blocks_as_one, path) for path in self.shared]
            whole, shared = _blocks.join(blocks, kept, _blocks.places_of(self.blocks_as_one), outside=outside)
        _blocks.become(self.blocks_as_one, whole, contexts.load_is_carried, shared)
        self.shared = shared


def _no_maker(got: str) -> ArgumentError:
    needed = "a function of rngs that returns a block, a module that can be called"
    return ArgumentError(Problem("make_block=", got, needed, "make_block=lambda rngs: Block(rngs=rngs)"))


assert TOGETHER == "blocks_as_one"  # the attribute that names of entries leave out
