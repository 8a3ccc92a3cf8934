"""Gradients by NNX's meaning: which parameters get one, by which convention, and what is kept for them.

``freezing`` says which parameters are trained, ``gradient`` differentiates with respect to those. ``saved_tensors``
says how what is kept between forward and backward is kept, ``saved_bytes`` how much that is.
"""

from lazymods.autograd.freezing import requires_grad_ as requires_grad_
from lazymods.autograd.gradient import grad as grad
from lazymods.autograd.gradient import value_and_grad as value_and_grad
from lazymods.autograd.saved_bytes import saved_bytes as saved_bytes
from lazymods.autograd.saved_tensors import recompute as recompute
from lazymods.autograd.saved_tensors import save_as as save_as
from lazymods.autograd.saved_tensors import save_on_cpu as save_on_cpu
from lazymods.autograd.saved_tensors import saved_tensors_hooks as saved_tensors_hooks
