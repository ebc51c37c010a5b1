"""Predictor of a training step with features in host memory.

A step needs X bytes of feature rows. In the conventional way, the host gathers
them into a staging buffer, which is copied over the link. With zero-copy, the
device reads rows in place, in requests of whole lines, without any work of the
host (Min et al., arXiv 2103.03330):

    conventional   X / gather + X / link + compute
    zero-copy      X lines / link + compute
    overlapped     max(X lines / link, compute)

where ``gather`` is the rate at which a device's share of the host's cores
gathers, in bytes of features per second, and ``lines`` is the number of
requested bytes per useful byte. Several devices share the host's cores and its
memory; each device has a separate link. A byte of features is read or written
in host memory three times in the conventional way, and once by zero-copy.
"""

import dataclasses

from parallel.base.checks import at_least, positive

CPU_PASSES = 3


@dataclasses.dataclass(frozen=True)
class Host:
  """Host with devices.

  Attributes:
    gather: Bytes of features per second that all cores together gather.
    memory: Memory bandwidth in bytes per second.
    link: Bytes per second from the host to one device.
    devices: Number of devices that fetch at the same time.
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
class StepTime:
  """Duration of a step of one device, in seconds.

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
    """Speedup of zero-copy over gathering by the host."""
    return self.conventional_s / self.zero_copy_s

  @property
  def faster_overlapped(self) -> float:
    """Speedup over gathering by the host if zero-copy overlaps with compute."""
    return self.conventional_s / self.overlapped_s


def predict(
  host: Host, feature_bytes: float, compute_s: float, lines: float = 1.0
) -> StepTime:
  """Predicts the seconds of a step.

  Example:
    1 GB of rows. The host gathers 10 GB/s, and the link copies 50 GB/s:

    >>> step = predict(Host(gather=10e9, memory=1e12, link=50e9), 1e9, 0.01)
    >>> round(step.conventional_s, 3), round(step.zero_copy_s, 3)
    (0.13, 0.03)

  Args:
    host: Host and its devices.
    feature_bytes: X, bytes of rows that a device needs.
    compute_s: Seconds of the device's compute.
    lines: Number of bytes that zero-copy requests for each useful byte.
  """
  all_bytes = feature_bytes * host.devices
  # The slower of the cores and of the host's memory, shared by devices.
  gather_s = max(
    all_bytes / host.gather, CPU_PASSES * all_bytes / host.memory
  )
  copy_s = feature_bytes / host.link
  read_s = max(
    feature_bytes * lines / host.link, all_bytes * lines / host.memory
  )
  return StepTime(
    gather_s + copy_s + compute_s, read_s + compute_s, max(read_s, compute_s)
  )
