"""Pre-flight check of this machine's memory and disks for a placement.

`check` returns a warning if memory is not free or cannot be locked at the
moment, and raises an error if the machine is too small for a placement.
"""

from collections.abc import Mapping
import pathlib
import platform
import resource
import shutil

from parallel.base import available
from parallel.memory import host_memory
from parallel.plans.hardware.tiers import Host
from parallel.plans.placement.problem import Instant

_CAP_IPC_LOCK = 14  # number of the capability in linux/capability.h


def check(
  host: Host, occupied: Mapping[Instant, Mapping[str, float]], locked: float
) -> list[str]:
  """Compares a placement with this machine, if the host describes it.

  Args:
    host: The host. It describes this machine if ``name`` is the machine's host
      name, as in files of `launch.measure`.
    occupied: Instant of a step -> tier -> bytes (`Cost.occupied`).
    locked: Bytes of host memory that are locked for copies to and from devices.

  Returns:
    Warnings of one line; none for other machines.

  Raises:
    ValueError: A node does not exist, or this machine has less memory or a
      smaller disk than the placement needs.
  """
  if host.name != platform.node():
    return []
  for tier in host.tiers:
    if tier.node is not None:
      try:
        host_memory.check_node(tier.node)
      except ValueError as error:
        raise ValueError(f"tier {tier.name!r}: {error}") from error
  nodes = {tier.name for tier in host.tiers if tier.kind != "file"}
  needed = max((
    sum(held for tier, held in at.items() if tier in nodes)
    for at in occupied.values()
  ), default=0.0)
  found = _check_capacity(
    "memory", needed, available.limit_bytes(), available.available_bytes()
  )
  for tier in host.tiers:
    if tier.path is not None:
      disk = shutil.disk_usage(pathlib.Path(tier.path).absolute().parent)
      held = max((at[tier.name] for at in occupied.values()), default=0.0)
      found += _check_capacity(
        f"{tier.path}: disk", held, disk.total, disk.free
      )
  most = _lockable()
  if locked > most:
    found.append(
      f"{locked / 1e9:.1f} GB are locked for copies, and this process may lock "
      f"{most / 1e6:,.1f} MB: raise RLIMIT_MEMLOCK (ulimit -l) or grant "
      "CAP_IPC_LOCK"
    )
  return found


def _check_capacity(
  what: str, needed: float, total: float, free: float
) -> list[str]:
  """Returns a warning if too few bytes are free, or raises if too few exist.

  Args:
    what: Name of the memory or disk in messages.
    needed, total, free: Bytes that the placement needs, that exist, and that
      are free now.
  """
  if needed > total:
    raise ValueError(
      f"{what}: the placement needs {needed / 1e9:.1f} GB, and this machine "
      f"has {total / 1e9:.1f} GB"
    )
  if needed > free:
    return [
      f"{what}: the placement needs {needed / 1e9:.1f} GB, and "
      f"{free / 1e9:.1f} GB are free at the moment"
    ]
  return []


def _lockable() -> float:
  """Returns the bytes that this process may lock; infinity for no limit."""
  status = pathlib.Path("/proc/self/status").read_text()
  effective = next(
    int(line.split()[1], 16) for line in status.splitlines()
    if line.startswith("CapEff:")
  )
  limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
  unlimited = effective >> _CAP_IPC_LOCK & 1
  return float("inf") if unlimited or limit == resource.RLIM_INFINITY else limit
