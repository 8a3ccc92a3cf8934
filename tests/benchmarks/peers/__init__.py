"""ResNet-50 and GPT-2, with a training step, in each library that ``first_step.py`` compares.

There is a file for each library. Its ``build(name, size)`` calls the constructor. ``finish(built, inputs)`` makes what
is missing until the first step: parameters and the optimizer's state. ``step(trainer, inputs, labels)`` trains once and
returns the loss. ``arrays(trainer)`` is all that a step writes. ``count(trainer)`` is the number of trained parameters,
which must be the same everywhere. No file imports another library than its own, so that the import can be timed.
"""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Size:
    """How large the models are; the defaults are those that were published."""

    stages: tuple[int, ...] = (3, 4, 6, 3)  # of ResNet: blocks of bottlenecks
    filters: int = 64
    classes: int = 1000
    image: int = 224
    images: int = 8  # a batch
    blocks: int = 12  # of GPT-2
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    positions: int = 1024
    tokens: int = 128
    texts: int = 4  # a batch


QUICK = Size((1, 1), 8, 10, 32, 2, 2, 64, 4, 500, 64, 16, 2)
RATE = 1e-3  # of Adam


@dataclass
class Trainer:
    """What is trained, with its optimizer."""

    model: object
    optimizer: object
    extra: object = field(default=None)


def batch(name: str, size: Size) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels, the same for all libraries."""
    random = np.random.default_rng(0)
    if name == "resnet50":
        inputs = random.standard_normal((size.images, size.image, size.image, 3), np.float32)
        return inputs, random.integers(0, size.classes, size.images).astype(np.int32)
    tokens = random.integers(0, size.vocabulary, (size.texts, size.tokens + 1)).astype(np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def stages(size: Size) -> list[tuple[int, int, int, bool]]:
    """Of each bottleneck of ResNet: channels before, filters, stride, whether the shortcut is projected."""
    found, before = [], size.filters
    for stage, count in enumerate(size.stages):
        filters = size.filters * 2**stage
        for block in range(count):
            found.append((before, filters, 2 if block == 0 and stage else 1, block == 0))
            before = 4 * filters
    return found
