"""Memory of this machine that a process can use."""

import os
import pathlib

# Controller field of a line of /proc/self/cgroup -> folder and file of the
# memory limit, for control groups of versions 1 and 2; see cgroups(7).
_LIMITS = {
  "memory": ("memory", "memory.limit_in_bytes"), "": (".", "memory.max"),
}


def limit_bytes(
  groups: str | os.PathLike[str] = "/proc/self/cgroup",
  root: str | os.PathLike[str] = "/sys/fs/cgroup",
) -> int:
  """Returns the memory limit of this process in bytes, page cache included.

  This is the minimum of the machine's memory and the limits of the process's
  control groups.

  Args:
    groups: The file that lists the process's control groups.
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


def available_bytes(
  meminfo: str | os.PathLike[str] = "/proc/meminfo",
) -> int:
  """Returns the memory that a process can allocate at the moment, in bytes.

  The page cache counts as available, since the kernel reclaims it. The result
  is at most `limit_bytes`, from which the memory that the control group already
  uses is not subtracted. If ``meminfo`` has no MemAvailable, the result is
  `limit_bytes`.

  Args:
    meminfo: File in which Linux reports its memory; see proc_meminfo(5).
  """
  path = pathlib.Path(meminfo)
  for line in path.read_text().splitlines() if path.exists() else ():
    name, _, size = line.partition(":")
    if name == "MemAvailable":
      return min(1024 * int(size.split()[0]), limit_bytes())
  return limit_bytes()
