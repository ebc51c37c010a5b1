"""Memory tiers of a host as plain data, and the file that describes them.

A host has tiers (DRAM, memory behind CXL, files), links that several tiers
share, and one link between host and device. Each number is a `Quantity` with a
range and a source. A file contains one `Host` as JSON.

Example:
  >>> from parallel.plans.hardware.tiers import HOSTS, parse, to_json
  >>> host = HOSTS["two-cxl"]
  >>> for tier in host.tiers:  # GB, and GB/s read
  ...   print(tier.name, tier.capacity_bytes.value / 1e9, tier.read.value / 1e9)
  dram 128.0 307.2
  cxl0 256.0 63.0...
  cxl1 256.0 63.0...
  >>> parse(to_json(host)) == host
  True
"""

from collections.abc import Sequence
import os
import pathlib
from typing import Literal

import numpy as np

from parallel.base import checks, schema
from parallel.plans.hardware import links
from parallel.plans.hardware.links import LinkKind

# Limit on the tiers of a host file; more are taken for a mistake. The optimal
# placement has one variable per tensor and tier.
MAX_TIERS = 64
# Names that predictions use for the device's own resources.
_RESERVED_NAMES = ("device", "device memory", "compute")
# Allowed rates of memory and links, in bytes per second.
_MIN_RATE, _MAX_RATE = 1.0, 1e18


class Quantity(schema.Schema):
  """Number with its uncertainty range and source.

  Attributes:
    value: Value that predictions use.
    low, high: Ends of the range of plausible values, which contains ``value``.
    source: Source of the number.
  """

  value: schema.NotNegative
  low: schema.NotNegative
  high: schema.NotNegative
  source: str

  def check(self, name: str, positive: bool = True) -> None:
    """Raises ValueError unless low <= value <= high.

    With ``positive``, ``low`` must also be above 0.
    """
    if not self.low <= self.value <= self.high:
      raise ValueError(
        f"{name}: value={self.value:g} must lie between low={self.low:g} and "
        f"high={self.high:g}"
      )
    if positive and self.low == 0:
      raise ValueError(f"{name}: low={self.low:g} must be positive")


class SharedLink(schema.Schema):
  """Link that several tiers share, or the link between host and device.

  Attributes:
    name: Name that tiers refer to.
    read: Bytes per second from the tiers or, for the link between host and
      device, from host to device.
    write: Bytes per second in the opposite direction.
    duplex: Whether both directions reach their rates concurrently.
  """

  name: str
  read: Quantity
  write: Quantity
  duplex: bool


class OptimizerPass(schema.Schema):
  """Measured time of one pass of an optimizer on the CPU over bytes of a tier.

  Attributes:
    size_bytes: Bytes that the optimizer processes in a step.
    read_s: Seconds to read them.
    write_s: Additional seconds to write them; for a file, until they are on
      disk.
  """

  size_bytes: schema.Positive
  read_s: schema.NotNegative
  write_s: schema.NotNegative


class Tier(schema.Schema):
  """Memory tier of a host.

  Attributes:
    name: Name, unique within the host.
    kind: "dram", "cxl" (a NUMA node without CPUs) or "file" (memory-mapped).
    capacity_bytes: Bytes that may be used.
    read, write: Bytes per second.
    latency_s: Seconds of a load whose address is the value of the load before.
    duplex: Whether reads and writes reach their rates concurrently.
    link: Name of the shared link that the tier's bytes cross; None for none.
    node: Number of the NUMA node; None if it is unknown or a file.
    path: Path of the file; None for other kinds.
    passes: Measured passes of the CPU's optimizer by ascending size, since
      small sizes fit in a cache and are faster. Empty if ``read`` and ``write``
      hold for all sizes.
  """

  name: str
  kind: Literal["dram", "cxl", "file"]
  capacity_bytes: Quantity
  read: Quantity
  write: Quantity
  latency_s: Quantity
  duplex: bool
  link: str | None = None
  node: int | None = schema.Field(None, ge=0)
  path: str | None = None
  passes: tuple[OptimizerPass, ...] = ()

  def pass_s(self, read: float, written: float) -> float:
    """Returns the seconds of the optimizer's pass, interpolated from `passes`.

    Args:
      read: Bytes that the CPU's optimizer reads in a step.
      written: Bytes that it writes.
    """
    return _interpolate_pass_s(
      self.passes, "read_s", read
    ) + _interpolate_pass_s(
      self.passes, "write_s", written
    )

  def at(self, read: float, write: float) -> "Tier":
    """Returns this tier with other rates; the times of `passes` are rescaled.

    Args:
      read, write: New rates in bytes per second.
    """
    return self.model_copy(update={
      "read": self.read.model_copy(update={"value": read}),
      "write": self.write.model_copy(update={"value": write}),
      "passes": tuple(
        OptimizerPass(
          size_bytes=x.size_bytes, read_s=x.read_s * self.read.value / read,
          write_s=x.write_s * self.write.value / write,
        ) for x in self.passes
      ),
    })


