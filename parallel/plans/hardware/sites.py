"""Racks, cooling, sites and failure rates as plain data, with their sources.

1 GB is 10^9 bytes; 1 PFLOPS is 10^15 FLOP/s of dense products. The marks of
sources are defined in `caatnet.studies.datacentre.knobs`.
"""

from collections.abc import Mapping
import dataclasses

Source = tuple[str, str]  # (citation, mark)

_GB200_DATASHEET = "NVIDIA GB200 NVL72 datasheet, over 72, without sparsity"
_PAPER_OUTPUTS = "backed out of outputs of arXiv 2407.12819"
_CHOICE_SOURCE = ("ours", "choice")


@dataclasses.dataclass(frozen=True)
class Rack:
  """Rack of accelerators.

  Attributes:
    name: Key in ``RACKS``.
    per_rack: Number of accelerators.
    per_domain: Number of accelerators of a scale-up domain, such as those that
      NVLink connects.
    flops: Peak FLOP/s of dense products per accelerator, by number format.
    memory_bytes: Memory per accelerator in bytes.
    scale_up_bits: Bit/s per accelerator inside its domain, in each direction.
    scale_out_bits: Bit/s per accelerator to other domains, in each direction.
    rack_w: Power of the rack as sold, in watts.
    overhead: Power with the rack's network and storage, divided by ``rack_w``.
    rack_price: Price of the rack in dollars.
    sources: Source of each field, by field name; "peak" stands for ``flops``.
  """

  name: str
  per_rack: int
  per_domain: int
  flops: Mapping[str, float]
  memory_bytes: float
  scale_up_bits: float
  scale_out_bits: float
  rack_w: float
  overhead: float
  rack_price: float
  sources: Mapping[str, Source]


_DGX_DATASHEET = "NVIDIA DGX H100 datasheet"
RACKS = {rack.name: rack for rack in (
  Rack(
    "gb200", 72, 72, {"bf16": 2.5e15, "fp8": 5e15, "fp4": 10e15}, 186e9, 7.2e12,
    400e9, 120e3, 1.2875, 3.0042e6,
    {
      "per_rack": (_GB200_DATASHEET, "published"),
      "per_domain": (_GB200_DATASHEET, "published"),
      "peak": (_GB200_DATASHEET, "published"),
      "memory_bytes": (_GB200_DATASHEET, "published"),
      "scale_up_bits": (f"{_GB200_DATASHEET}: 1.8 TB/s both ways", "published"),
      "scale_out_bits": ("one adapter of 400 Gb/s each", "unverified"),
      "rack_w": ("those who install such racks", "reported"),
      "overhead": (f"154.5 kW over 120, {_PAPER_OUTPUTS}", "derived"),
      "rack_price": (_PAPER_OUTPUTS, "derived"),
    },
  ),
  Rack(
    "h100", 32, 8, {"bf16": 989.4e12, "fp8": 1978.9e12}, 80e9, 3.6e12, 400e9,
    # Four DGX H100 nodes form one rack.
    4 * 10.2e3, 1.15, 1.4e6,
    {
      "per_rack": ("four nodes of eight", "choice"),
      "per_domain": (f"{_DGX_DATASHEET}: eight GPUs on NVLink", "published"),
      "peak": (_DGX_DATASHEET, "published"),
      "memory_bytes": (_DGX_DATASHEET, "published"), "scale_up_bits": (
        f"{_DGX_DATASHEET}: 900 GB/s both ways, in a node", "published"
      ),
      "scale_out_bits": (_DGX_DATASHEET, "published"),
      "rack_w": (f"{_DGX_DATASHEET}: at most 10.2 kW a node", "published"),
      "overhead": _CHOICE_SOURCE,
      "rack_price": ("350,000 dollars a node", "unverified"),
    },
  ),
)}

# Power usage effectiveness (total power over IT power) by cooling method.
COOLING: dict[str, tuple[float, Source]] = {
  "liquid": (1.2, (
    "ours; the paper's total power over IT power is 1.156 to 1.308", "choice"
  )),
  "air": (1.57, (
    "mean of large datacentres, Uptime Institute's survey of 2021 in CNBC of "
    "2022-04-13; that they are cooled with air is assumed", "reported"
  )),
  "fleet": (1.10, (
    "Google, second quarter of 2021, in CNBC of 2022-04-13", "reported"
  )),
}


# Limit on a site's power in watts: all power plants of the world have less.
MAX_W = 1e13


@dataclasses.dataclass(frozen=True)
class Site:
  """Datacenter site with a power limit.

  Attributes:
    name: Key in ``SITES``.
    power_w: Available power in watts.
    source: Source of the number.
  """

  name: str
  power_w: float
  source: str


_SITE_SOURCE = "a choice: no grid operator was asked"
SITES = {site.name: site for site in (
  Site("east", 2.4e9, _SITE_SOURCE), Site("west", 2.4e9, _SITE_SOURCE),
)}

# Number of unexpected interruptions of 16,384 GPUs in 54 days, by cause.
INTERRUPTIONS = {
  # The sum is 419 interruptions.
  "faulty GPU": 148, "GPU memory": 72, "software": 54,
  "network switch or cable": 35, "host maintenance": 32, "GPU SRAM": 19,
  "GPU system processor": 17, "network adapter": 7, "NCCL watchdog": 7,
  "silent corruption": 6, "GPU temperature": 6, "others": 16,
}
OBSERVED_GPUS, OBSERVED_HOURS = 16_384, 54 * 24
INTERRUPTIONS_SOURCE = (
  "The Llama 3 Herd of Models (arXiv 2407.21783), table 5: the total and the "
  "largest causes were read in others' copies"
)
NETWORK_CAUSES = ("network switch or cable", "network adapter")
# Causes after which no hardware has to be repaired.
SOFTWARE_CAUSES = ("software", "host maintenance", "NCCL watchdog")
