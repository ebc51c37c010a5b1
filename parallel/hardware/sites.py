"""Racks, cooling, sites and failures as plain data, with their sources.

1 GB is 10^9 bytes, 1 PFLOPS 10^15 FLOP/s of dense products.
"""

from collections.abc import Mapping
import dataclasses

_NVIDIA = "NVIDIA GB200 NVL72 datasheet, peaks with sparsity halved, over 72"


@dataclasses.dataclass(frozen=True)
class Rack:
  """A rack of accelerators as it is sold.

  Attributes:
    name: Key in ``RACKS``.
    accelerators: How many it has.
    flops: FLOP/s of dense products of an accelerator, by format.
    memory_bytes: The memory of an accelerator.
    scale_out_bits: Bit/s of an accelerator to other racks, each way.
    power_w: Watts of the rack alone.
    price: Dollars.
    source: Where the numbers come from.
  """

  name: str
  accelerators: int
  flops: Mapping[str, float]
  memory_bytes: float
  scale_out_bits: float
  power_w: float
  price: float
  source: str


RACKS = {rack.name: rack for rack in (
  Rack(
    "gb200", 72, {"bf16": 2.5e15, "fp8": 5e15, "fp4": 10e15}, 186e9, 400e9,
    120e3, 3.0042e6,
    f"{_NVIDIA}; 13.4 TB of memory in a rack; 400 Gb/s and 120 kW: reported by "
    "those who install them; price: backed out of outputs of arXiv 2407.12819",
  ),
  Rack(
    "h100", 32, {"bf16": 989.4e12, "fp8": 1978.9e12}, 80e9, 400e9, 4 * 10.2e3,
    1.4e6,
    "NVIDIA DGX H100 datasheet, 8 GPUs and at most 10.2 kW; four in a rack, "
    "350,000 dollars each: recalled",
  ),
)}

# Total power over that of the machines, by how these are cooled.
COOLING = {
  "fleet": (1.10, "Google, second quarter of 2021, in CNBC of 2022-04-13"),
  "liquid": (1.2, "a choice: the paper's total power over that of its machines "
             "is 1.156 to 1.308"),
  "mean": (1.57, "Uptime Institute's survey of 2021, in CNBC of 2022-04-13: "
           "the mean of large datacentres"),
}


@dataclasses.dataclass(frozen=True)
class Site:
  """A place with power.

  Attributes:
    name: What it is called.
    power_w: Watts that it can give.
    source: Where the number comes from.
  """

  name: str
  power_w: float
  source: str


_CHOICE = "a choice: no grid operator was asked"
SITES = {site.name: site for site in (
  Site("east", 2.4e9, _CHOICE), Site("west", 2.4e9, _CHOICE),
)}

# Unexpected interruptions of 16,384 GPUs in 54 days, by their cause.
INTERRUPTIONS = {
  "faulty GPU": 148, "GPU memory": 72, "software": 54,
  "network switch or cable": 35, "host maintenance": 32, "GPU SRAM": 19,
  "GPU system processor": 17, "network adapter": 7, "NCCL watchdog": 7,
  "silent corruption": 6, "GPU temperature": 6, "others": 16,
}
INTERRUPTED_GPUS, INTERRUPTED_HOURS = 16_384, 54 * 24
INTERRUPTIONS_SOURCE = (
  "The Llama 3 Herd of Models (arXiv 2407.21783), table 5, reported: the total "
  "and the largest causes were read in others' copies"
)
NETWORK_CAUSES = ("network switch or cable", "network adapter")
