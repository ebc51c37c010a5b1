"""Limits of processor time, by control groups, for root.

A file system may accept a limit that has no effect, for instance where
``/sys/fs/cgroup`` is not a control group. So limits are measured before they
are used, by busy loops that run in all groups at once.
"""

from collections.abc import Iterator, Sequence
import contextlib
import os
import pathlib
import sys
import time
from typing import NamedTuple

from parallel.peers.emulation import processes

_ROOT = pathlib.Path("/sys/fs/cgroup")  # of version 1
# A group without processes can be removed. An ordinary file system has files
# instead, and no processes.
_REMOVE = """
for i in $(seq 100); do
  rmdir "$1" && exit
  rm -f "$1"/* && rmdir "$1" && exit
  kill -9 $(cat "$1/cgroup.procs")
  sleep 0.1
done"""
# A short period spreads the limit evenly; the kernel's least quota is 1 ms.
_PERIOD_US, _LONG_PERIOD_US, _MIN_US = 20_000, 100_000, 1000
_LOOP_S = 0.5
_TOLERANCE = 1.25  # allowed ratio of measured to set time, as periods are cut
_LOOP = f"""
import time
start, used = time.monotonic(), time.process_time()
while time.monotonic() < start + {_LOOP_S}:
  pass
print((time.process_time() - used) / (time.monotonic() - start))
"""


class Quota(NamedTuple):
  """Group of processes with a limit of processor time.

  Attributes:
    prefix: Prefix of a command that runs in the group.
    measured: Processors that a loop in the group has used, while loops ran in
      all groups.
  """

  prefix: list[str]
  measured: float


@contextlib.contextmanager
def limited(quota: float, num: int) -> Iterator[list[Quota]]:
  """Creates groups with a limit each, and measures the limits.

  Args:
    quota: Processors of each group, in (0, 1].
    num: Number of groups.

  Raises:
    ValueError: The limit cannot be set, or has no effect.
  """
  period_us, quota_us = _in_us(quota)
  with contextlib.ExitStack() as stack:
    try:
      folders = [stack.enter_context(_group()) for _ in range(num)]
      for folder in folders:
        (folder / "cpu.cfs_period_us").write_text(str(period_us))
        (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
    except OSError as error:
      raise ValueError(
        f"cpu_quota={quota:g} cannot be set here: {error}; this needs root, "
        "control groups of version 1 and at least 0.01"
      ) from error
    prefixes = [
      # The shell joins the group and becomes the command.
      ["sh", "-c", 'echo $$ > "$0" && exec "$@"', f"{folder}/cgroup.procs"]
      for folder in folders
    ]
    measured = _measure(prefixes)
    if None in measured:
      raise ValueError(
        f"cpu_quota={quota:g} cannot be set here: no process can join a "
        "control group"
      )
    if max(measured) > _TOLERANCE * quota:
      raise ValueError(
        f"cpu_quota={quota:g} has no effect here: a loop has used "
        f"{max(measured):.2f} processors"
      )
    yield list(map(Quota, prefixes, measured))


@contextlib.contextmanager
def _group() -> Iterator[pathlib.Path]:
  """Creates a control group; deletes it and its processes, even if killed.

  Yields:
    Its folder. A process joins by its id in ``cgroup.procs``.
  """
  folder = _ROOT / "cpu" / f"caatnet-{os.getpid()}-{time.monotonic_ns()}"
  folder.mkdir()
  with processes.cleaned_up(_REMOVE, folder):
    yield folder


def _in_us(quota: float) -> tuple[int, int]:
  """Returns (period, processor time per period) of a quota, in microseconds."""
  period = _PERIOD_US if quota * _PERIOD_US >= _MIN_US else _LONG_PERIOD_US
  return period, int(quota * period)


def _measure(prefixes: Sequence[Sequence[str]]) -> list[float | None]:
  """Returns the processors used by a busy loop started with each prefix.

  None where the loop has not run.
  """
  with contextlib.ExitStack() as stack:
    loops = [
      stack.enter_context(processes.Process(
        [*prefix, sys.executable, "-S", "-c", _LOOP]
      )) for prefix in prefixes
    ]
    return [loop.answer() for loop in loops]
