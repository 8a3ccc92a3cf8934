"""Gradients by NNX's meaning: which parameters get one, where there are any, and by which convention.

``freezing`` says which parameters are trained, ``gradient`` differentiates with respect to those and runs
``variable_hooks`` on what it found; ``module_hooks`` has those that run in the backward pass of a module, whoever asks
for it; ``modes`` switches gradients off for a block, ``masks`` keeps them finite where a function is not.
``saved_tensors`` says how what is kept between forward and backward is kept, ``saved_bytes`` how much that is.
"""

from lazymods.autograd.freezing import requires_grad_ as requires_grad_
from lazymods.autograd.gradient import grad as grad
from lazymods.autograd.gradient import value_and_grad as value_and_grad
from lazymods.autograd.masks import safe_where as safe_where
from lazymods.autograd.modes import enable_grad as enable_grad
from lazymods.autograd.modes import inference_mode as inference_mode
from lazymods.autograd.modes import no_grad as no_grad
from lazymods.autograd.module_hooks import register_full_backward_hook as register_full_backward_hook
from lazymods.autograd.module_hooks import register_full_backward_pre_hook as register_full_backward_pre_hook
from lazymods.autograd.saved_bytes import saved_bytes as saved_bytes
from lazymods.autograd.saved_tensors import recompute as recompute
from lazymods.autograd.saved_tensors import save_as as save_as
from lazymods.autograd.saved_tensors import save_on_cpu as save_on_cpu
from lazymods.autograd.saved_tensors import saved_tensors_hooks as saved_tensors_hooks
from lazymods.autograd.variable_hooks import register_hook as register_hook
from lazymods.autograd.variable_hooks import (
    register_post_accumulate_grad_hook as register_post_accumulate_grad_hook,
)
