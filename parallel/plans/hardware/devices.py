"""Accelerators as plain data, with the source of every constant.

1 GB is 10^9 bytes and 1 GiB is 2^30 bytes. FLOP rates are peaks of dense matrix
products, without sparsity; kernels reach less.

Example:
  >>> from parallel.plans.hardware.devices import H100
  >>> H100.memory_bytes / 1e9, H100.memory_bandwidth / 1e9  # GB, GB/s
  (80.0, 3350.0)
  >>> H100.peak("bfloat16") / H100.memory_bandwidth  # FLOP per byte
  295.3...
"""

from collections.abc import Mapping, Sequence
import dataclasses

from parallel.plans.hardware import links
from parallel.plans.hardware.links import LinkKind

_GIB = 2**30
SLOWDOWN_RANGE = 1e-3, 1e3  # smallest and largest factor of `slowed`


@dataclasses.dataclass(frozen=True)
class Device:
  """Device in XLA's sense, on which one shard of a program runs.

  Attributes:
    name: Key in ``DEVICES``.
    flops: Peak FLOP/s of dense products, by dtype.
    memory_bytes: Capacity of the main memory in bytes.
    memory_bandwidth: Bandwidth of the main memory in bytes per second.
    link: Kind of link to the other devices of its pod or node.
    num_links: Number of such links: two per dim of a TPU's torus, and 1 for a
      GPU, whose link has the aggregate bandwidth of all its ports.
    source: Source of the numbers.
    confidence: "published" if read in the source, "reported" if read in a copy
      or summary of the source.
    overhead_s: Seconds that each instruction of a compiled program takes in
      addition to its products and memory accesses; 0 if not measured.
  """

  name: str
  flops: Mapping[str, float]
  memory_bytes: int
  memory_bandwidth: float
  link: LinkKind
  num_links: int
  source: str
  confidence: str = "published"
  overhead_s: float = 0.0

  @property
  def platform(self) -> str:
    """XLA backend of the device: "tpu" or "gpu"."""
    # Only TPUs have several links per device.
    return "tpu" if self.num_links > 1 else "gpu"

  def peak(self, dtype: str) -> float:
    """Returns the peak FLOP/s of products of a dtype.

    The rate of bfloat16 is the default for dtypes that are not listed. For
    float32 on TPUs this is correct at JAX's default precision, which multiplies
    in bfloat16.

    Args:
      dtype: NumPy name of the dtype, e.g. "float32".
    """
    return self.flops.get(dtype, self.flops["bfloat16"])


def make_measured_device(
  name: str, flops: Mapping[str, float], memory_bytes: int,
  memory_bandwidth: float, source: str, overhead_s: float = 0.0,
) -> Device:
  """Returns a device whose numbers come from a file or a measurement.

  Its ``link`` is a placeholder, since a `link_matrix.LinkMatrix` describes the
  links. Dtypes missing in ``flops`` have the rate of the fastest listed dtype.
  """
  return Device(
    name, {"bfloat16": max(flops.values())} | dict(flops), memory_bytes,
    memory_bandwidth,
    LinkKind("the matrix", memory_bandwidth, None, "the matrix"), 1, source,
    overhead_s=overhead_s,
  )


def slowed(device: Device, factor: float) -> Device:
  """Returns a device whose products and memory take ``factor`` times as long.

  Raises:
    ValueError: The factor is not within `SLOWDOWN_RANGE`.
  """
  low, high = SLOWDOWN_RANGE
  if not low <= factor <= high:
    raise ValueError(
      f"the slowdown {factor:g} of {device.name} must lie in [{low:g}, "
      f"{high:g}]"
    )
  return dataclasses.replace(
    device, name=f"{device.name}, {factor:g} times as slow",
    flops={dtype: rate / factor for dtype, rate in device.flops.items()},
    memory_bandwidth=device.memory_bandwidth / factor,
    overhead_s=device.overhead_s * factor,
  )


def worst_case_device(devices: Sequence[Device]) -> Device:
  """Returns a device with the lowest of each rate and the smallest memory.

  A program with equal shards takes at most as long on the given devices as on
  devices of the returned type, and exactly as long if one of the given devices
  is the slowest in every respect.

  Args:
    devices: The devices, of one platform.

  Raises:
    ValueError: TPUs and GPUs are mixed, or two devices have the same name but
      different rates or memory.
  """
  kinds: list[Device] = []
  for device in devices:
    if device not in kinds:
      kinds.append(device)
  if len(kinds) == 1:
    return kinds[0]
  if len({device.platform for device in kinds}) > 1:
    raise ValueError(
      f"the devices {', '.join(d.name for d in kinds)} must all be GPUs or "
      "all be TPUs, since one program runs on them"
    )
  names = [device.name for device in devices]
  if len(set(names)) < len(kinds):
    raise ValueError(
      "devices of the same name must have the same rates and memory"
    )
  dtypes = dict.fromkeys(x for device in kinds for x in device.flops)
  return dataclasses.replace(
    kinds[0], name=" + ".join(f"{names.count(d.name)} {d.name}" for d in kinds),
    flops={dtype: min(d.peak(dtype) for d in kinds) for dtype in dtypes},
    memory_bytes=min(d.memory_bytes for d in kinds),
    memory_bandwidth=min(d.memory_bandwidth for d in kinds),
    overhead_s=max(d.overhead_s for d in kinds),
    source="; ".join(d.source for d in kinds),
  )


