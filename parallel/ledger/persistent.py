"""Compiled programs that are kept between processes.

The keys of jax's cache depend on program, versions, options and the instruction
set of the CPU, so machines can share a folder. A killed process may leave an
unreadable entry: jax then warns, and compiles that program in each process.
"""

import contextlib
import os
import pathlib

import jax

# A training step takes 0.1 to 1 MB. jax's own size limit fails forever after a
# process was killed between the two files that it writes per program.
_MAX_BYTES = 1e9


def enable_compile_cache(folder: str) -> None:
  """Enables jax's persistent compilation cache, unless the environment sets it.

  With ``--xla_dump_to`` or another such flag in XLA_FLAGS, no cache is enabled:
  XLA dumps what it compiles, and jax's keys leave these flags out.

  Args:
    folder: Directory of the cache; "" for none.
  """
  if "xla_dump" in os.environ.get("XLA_FLAGS", ""):
    return
  if folder and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    path = pathlib.Path(folder).expanduser()
    _prune(path, _MAX_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(path))
    # Also keeps programs that compile fast: many of them take long together.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _prune(folder: pathlib.Path, max_bytes: float) -> None:
  """Removes the least recently read programs, down to `max_bytes`."""
  found = []
  for file in folder.glob("*-cache"):
    with contextlib.suppress(OSError):  # another process removed it
      stat = file.stat()
      # Some file systems do not record the time of the last access.
      found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, file))
  total = 0
  for _, size, file in sorted(found, reverse=True):
    total += size
    if total > max_bytes:
      with contextlib.suppress(OSError):  # another user's, or a folder
        file.unlink()
