"""Reads of mapped files that memory does not hold.

When a program touches a page of a mapped file, the system reads its neighbours,
too, since most programs go on to these. Rows of features and neighbours of
nodes are read in no order: of a file larger than memory each row of 512 bytes
then costs 128 KiB, whose pages push out others that are of use.
"""

from collections.abc import Iterable
import mmap
import os
import pathlib

import numpy as np

# Where limits of control groups are, versions 1 and 2, by the field of a line
# of /proc/self/cgroup (cgroups(7)).
_LIMITS = {
  "memory": ("memory", "memory.limit_in_bytes"), "": (".", "memory.max"),
}


def memory_bytes(
  groups: str | os.PathLike[str] = "/proc/self/cgroup",
  root: str | os.PathLike[str] = "/sys/fs/cgroup",
) -> int:
  """Returns the memory that this process can have, with pages of its files.

  That is the machine's, or the least that a control group above it allows.

  Args:
    groups: The file that names the process' control groups.
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
  """Tells the system that mapped arrays are read in no order, if that helps.

  What fits into memory is read once, faster with its neighbours.

  Args:
    arrays: Arrays of `numpy.memmap`; others are left as they are.
    room: Bytes of memory for them.

  Returns:
    Whether they are larger than the room, so that it was told.
  """
  arrays = list(arrays)
  if sum(x.nbytes for x in arrays) <= room or not hasattr(mmap, "MADV_RANDOM"):
    return False
  for array in arrays:
    mapped = getattr(array, "_mmap", None)
    if mapped is not None:
      mapped.madvise(mmap.MADV_RANDOM)
  return True
