"""Checkpoint files: one module a format; each opens a file as a ``Checkpoint`` and says what is wrong with it."""
