"""Links between devices as plain data, with the source of every constant.

Bandwidths are bytes per second in one direction, with 1 GB = 10^9 bytes;
vendors' bidirectional figures are halved. A latency is None if no source gives
one.

Example:
  >>> from parallel.plans.hardware.links import KINDS
  >>> KINDS["nvlink_4"].bandwidth / 1e9  # GB/s per GPU and direction
  450.0
  >>> round(KINDS["wide_area_10g"].latency_s * 1e3, 1)  # ms
  27.3
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class LinkKind:
  """Kind of link between devices, such as NVLink 4.

  Attributes:
    name: Name in printed tables.
    bandwidth: Bytes per second and direction of one link.
    latency_s: Seconds from sender to receiver; None if not published.
    source: Source of the numbers.
    confidence: "published", or "range" if the source gives a range, of which
      ``bandwidth`` is the lower end.
  """

  name: str
  bandwidth: float
  latency_s: float | None
  source: str
  confidence: str = "published"


_TPU_DOCS = "Google Cloud TPU documentation, https://docs.cloud.google.com/tpu"

# Google's bandwidth of a TPU's inter-chip interconnect (ICI) is the sum over
# all ports of a chip and both directions, so it is divided by 2 and by the
# number of ports. The v4 paper gives the bandwidth of one link.
ICI_V4 = LinkKind(
  "ICI v4", 50e9, None, "Jouppi et al., arXiv 2304.01433, table 4: six links "
  "of 50 GB/s per chip"
)
# Divided by two directions and four ports.
ICI_V5E = LinkKind(
  "ICI v5e", 400e9 / 2 / 4, None, f"{_TPU_DOCS}/docs/v5e: 400 GB/s per chip "
  "both ways, 4 ports"
)
ICI_V5P = LinkKind(
  "ICI v5p", 1200e9 / 2 / 6, None, f"{_TPU_DOCS}/docs/v5p: 1,200 GB/s per chip "
  "both ways; 3D torus, so 6 ports"
)
ICI_V6E = LinkKind(
  "ICI v6e", 800e9 / 2 / 4, None, f"{_TPU_DOCS}/docs/v6e: 800 GB/s per chip "
  "both ways, 4 ports"
)
ICI_7X = LinkKind(
  "ICI 7x", 1200e9 / 2 / 6, None, f"{_TPU_DOCS}/docs/tpu7x: 1,200 GB/s per "
  "chip both ways; 3D torus, so 6 ports"
)

# NVLink: bandwidth of all links of a GPU together, in one direction.
NVLINK_2 = LinkKind(
  "NVLink 2", 300e9 / 2, None, "NVIDIA V100 datasheet: 300 GB/s per GPU both "
  "ways (all six links together)"
)
NVLINK_3 = LinkKind(
  "NVLink 3", 600e9 / 2, None, "NVIDIA A100 datasheet: 600 GB/s per GPU both "
  "ways (all links together, through NVSwitch)"
)
NVLINK_4 = LinkKind(
  "NVLink 4", 900e9 / 2, None, "NVIDIA H100 and H200 datasheets: 900 GB/s per "
  "GPU both ways (all links together, through NVSwitch)"
)
NVLINK_5 = LinkKind(
  "NVLink 5", 1800e9 / 2, None, "NVIDIA DGX B200 datasheet: 14.4 TB/s over 8 "
  "GPUs both ways"
)
# Transfer rate x lanes / 8 bytes per second, times 128 / 130 for the 128b/130b
# line code.
PCIE_4 = LinkKind(
  "PCIe 4.0 x16", 16e9 * 16 / 8 * 128 / 130, None, "PCI Express 4.0: 16 GT/s, "
  "16 lanes, 128b/130b"
)
PCIE_5 = LinkKind(
  "PCIe 5.0 x16", 32e9 * 16 / 8 * 128 / 130, None, "PCI Express 5.0: 32 GT/s, "
  "16 lanes, 128b/130b"
)
# InfiniBand: data rate of one adapter, converted from bits to bytes.
INFINIBAND_EDR = LinkKind(
  "InfiniBand EDR", 100e9 / 8, None, "InfiniBand Trade Association roadmap: "
  "EDR of four lanes, 100 Gb/s"
)
INFINIBAND_HDR = LinkKind(
  "InfiniBand HDR", 200e9 / 8, None, "NVIDIA DGX A100 datasheet: 200 Gb/s per "
  "adapter, one per GPU"
)
INFINIBAND_NDR = LinkKind(
  "InfiniBand NDR", 400e9 / 8, None, "NVIDIA DGX H100, H200 and B200 "
  "datasheets: 400 Gb/s per adapter, one per GPU"
)

_FRONTIER_GUIDE = (
  "Frontier user guide, https://docs.olcf.ornl.gov/systems/"
  "frontier_user_guide.html"
)
FABRIC_GCD_PAIR = LinkKind(
  "Infinity Fabric, GCD pair", 200e9, None,
  f"{_FRONTIER_GUIDE}: 200 GB/s each way "
  "between the two GCDs of an MI250X"
)
FABRIC_NODE = LinkKind(
  "Infinity Fabric, node", 50e9, None,
  f"{_FRONTIER_GUIDE}: 50 to 100 GB/s each way "
  "between GCDs of different MI250X; the lower one", "range"
)
FABRIC_HOST = LinkKind(
  "Infinity Fabric, host", 36e9, None,
  f"{_FRONTIER_GUIDE}: 36 GB/s each way between "
  "a GCD and the CPU"
)
SLINGSHOT_11 = LinkKind(
  "Slingshot 11", 200e9 / 8, None,
  f"{_FRONTIER_GUIDE}: four 200 Gb/s adapters per "
  "node of eight GCDs"
)

# Slow links, for studies of training across sites. Rates are the standards'
# nominal ones, not measured.
ETHERNET_1G = LinkKind("Ethernet 1G", 1e9 / 8, None, "IEEE 802.3ab line rate")
ETHERNET_10G = LinkKind(
  "Ethernet 10G", 10e9 / 8, None, "IEEE 802.3ae line rate"
)
ETHERNET_100G = LinkKind(
  "Ethernet 100G", 1e11 / 8, None, "IEEE 802.3ba line rate"
)
# Latency: propagation in fibre along the great circle.
WIDE_AREA_10G = LinkKind(
  "10G, New York to London", 10e9 / 8, 5.57e6 * 1.468 / 2.998e8,
  "IEEE 802.3ae line rate; latency: 5,570 km at c / 1.468 (group index of "
  "ITU-T G.652 fibre), without routers"
)
LTE_UPLINK = LinkKind(
  "LTE category 4 uplink", 50e6 / 8, None, "3GPP TS 36.306: 50 Mb/s peak"
)
WIFI_6 = LinkKind(
  "Wi-Fi 6, 80 MHz, one stream", 600.5e6 / 8, None, "IEEE 802.11ax MCS 11, "
  "0.8 us guard interval: 600.5 Mb/s line rate"
)

# Links by the names that configs use, e.g. "nvlink_4".
KINDS = {
  name.lower(): kind
  for name, kind in list(globals().items())
  if isinstance(kind, LinkKind)
}