def _interpolate_pass_s(
  passes: Sequence[OptimizerPass], key: str, size: float
) -> float:
  """Returns ``key`` ("read_s" or "write_s") of a pass over ``size`` bytes.

  It is interpolated between measured sizes. Beyond the largest one the rate is
  constant. Below the smallest one the time is constant: files have fixed costs.
  """
  if not size:
    return 0.0
  last = passes[-1]
  return float(np.interp(
    size, [p.size_bytes for p in passes], [getattr(p, key) for p in passes]
  )) * max(1.0, size / last.size_bytes)


class Host(schema.Schema):
  """Tiers of a host and the links between them.

  Attributes:
    name: Name of the host.
    source: Source of its structure.
    device_link: Link between host and device. ``read`` is from host to device.
    links: Links that tiers share.
    tiers: Tiers, the fastest first.
  """

  name: str
  source: str
  device_link: SharedLink
  links: tuple[SharedLink, ...]
  tiers: tuple[Tier, ...]

  @property
  def to_device(self) -> float:
    """Bytes per second from the fastest tier to the device."""
    fastest = max(tier.read.value for tier in self.tiers)
    return min(self.device_link.read.value, fastest)

  @property
  def from_device(self) -> float:
    """Bytes per second from the device to the fastest tier."""
    fastest = max(tier.write.value for tier in self.tiers)
    return min(self.device_link.write.value, fastest)

  def tier(self, name: str) -> Tier:
    """Returns a tier by name."""
    checks.known("tier ", name, [tier.name for tier in self.tiers])
    return next(tier for tier in self.tiers if tier.name == name)


def read(path: pathlib.Path) -> Host:
  """Reads a host from a JSON file; errors name the file.

  Raises:
    ValueError: A key or value is invalid; the message has one line.
    OSError: The file cannot be read.
  """
  return schema.read(Host, path, then=check_host)


def parse(text: str) -> Host:
  """Returns the host that the text of a file describes; see `read`."""
  return check_host(schema.parse(Host, text))


def to_json(host: Host) -> str:
  """Returns the text of a file for `read`."""
  return host.model_dump_json(indent=2) + "\n"


def resolve_host(text: str) -> Host:
  """Returns a host by the path of a file that ends in .json, or by name.

  Raises:
    ValueError: The name is unknown, or the file is invalid.
  """
  if text.endswith(".json"):
    return read(pathlib.Path(text))
  checks.known("tiers=", text, HOSTS)
  return HOSTS[text]


def _folder(path: str) -> str:
  return os.path.dirname(os.path.abspath(path))


def check_host(host: Host) -> Host:
  """Checks names, ranges and links, and returns the host.

  Raises:
    ValueError: There is no tier or there are too many, a name occurs twice, two
      tiers are the same node or folder, a link is unknown, a rate or capacity
      is 0, or a range is not ordered.
  """
  if not 1 <= len(host.tiers) <= MAX_TIERS:
    raise ValueError(
      f"tiers has {len(host.tiers)} entries; it must have 1 to {MAX_TIERS}"
    )
  names = [x.name for x in (*host.tiers, *host.links, host.device_link)]
  for name in names:
    if names.count(name) > 1:
      raise ValueError(f"the name {name!r} of a tier or link occurs twice")
    if name in _RESERVED_NAMES or "," in name:
      raise ValueError(
        f"name={name!r} of a tier or link must have no comma, and be none of "
        f"{', '.join(_RESERVED_NAMES)}"
      )
  shared = [link.name for link in host.links]
  for i, tier in enumerate(host.tiers):
    if tier.link is not None:
      checks.known(f"tiers[{i}].link=", tier.link, shared)
    if (tier.kind == "file") != (tier.path is not None):
      raise ValueError(
        f"tiers[{i}] must have a path if its kind is file, and no path "
        "otherwise"
      )
    for other in host.tiers[:i]:
      if tier.node is not None and tier.node == other.node:
        raise ValueError(
          f"tiers {other.name!r} and {tier.name!r} both have node={tier.node}; "
          "each NUMA node must be one tier"
        )
      if tier.path and other.path and (
        _folder(tier.path) == _folder(other.path)
      ):
        raise ValueError(
          f"tiers {other.name!r} and {tier.name!r} both have files in the "
          f"folder {_folder(tier.path)}; each disk must be one tier"
        )
    tier.capacity_bytes.check(f"tiers[{i}].capacity_bytes")
    tier.latency_s.check(f"tiers[{i}].latency_s", positive=False)
    sizes = [x.size_bytes for x in tier.passes]
    if sizes != sorted(set(sizes)) or (sizes and tier.duplex):
      raise ValueError(
        f"tiers[{i}].passes must have ascending sizes, and must be empty if "
        "duplex=true"
      )
  for where, link in (
    *((f"tiers[{i}]", tier) for i, tier in enumerate(host.tiers)),
    ("device_link", host.device_link),
    *((f"links[{i}]", link) for i, link in enumerate(host.links)),
  ):
    for key in ("read", "write"):
      rate = getattr(link, key)
      rate.check(f"{where}.{key}")
      if not _MIN_RATE <= rate.low <= rate.high <= _MAX_RATE:
        raise ValueError(
          f"{where}.{key}: rates must lie in [{_MIN_RATE:g}, {_MAX_RATE:g}]"
        )
  return host


