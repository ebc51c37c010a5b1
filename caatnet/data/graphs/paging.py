"""Random access to memory-mapped files that are larger than memory.

On a page fault, the operating system also reads adjacent pages (readahead),
since most programs read sequentially. Rows of features and neighbours of nodes
are read in random order: in a file larger than memory, each row of 512 bytes
then costs a read of 128 KiB, which evicts pages that are still in use.
"""

from collections.abc import Iterable
import mmap

import numpy as np


def expect_no_order(arrays: Iterable[np.ndarray], room: int) -> bool:
  """Disables readahead (MADV_RANDOM) of mapped arrays larger than memory.

  Arrays that fit into memory are read only once, which is faster with
  readahead.

  Args:
    arrays: Arrays of `numpy.memmap`; other arrays are ignored.
    room: Memory for the arrays in bytes.

  Returns:
    Whether readahead was disabled.
  """
  arrays = list(arrays)
  if sum(x.nbytes for x in arrays) <= room or not hasattr(mmap, "MADV_RANDOM"):
    return False
  for array in arrays:
    mapped = getattr(array, "_mmap", None)
    if mapped is not None:
      mapped.madvise(mmap.MADV_RANDOM)
  return True
