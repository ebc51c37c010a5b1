"""Nodes that serve many models: memory of devices and host, and copy rates.

A node holds experts, each a complete model, in the main memory of its devices,
and further experts in the memory of its host. SN40L (arXiv 2405.07518) has DDR
attached to its sockets instead of host memory. 1 GB is 10^9 bytes and 1 GiB is
2^30 bytes.

Example:
  >>> expert = 13.5e9  # bytes: Llama 2 7B in bfloat16
  >>> for name in ("sn40l", "dgx-h100", "dgx-a100"):
  ...   print(name, round(1e3 * NODES[name].switch_s(expert), 1), "ms")
  sn40l 13.5 ms
  dgx-h100 210.9 ms
  dgx-a100 421.9 ms
  >>> [NODES[name].machines(850, expert) for name in ("sn40l", "dgx-a100")]
  [1, 19]
"""

import math

from parallel.base import schema
from parallel.plans.hardware import devices
from parallel.plans.hardware.devices import Device
from parallel.plans.hardware.tiers import HOSTS, Quantity

_GIB, _TIB = 2**30, 2**40


class Node(schema.Schema):
  """Node with devices of one kind.

  Attributes:
    name: Key in `NODES`.
    num_devices: Number of devices.
    device_bytes: Bytes of a device's main memory.
    device_rate: Bytes per second of a device's main memory.
    host_bytes: Bytes of the node's memory outside of devices.
    copy_rate: Bytes per second from the host's memory to one device.
    node_rate: Bytes per second at which one model is copied to the devices, as
      counted in arXiv 2405.07518.
    attached: Whether the memory of ``host_bytes`` is attached to the devices'
      sockets. If so, `machines` counts the experts that fit in it; if not, the
      experts that fit in the devices' memory.
  """

  name: str
  num_devices: int
  device_bytes: Quantity
  device_rate: Quantity
  host_bytes: Quantity
  copy_rate: Quantity
  node_rate: Quantity
  attached: bool

  def switch_s(self, size_bytes: float, spread: bool = False) -> float:
    """Returns the seconds to copy one model to the devices.

    Args:
      size_bytes: Bytes of the model.
      spread: Whether each device copies its shard over its own link.
    """
    rate = self.node_rate.value
    if spread:
      rate = max(rate, self.num_devices * self.copy_rate.value)
    return size_bytes / rate

  def resident(self, size_bytes: float) -> int:
    """Returns the number of models that fit in the devices' memory."""
    return int(self.num_devices * self.device_bytes.value // size_bytes)

  def held(self, size_bytes: float) -> int:
    """Returns the number of models that fit in the memory outside devices."""
    return int(self.host_bytes.value // size_bytes)

  def machines(self, num_experts: int, size_bytes: float) -> int:
    """Returns the number of nodes that are needed to serve ``num_experts``.

    A node with memory `attached` to its devices serves as many experts as fit
    in that memory. Any other node serves only as many as fit in its devices'
    memory, since copies from the host are slow.
    """
    room = self.resident(size_bytes)
    if self.attached:
      room = max(room, self.held(size_bytes))
    if not room:
      raise ValueError(
        f"node={self.name!r} has too little memory for one expert, which takes "
        f"{size_bytes / 1e9:.1f} GB"
      )
    return math.ceil(num_experts / room)


def _quantity(
  value: float, source: str, low: float | None = None, high: float | None = None
) -> Quantity:
  return Quantity(
    value=float(value), source=source, low=float(value if low is None else low),
    high=float(value if high is None else high),
  )


_SN40L_SOURCE = "SN40L (arXiv 2405.07518)"


def _dgx(name: str, device: Device, rate: float) -> Node:
  """Returns a DGX; `rate`: bytes per second of one PCI Express x16 link."""
  host = HOSTS[name]
  return Node(
    name=name,
    num_devices=8,
    device_bytes=_quantity(device.memory_bytes, device.source),
    device_rate=_quantity(device.memory_bandwidth, device.source),
    host_bytes=host.tiers[0].capacity_bytes,
    copy_rate=host.device_link.read,
    node_rate=_quantity(
      rate,
      f"{_SN40L_SOURCE}: raw rate of one PCI Express x16 link; up to 8 links "
      "if "
      "each GPU copies its shard",
      rate,
      8 * rate,
    ),
    attached=False,
  )


def _tpu(
  device: Device, num: int, host: float, source: str, link: float
) -> Node:
  """Returns a host of ``num`` TPU chips, each with its own link to the host.

  ``host``: bytes of host memory; ``link``: bytes per second of a chip's link.
  """
  rate = _quantity(
    link, "PCI Express of a chip, reported in summaries of Austin et al., How "
    "to Scale Your Model, 2025: 16 to 32 GB/s", 16e9, 32e9,
  )
  return Node(
    name=f"tpu-{device.name}", num_devices=num,
    device_bytes=_quantity(device.memory_bytes, device.source),
    device_rate=_quantity(device.memory_bandwidth, device.source),
    host_bytes=_quantity(host, source), copy_rate=rate,
    node_rate=_quantity(
      num * rate.value, "each chip copies its shard", num * rate.low,
      num * rate.high,
    ),
    attached=False,
  )


_TPU_DOCS = "Google Cloud TPU documentation, https://docs.cloud.google.com/tpu"
NODES = {
  node.name: node for node in (
    Node(
      name="sn40l", num_devices=8,
      device_bytes=_quantity(64 * _GIB, f"{_SN40L_SOURCE}: HBM of a socket"),
      device_rate=_quantity(1.8e12, f"{_SN40L_SOURCE}: HBM of a socket"),
      host_bytes=_quantity(
        12 * _TIB, f"{_SN40L_SOURCE}: DDR of a node, at most", high=12 * _TIB
      ),
      copy_rate=_quantity(200e9, f"{_SN40L_SOURCE}: DDR of a socket, at least"),
      node_rate=_quantity(
        1e12,
        f"{_SN40L_SOURCE}: DDR to HBM of a node, at least; 8 sockets have 1.6 "
        "TB/s", 1e12, 1.6e12,
      ),
      attached=True,
    ),
    _dgx("dgx-a100", devices.A100, 32e9),
    _dgx("dgx-h100", devices.H100, 64e9),
    _tpu(devices.TPU_V5E, 8, 512 * _GIB, f"{_TPU_DOCS}/docs/v5e: per host",
         16e9),
    _tpu(devices.TPU_V5P, 4, 448e9, f"{_TPU_DOCS}/docs/v5p: VM of 4 chips",
         16e9),
  )
}