def _quantity(
  value: float, source: str, low: float | None = None, high: float | None = None
) -> Quantity:
  """Returns a quantity; a missing ``low`` or ``high`` equals ``value``."""
  low, high = (value if end is None else end for end in (low, high))
  return Quantity(value=float(value), low=low, high=high, source=source)


def _link(name: str, kind: LinkKind, duplex: bool = True) -> SharedLink:
  rate = _quantity(kind.bandwidth, kind.source)
  return SharedLink(name=name, read=rate, write=rate, duplex=duplex)


def _dram(capacity: float, rate: float, source: str) -> Tier:
  """Returns a tier of local DRAM, which is not duplex.

  ``capacity`` is in bytes, ``rate`` the peak in bytes/s.
  """
  speed = _quantity(rate, f"{source}; peak of its channels", 0.5 * rate)
  return Tier(
    name="dram", kind="dram", node=0, duplex=False, read=speed, write=speed,
    capacity_bytes=_quantity(capacity, source),
    latency_s=_quantity(100e-9, "assumption: local DRAM", 80e-9, 130e-9),
  )


def _cxl(index: int) -> Tier:
  """Returns a CXL card on 16 lanes of PCI Express 5.0; ``index`` numbers it."""
  rate = links.PCIE_5.bandwidth
  speed = _quantity(
    rate, "PCI Express 5.0 x16, raw; range down to 28 GB/s, a card on 8 lanes",
    28e9,
  )
  return Tier(
    name=f"cxl{index}", kind="cxl", node=1 + index, duplex=True, read=speed,
    write=speed, link=None,
    capacity_bytes=_quantity(256e9, "assumption: a card with 256 GB"),
    latency_s=_quantity(
      300e-9, "arXiv 2405.14209: 2 to 5 times that of local DRAM", 200e-9,
      500e-9,
    ),
  )


def _server(
  name: str, source: str, device_link: SharedLink, *tiers: Tier
) -> Host:
  return check_host(Host(
    name=name, source=source, device_link=device_link, links=(), tiers=tiers,
  ))


_DDR5_CHANNEL_RATE = 38.4e9  # DDR5-4800: 4.8 GT/s of 8 bytes
_DDR4_CHANNEL_RATE = 25.6e9  # DDR4-3200
_CXL_SOURCE = (
  "CXL-aware allocation (arXiv 2507.03305): one GPU, local DRAM and {} CXL "
  "cards; sizes and rates are assumptions with ranges"
)
_LOCAL_DRAM = _dram(
  128e9, 8 * _DDR5_CHANNEL_RATE, "assumption: 8 channels of DDR5-4800, 128 GB"
)
_PCIE_5 = _link("pcie5", links.PCIE_5)
HOSTS = {
  host.name: host for host in (
    _server(
      "dgx-a100", "NVIDIA DGX A100 datasheet: 1 TB of memory",
      _link("pcie4", links.PCIE_4),
      _dram(1e12, 16 * _DDR4_CHANNEL_RATE,
            "NVIDIA DGX A100 datasheet: 1 TB; two sockets of 8 DDR4-3200"),
    ),
    _server(
      "dgx-h100", "NVIDIA DGX H100 datasheet: 2 TB of memory", _PCIE_5,
      _dram(2e12, 16 * _DDR5_CHANNEL_RATE,
            "NVIDIA DGX H100 datasheet: 2 TB; two sockets of 8 DDR5-4800"),
    ),
    _server(
      "frontier", links.FABRIC_HOST.source,
      _link("fabric", links.FABRIC_HOST),
      _dram(512e9, 8 * _DDR4_CHANNEL_RATE,
            "Frontier user guide: 512 GB of DDR4 at 205 GB/s"),
    ),
    _server(
      "large-dram", "the host of two-cxl with all its memory as local DRAM",
      _PCIE_5, _LOCAL_DRAM.model_copy(update={
        "capacity_bytes": _quantity(640e9, "assumption: 640 GB")
      }),
    ),
    _server(
      "one-cxl", _CXL_SOURCE.format("one"), _PCIE_5, _LOCAL_DRAM, _cxl(0)
    ),
    _server(
      "two-cxl", _CXL_SOURCE.format("two"), _PCIE_5, _LOCAL_DRAM, _cxl(0),
      _cxl(1)
    ),
  )
}
