"""Lazy tensors: eager code, recorded and compiled by the step.

Inside of :func:`lazy` every operation of jax, flax and optax is noted instead of run, forward and backward. Where
Python needs a value, or at :func:`mark_step`, what was noted is compiled, once for every structure, and started;
recording goes on. ``trace`` records, ``block`` is where it does, ``graph`` is what is recorded, ``kinds`` are its
operations, ``executor`` compiles and runs it, ``checking`` compares it with plain Python, ``metrics`` counts, ``dump``
shows.
"""

from lazymods.lazytensor import checking as checking
from lazymods.lazytensor import metrics as metrics
from lazymods.lazytensor import operators as _operators
from lazymods.lazytensor.block import lazy as lazy
from lazymods.lazytensor.dump import GraphHash as GraphHash
from lazymods.lazytensor.dump import dump as dump
from lazymods.lazytensor.dump import graph_hash as graph_hash
from lazymods.lazytensor.executor import CacheInfo as CacheInfo
from lazymods.lazytensor.executor import cache_info as cache_info
from lazymods.lazytensor.executor import wait_device_ops as wait_device_ops
from lazymods.lazytensor.gradient import value_and_grad as value_and_grad
from lazymods.lazytensor.trace import LazyTensor as LazyTensor
from lazymods.lazytensor.trace import mark_step as mark_step
from lazymods.lazytensor.trace import sync as sync

_operators.install()
