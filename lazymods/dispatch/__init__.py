"""Operators: functions with a kernel for each platform, of which a compiled program has one.

``keys`` names the keys, ``table`` computes which kernel runs for which, ``operator`` registers and calls; ``arguments``
takes a call apart, ``call`` is one without its arrays, ``places`` says where it runs, ``programs`` makes it a function
of arrays, ``gradient`` gives it the derivative of a pair, ``primitives`` are the operations that JAX lacks for that.
``holdings`` looks at what kernels hold beside their arguments. ``attention`` and ``layers`` are operators that come
with the package, and ``using`` puts one into a model.
"""

from lazymods.dispatch.attention import attention_fn as attention_fn
from lazymods.dispatch.attention import dot_product_attention as dot_product_attention
from lazymods.dispatch.layers import layer_norm as layer_norm
from lazymods.dispatch.layers import linear_activation as linear_activation
from lazymods.dispatch.layers import rms_norm as rms_norm
from lazymods.dispatch.operator import Operator as Operator
from lazymods.dispatch.refusals import NoKernelError as NoKernelError
from lazymods.dispatch.refusals import RegistrationError as RegistrationError
from lazymods.dispatch.table import Entry as Entry
from lazymods.dispatch.table import Listing as Listing
from lazymods.dispatch.using import use as use
