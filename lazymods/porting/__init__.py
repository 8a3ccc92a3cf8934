"""Where a port is wrong: a model and the PyTorch module that it was ported from, layer beside layer.

:func:`lazymods.parity` pairs their modules (``pairing``), runs both and keeps what goes in and out (``watching``),
compares that in the layout of either (``comparing``), and says of the first layer that differs what is the likely
reason: in the layer (``reasons``) or in what is computed before it (``between``).
"""
