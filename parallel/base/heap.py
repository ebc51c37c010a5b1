"""Memory that the C library keeps when arrays are freed.

XLA:CPU allocates the temporaries of a program anew for each run. glibc maps
blocks of that size and unmaps them afterwards, so that the system zeroes and
maps gigabytes of pages in every step. A heap that keeps its pages does so once.
"""

import ctypes
import os

# Parameters of glibc's mallopt and their values (malloc.h). Blocks of all sizes
# are in the heap, and its end is never returned. There is one heap: others
# cannot hold blocks above 64 MB, and jax's threads would use them.
_OPTIONS = {"M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1),
            "M_ARENA_MAX": (-8, 1)}


def keep_freed() -> bool:
  """Makes the C library keep the memory of freed arrays for later ones.

  It must be called before other threads allocate memory, and so before jax is
  imported. It is meant for training, whose steps need the same memory again and
  again: the process returns no memory, and threads that allocate small blocks
  wait for one another. Options of the environment have precedence.

  Returns:
    Whether it does: the C library is glibc, and the environment has no options
    of its allocator.
  """
  library = ctypes.CDLL(None)
  if not hasattr(library, "gnu_get_libc_version") or any(
    name.startswith("MALLOC_") for name in os.environ
  ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
    return False
  return all(library.mallopt(*option) for option in _OPTIONS.values())
