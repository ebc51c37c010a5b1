"""Groups of processes, by cgroups of version 1, for root."""

from collections.abc import Iterator
import contextlib
import errno
import os
import pathlib
import shutil
import time

_ROOT = pathlib.Path("/sys/fs/cgroup")
# Seconds for the kernel to remove processes that were killed.
_PATIENCE_S = 5.0


@contextlib.contextmanager
def group(controller: str) -> Iterator[pathlib.Path]:
  """Creates a group of a controller, such as "memory", and removes it later.

  Yields:
    Its folder. A process joins by its id in ``cgroup.procs``.

  Raises:
    OSError: This process cannot create one.
  """
  for old in (_ROOT / controller).glob("caatnet-*-*"):
    # Those of processes that were killed.
    if not pathlib.Path(f"/proc/{old.name.split('-')[1]}").exists():
      with contextlib.suppress(OSError):
        old.rmdir()
  folder = _ROOT / controller / f"caatnet-{os.getpid()}-{time.monotonic_ns()}"
  folder.mkdir()
  try:
    yield folder
  finally:
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
      try:
        folder.rmdir()
        break
      except OSError as error:
        if error.errno == errno.ENOTEMPTY:  # an ordinary file system
          shutil.rmtree(folder)
          break
      time.sleep(0.05)  # a process is still being removed
