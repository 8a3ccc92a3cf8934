"""Operators: functions with a kernel for each platform, of which a compiled program has one.

``keys`` names the keys, ``table`` computes which kernel runs for which, ``operator`` registers and calls; ``arguments``
takes a call apart, ``call`` is one without its arrays, ``places`` says where it runs, ``programs`` makes it a function
of arrays with its derivative, ``primitives`` are the operations that JAX lacks for that.
"""

from lazymods.dispatch.operator import Operator as Operator
from lazymods.dispatch.refusals import NoKernelError as NoKernelError
from lazymods.dispatch.refusals import RegistrationError as RegistrationError
from lazymods.dispatch.table import Entry as Entry
from lazymods.dispatch.table import Listing as Listing
