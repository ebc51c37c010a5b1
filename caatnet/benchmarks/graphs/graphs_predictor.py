"""Predicts a training step whose features lie in the host's memory.

A step needs X bytes of feature rows. By the conventional way the host gathers
them into a staging buffer and the link copies that; by zero-copy the device
reads rows where they lie, in requests of whole lines, and the host does
nothing (Min et al., arXiv 2103.03330):

    conventional   X / gather + X / link + compute
    zero-copy      X lines / link + compute
    overlapped     max(X lines / link, compute)

with the rate at which a device's share of the host's cores gathers, in bytes of
features per second, and ``lines``, the bytes of requests for each useful byte.
Several devices share the host's cores and its memory, of which the conventional
way takes three passes and zero-copy one; each has a link of its own.
"""

import dataclasses

from parallel.checks import at_least, positive

CPU_PASSES = 3


@dataclasses.dataclass(frozen=True)
class Host:
  """A host with devices.

  Attributes:
    gather: Bytes of features per second that all its cores gather together.
    memory: Bytes per second of its memory.
    link: Bytes per second from the host to one device.
    devices: Devices that fetch at the same time.
  """

  gather: float
  memory: float
  link: float
  devices: int = 1

  def __post_init__(self) -> None:
    for name in ("gather", "memory", "link"):
      positive(name, getattr(self, name))
    at_least("devices", self.devices)


@dataclasses.dataclass(frozen=True)
class Step:
  """Seconds of a step of one device.

  Attributes:
    conventional_s: The host gathers, then copies, then the device computes.
    zero_copy_s: The device reads, then computes.
    overlapped_s: The device reads the next batch while it computes.
  """

  conventional_s: float
  zero_copy_s: float
  overlapped_s: float

  @property
  def faster(self) -> float:
    """The speedup of zero-copy over the conventional way."""
    return self.conventional_s / self.zero_copy_s

  @property
  def faster_overlapped(self) -> float:
    """The speedup where zero-copy overlaps with compute."""
    return self.conventional_s / self.overlapped_s


def predict(
  host: Host, feature_bytes: float, compute_s: float, lines: float = 1.0
) -> Step:
  """Predicts the seconds of a step.

  Args:
    host: The host and its devices.
    feature_bytes: X, the bytes of rows that a device needs.
    compute_s: Seconds of the device's compute.
    lines: Bytes of lines that are read for each useful byte.
  """
  all_bytes = feature_bytes * host.devices
  gather_s = max(
    all_bytes / host.gather, CPU_PASSES * all_bytes / host.memory
  )
  copy_s = feature_bytes / host.link
  read_s = max(
    feature_bytes * lines / host.link, all_bytes * lines / host.memory
  )
  return Step(
    gather_s + copy_s + compute_s, read_s + compute_s, max(read_s, compute_s)
  )
