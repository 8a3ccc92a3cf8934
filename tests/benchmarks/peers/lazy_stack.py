"""lazymods with the blocks of GPT-2 in an ``lm.Stack``, which is traced and compiled as one block."""

from types import SimpleNamespace

from flax import nnx

import lazymods as lm
from peers import Size, _networks, lazy
from peers.lazy import arrays as arrays
from peers.lazy import count as count
from peers.lazy import finish as finish
from peers.lazy import step as step

LAYERS = SimpleNamespace(**{**vars(lazy.LAYERS), "blocks": lambda make, n, rngs: lm.Stack(make, n, rngs=rngs)})


def build(name: str, size: Size) -> nnx.Module:
    return _networks.build_of(LAYERS, name, size)
