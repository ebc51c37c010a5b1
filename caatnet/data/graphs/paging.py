"""Random access to memory-mapped files that are larger than memory.

On a page fault, the operating system also reads adjacent pages (readahead),
since most programs read sequentially. Rows of features and neighbours of nodes
are read in random order: in a file larger than memory, each row of 512 bytes
then costs a read of 128 KiB, which evicts pages that are still in use.
"""

from collections.abc import Iterable
import mmap
import os
import pathlib

import numpy as np

# Folder and file of a control group's memory limit (versions 1 and 2), by the
# controller field of a line of /proc/self/cgroup; see cgroups(7).
_LIMITS = {
  "memory": ("memory", "memory.limit_in_bytes"), "": (".", "memory.max"),
}


def memory_bytes(
  groups: str | os.PathLike[str] = "/proc/self/cgroup",
  root: str | os.PathLike[str] = "/sys/fs/cgroup",
) -> int:
  """Returns the memory limit of this process in bytes, page cache included.

  This is the minimum of the machine's memory and the limits of the process'
  control groups.

  Args:
    groups: The file that lists the process' control groups.
    root: The folder of all control groups.
  """
  found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
  lines = pathlib.Path(groups)
  for line in lines.read_text().splitlines() if lines.exists() else ():
    _, controllers, path = line.split(":", 2)
    if controllers not in _LIMITS:
      continue
    folder, name = _LIMITS[controllers]
    top = pathlib.Path(root) / folder
    group = top / path.strip("/")
    for above in (group, *group.parents):
      limit = above / name
      if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        found.append(int(text))
      if above == top:
        break
  return min(found)


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
