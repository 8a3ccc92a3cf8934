"""Compiled programs on disk: the one switch for JAX's persistent compilation cache."""

from __future__ import annotations

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


def set_compilation_cache(directory: str | os.PathLike[str] | None, *, min_compile_time: float = 0.0) -> str | None:
    """Keep compiled programs in a folder, so that the next process need not compile them again.

    It is JAX's own cache, for everything that JAX compiles in this process from now on. Python code is still traced.

    Args:
        directory: The folder, made if it is not there; None turns the cache off.
        min_compile_time: Programs that compile faster, in seconds, are not kept. By default all are.

    Returns:
        The folder until now, or None.

    Example:
        >>> import lazymods as lm
        >>> previous = lm.set_compilation_cache(None)
    """
    previous: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    path = None if directory is None else str(Path(directory).expanduser().resolve())
    if path is not None:
        Path(path).mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", min_compile_time)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_dir", path)
    compilation_cache.reset_cache()  # JAX looks at the folder's name once, at its first compilation
    return previous
