"""Groups of processes, by cgroups of version 1, for root."""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import time

from caatnet.benchmarks.harness import processes

_ROOT = pathlib.Path("/sys/fs/cgroup")
# Processes of a killed one remain for a while. An ordinary file system, which
# has no processes, has files to remove.
_REMOVE = """
for i in $(seq 600); do
  rmdir "$1" && exit
  rm -f "$1"/*
  sleep 0.1
done"""


@contextlib.contextmanager
def group(controller: str) -> Iterator[pathlib.Path]:
  """Creates a group of a controller, such as "memory", and removes it later.

  It is also removed if this process is killed, when its processes have ended.

  Yields:
    Its folder. A process joins by its id in ``cgroup.procs``.

  Raises:
    OSError: This process cannot create one.
  """
  folder = _ROOT / controller / f"caatnet-{os.getpid()}-{time.monotonic_ns()}"
  folder.mkdir()
  with processes.cleaned_up(_REMOVE, folder):
    yield folder
