"""The names that kernels are registered under: PyTorch's, with JAX's platforms in place of its devices.

A runtime key says where a program runs, or what is known of its operands: ``CPU``, ``CUDA`` and ``TPU`` are platforms,
``FPGA`` is any platform without a key of its own, ``Lazy`` is a block of lazy tensors, ``Meta`` is shapes without
values. ``XLA`` is a platform of that name: JAX has none, but a plugin may register one. Each has an Autograd key, which
says how its kernel is differentiated. An alias key stands for many runtime keys at once.
"""

from __future__ import annotations

AUTOGRAD_OF = {
    "CPU": "AutogradCPU",
    "CUDA": "AutogradCUDA",
    "TPU": "AutogradTPU",
    "XLA": "AutogradXLA",
    "FPGA": "AutogradOther",
    "Lazy": "AutogradLazy",
    "Meta": "AutogradMeta",
}
BACKEND_OF = {autograd: backend for backend, autograd in AUTOGRAD_OF.items()}
RUNTIME = tuple(key for pair in AUTOGRAD_OF.items() for key in pair)

EXPLICIT = "CompositeExplicitAutograd"  # a kernel for every backend, which says nothing about gradients
AUTOGRAD = "Autograd"  # a pair for every Autograd key
IMPLICIT = "CompositeImplicitAutograd"  # a kernel for every backend, differentiated through
ALIASES = (EXPLICIT, AUTOGRAD, IMPLICIT)

KEYS = RUNTIME + ALIASES

PLATFORMS = {"cpu": "CPU", "cuda": "CUDA", "tpu": "TPU", "xla": "XLA"}  # JAX's names
OTHER = "FPGA"  # all other platforms


def is_pair(key: str) -> bool:
    """Whether what is registered under a key is a pair of a forward and a backward function."""
    return key == AUTOGRAD or key in BACKEND_OF
