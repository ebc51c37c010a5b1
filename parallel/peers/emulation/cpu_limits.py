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

_ROOT = pathlib.Path("/sys/fs/cgroup")  # control groups of version 1
# Removes a group after killing its processes. If the folder is on an ordinary
# file system, its files are removed, which a control group does not allow.
_REMOVE = """
for i in $(seq 100); do
  rmdir "$1" && exit
  rm -f "$1"/* && rmdir "$1" && exit
  kill -9 $(cat "$1/cgroup.procs")
  sleep 0.1
done"""
# A short period spreads the limit evenly; the kernel's least quota is _MIN_US.
_PERIOD_US, _LONG_PERIOD_US, _MIN_US = 20_000, 100_000, 1000
_LOOP_S = 0.5
_TOLERANCE = 1.25  # allowed measured / set time; a loop ends within a period
_LOOP = f"""
import time
start, used = time.monotonic(), time.process_time()
while time.monotonic() < start + {_LOOP_S}:
  pass
print((time.process_time() - used) / (time.monotonic() - start))
"""


class LimitedGroup(NamedTuple):
  """Group of processes with a limit of processor time.

  Attributes:
    prefix: Prefix of a command that runs in the group.
    measured: Processors that a busy loop in the group has used, while such
      loops ran in all groups.
  """

  prefix: list[str]
  measured: float


@contextlib.contextmanager
def limited_groups(quota: float, num: int) -> Iterator[list[LimitedGroup]]:
  """Context manager that creates groups with equal, measured limits.

  Args:
    quota: Processors of each group, in (0, 1].
    num: Number of groups.

  Raises:
    ValueError: The limit cannot be set, or has no effect.
  """
  period_us, quota_us = _in_us(quota)
  with contextlib.ExitStack() as stack:
    try:
      folders = [stack.enter_context(_control_group()) for _ in range(num)]
      for folder in folders:
        (folder / "cpu.cfs_period_us").write_text(str(period_us))
        (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
    except OSError as error:
      raise ValueError(
        f"cpu_quota={quota:g} cannot be set here: {error}; this needs root, "
        "control groups of version 1 and a quota of at least 0.01"
      ) from error
    prefixes = [
      # The shell joins the group and becomes the command.
      ["sh", "-c", 'echo $$ > "$0" && exec "$@"', f"{folder}/cgroup.procs"]
      for folder in folders
    ]
    measured = _measure_cpu_use(prefixes)
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
    yield list(map(LimitedGroup, prefixes, measured))


@contextlib.contextmanager
def _control_group() -> Iterator[pathlib.Path]:
  """Context manager of a control group; at its end, deletes it and processes.

  Yields:
    The group's folder. A process joins the group by writing its id to
    ``cgroup.procs``.
  """
  folder = _ROOT / "cpu" / f"caatnet-{os.getpid()}-{time.monotonic_ns()}"
  folder.mkdir()
  with processes.run_at_exit(_REMOVE, folder):
    yield folder


def _in_us(quota: float) -> tuple[int, int]:
  """Returns (period, processor time per period) of a quota, in microseconds."""
  period = _PERIOD_US if quota * _PERIOD_US >= _MIN_US else _LONG_PERIOD_US
  return period, int(quota * period)


def _measure_cpu_use(prefixes: Sequence[Sequence[str]]) -> list[float | None]:
  """Runs a busy loop with each prefix; returns the processors that each used.

  Returns None for a loop that has not run.
  """
  with contextlib.ExitStack() as stack:
    loops = [
      stack.enter_context(processes.Process(
        [*prefix, sys.executable, "-S", "-c", _LOOP]
      )) for prefix in prefixes
    ]
    return [loop.answer() for loop in loops]
