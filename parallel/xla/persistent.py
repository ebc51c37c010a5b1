"""Compiled programs that are kept between processes."""

import os
import pathlib

import jax


def keep_programs(folder: str) -> None:
  """Enables jax's persistent compilation cache, unless the environment sets it.

  Args:
    folder: Directory of the cache; "" for none.
  """
  if folder and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    path = pathlib.Path(folder).expanduser()
    jax.config.update("jax_compilation_cache_dir", str(path))
    # Many small programs take as long as a large one.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
