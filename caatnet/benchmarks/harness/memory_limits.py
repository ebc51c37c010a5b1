"""Memory limits of processes, by control groups, for root."""

from collections.abc import Callable, Iterator
import contextlib
from typing import NamedTuple

from caatnet.benchmarks.harness import cgroups


class Group(NamedTuple):
  """Group of processes with a common limit.

  Attributes:
    limit_bytes: The limit, page cache included; 0 for none.
    add: Puts a process into the group, before it allocates much.
    peak_bytes: Returns the largest memory of the group so far; 0 if unknown.
  """

  limit_bytes: int
  add: Callable[[int], None]
  peak_bytes: Callable[[], int]


@contextlib.contextmanager
def limited(size_bytes: int) -> Iterator[Group]:
  """Creates a group with a memory limit.

  Args:
    size_bytes: The limit; 0 for none.

  Yields:
    The group. Its limit is 0 if this process cannot set one.
  """
  with contextlib.ExitStack() as stack:
    try:
      if not size_bytes:
        raise OSError("no limit")
      folder = stack.enter_context(cgroups.group("memory"))
      (folder / "memory.limit_in_bytes").write_text(str(size_bytes))
    except OSError:
      yield Group(0, lambda pid: None, lambda: 0)
      return

    def read(name: str) -> int:
      return int((folder / name).read_text())

    yield Group(
      read("memory.limit_in_bytes"),
      lambda pid: (folder / "cgroup.procs").write_text(str(pid)) and None,
      lambda: read("memory.max_usage_in_bytes"),
    )
