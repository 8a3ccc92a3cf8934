"""Gradients by NNX's meaning: which parameters get one, and by which convention.

``freezing`` says which parameters are trained, ``gradient`` differentiates with respect to those.
"""

from lazymods.autograd.freezing import requires_grad_ as requires_grad_
from lazymods.autograd.gradient import grad as grad
from lazymods.autograd.gradient import value_and_grad as value_and_grad
from lazymods.autograd.saved_tensors import save_as as save_as
from lazymods.autograd.saved_tensors import save_on_cpu as save_on_cpu
from lazymods.autograd.saved_tensors import saved_tensors_hooks as saved_tensors_hooks
