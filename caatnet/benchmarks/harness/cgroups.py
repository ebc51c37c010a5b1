"""Groups of processes, by cgroups of version 1, for root."""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import time

from caatnet.benchmarks.harness import processes

_ROOT = pathlib.Path("/sys/fs/cgroup")
# A group without processes can be removed. An ordinary file system has files
# instead, and no processes.
_REMOVE = """
for i in $(seq 100); do
  rmdir "$1" && exit
  rm -f "$1"/* && rmdir "$1" && exit
  kill -9 $(cat "$1/cgroup.procs")
  sleep 0.1
done"""


@contextlib.contextmanager
def group(controller: str) -> Iterator[pathlib.Path]:
  """Creates a group of a controller, such as "memory", and removes it later.

  Processes that are still in it are then killed, also if this process is.

  Yields:
    Its folder. A process joins by its id in ``cgroup.procs``.

  Raises:
    OSError: This process cannot create one.
  """
  folder = _ROOT / controller / f"caatnet-{os.getpid()}-{time.monotonic_ns()}"
  folder.mkdir()
  with processes.cleaned_up(_REMOVE, folder):
    yield folder