def _flops(bfloat16: float, **others: float) -> dict[str, float]:
  """Returns FLOP/s by dtype; float16 has the rate of bfloat16."""
  return {"bfloat16": bfloat16, "float16": bfloat16, **others}


# TPUs. Six links per chip in a 3D torus, four in a 2D torus.
_TPU_DOCS = "Google Cloud TPU documentation, https://docs.cloud.google.com/tpu/docs"

TPU_V4 = Device(
  "v4", _flops(275e12, int8=275e12), 32 * _GIB, 1200e9, links.ICI_V4, 6,
  f"{_TPU_DOCS}/v4",
)
TPU_V5E = Device(
  "v5e", _flops(197e12, int8=393e12), 16 * 10**9, 819e9, links.ICI_V5E, 4,
  f"{_TPU_DOCS}/v5e",
)
TPU_V5P = Device(
  "v5p", _flops(459e12, int8=918e12), 95 * _GIB, 2765e9, links.ICI_V5P, 6,
  f"{_TPU_DOCS}/v5p; int8: Austin et al., How to Scale Your Model, 2025, "
  "https://jax-ml.github.io/scaling-book/tpus",
)
TPU_V6E = Device(
  "v6e", _flops(918e12, int8=1836e12), 32 * 10**9, 1640e9, links.ICI_V6E, 4,
  f"{_TPU_DOCS}/v6e",
)
# A chip has two chiplets, and each of them is one device in XLA.
TPU_7X = Device(
  "tpu7x",
  _flops(2307e12 / 2, float8_e4m3fn=4614e12 / 2),
  192 * _GIB // 2,
  7380e9 / 2,
  links.ICI_7X,
  6,
  f"{_TPU_DOCS}/tpu7x, halved: a device is one of a chip's two chiplets; its "
  "links "
  "are the chip's",
)
# GPUs: one link, with the aggregate bandwidth of NVLink or of PCI Express.
V100 = Device(
  "v100", _flops(125e12, float32=15.7e12), 32 * 10**9, 900e9, links.NVLINK_2, 1,
  "NVIDIA V100 datasheet, SXM2 32 GB: 125 TFLOPS of its tensor cores are in "
  "float16; it has no bfloat16, so use model.dtype=float16",
)
A100 = Device(
  "a100", _flops(312e12, float32=19.5e12, int8=624e12), 80 * 10**9, 2039e9,
  links.NVLINK_3, 1,
  "NVIDIA A100 80GB SXM datasheet",
)
A100_PCIE = Device(
  "a100-pcie", _flops(312e12, float32=19.5e12, int8=624e12), 80 * 10**9,
  1935e9, links.PCIE_4, 1,
  "NVIDIA A100 80GB PCIe datasheet; without NVLink bridges",
)
A10 = Device(
  "a10", _flops(125e12, float32=31.2e12, int8=250e12), 24 * 10**9, 600e9,
  links.PCIE_4, 1,
  "NVIDIA A10 datasheet: 24 GB GDDR6, 600 GB/s, 125 TFLOPS in bfloat16 without "
  "sparsity",
)
H100 = Device(
  "h100", _flops(989.4e12, float32=66.9e12, float8_e4m3fn=1978.9e12),
  80 * 10**9, 3350e9, links.NVLINK_4, 1,
  "NVIDIA H100 SXM5 datasheet and Hopper whitepaper, table 1",
)
H200 = Device(
  "h200", _flops(989.4e12, float32=66.9e12, float8_e4m3fn=1978.9e12),
  141 * 10**9, 4800e9, links.NVLINK_4, 1,
  "NVIDIA H200 SXM datasheet",
)
B200 = Device(
  "b200", _flops(2250e12, float8_e4m3fn=4500e12), 180 * 10**9, 8000e9,
  links.NVLINK_5, 1,
  "NVIDIA DGX B200 datasheet, per GPU: 72 PFLOP/s FP8 with sparsity over 8, so "
  "4.5 dense and half of that in bfloat16; 1,440 GB and 64 TB/s over 8",
)
# A package has two GCDs, each of which is one device in ROCm and XLA.
MI250X_GCD = Device(
  "mi250x-gcd", _flops(191.5e12, float32=23.95e12), 64 * _GIB, 1600e9,
  links.FABRIC_GCD_PAIR, 1,
  "AMD Instinct MI250X datasheet, halved: one of the two GCDs of a package",
  "reported",
)

# Devices by name.
DEVICES = {
  d.name: d
  for d in (TPU_V4, TPU_V5E, TPU_V5P, TPU_V6E, TPU_7X, V100, A100, A100_PCIE,
            A10, H100, H200, B200, MI250X_GCD)
}
