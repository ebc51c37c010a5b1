"""Options of the C library's allocator that keep the memory of freed arrays.

XLA:CPU allocates the temporaries of a program anew for each run. By default
glibc maps such large blocks and unmaps them afterwards, so that the system maps
and zeroes gigabytes of pages in every step instead of once.
"""

import ctypes
import os

# Parameters of glibc's mallopt and their values (malloc.h): the heap holds
# blocks of all sizes, its end is never returned to the system, and all threads
# use this heap, since further heaps cannot hold blocks above 64 MB.
_OPTIONS = {"M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1),
            "M_ARENA_MAX": (-8, 1)}


def keep_freed_memory() -> bool:
  """Makes the C library keep the memory of freed arrays for later ones.

  It must be called before other threads allocate memory, and so before jax is
  imported. It is meant for training, whose steps need the same memory again and
  again: the process returns no memory, and threads that allocate small blocks
  wait for one another. Environment variables of the allocator take precedence.

  Returns:
    Whether the options were set: False if the C library is not glibc, or if the
    environment already has variables for its allocator.
  """
  library = ctypes.CDLL(None)
  if not hasattr(library, "gnu_get_libc_version") or any(
    name.startswith("MALLOC_") for name in os.environ
  ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
    return False
  return all(library.mallopt(*option) for option in _OPTIONS.values())
