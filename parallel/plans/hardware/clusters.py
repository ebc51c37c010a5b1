"""Clusters of devices as plain data: levels and links.

Every constant has its source.

Example:
  >>> from parallel.plans.hardware.clusters import CLUSTERS
  >>> for level in CLUSTERS["h100"].levels:  # GB/s per device and direction
  ...   print(level.name, level.size, level.link.bandwidth / 1e9)
  node 8 450.0
  cluster 1024 50.0
"""

import dataclasses

from parallel.plans.hardware import devices, links
from parallel.plans.hardware.devices import Device
from parallel.plans.hardware.links import LinkKind


@dataclasses.dataclass(frozen=True)
class Level:
  """Network level of a cluster: groups of devices, and links inside a group.

  Attributes:
    name: Name of a group, such as "node".
    size: Number of groups of the level below in one group. For the innermost
      level, the number of devices.
    link: Kind of link inside a group.
    links_per_device: Number of such links per device; 1/2 if two devices share
      one.
  """

  name: str
  size: int
  link: LinkKind
  links_per_device: float = 1.0


@dataclasses.dataclass(frozen=True)
class Cluster:
  """Cluster of identical devices in nested network levels.

  Attributes:
    name: Key in ``CLUSTERS``.
    device: Type of all devices.
    levels: Network levels, innermost first. A training run may use fewer groups
      than the size of the outermost level.
    source: Source of the structure.
  """

  name: str
  device: Device
  levels: tuple[Level, ...]
  source: str


def _dgx(
  name: str, device: Device, network: LinkKind, datasheet: str
) -> Cluster:
  """Returns a cluster of 8-GPU nodes with one network adapter per GPU."""
  return Cluster(
    name,
    device,
    # NVSwitch inside a node, one network adapter per GPU between nodes.
    (Level("node", 8, device.link), Level("cluster", 1024, network)),
    f"NVIDIA {datasheet} datasheet; 1,024 nodes is a limit of ours",
  )


DGX_A100 = _dgx("a100", devices.A100, links.INFINIBAND_HDR, "DGX A100")
# One level only: the datasheet describes servers without a network.
A100_PCIE = Cluster(
  "a100-pcie",
  devices.A100_PCIE,
  (Level("node", 8, links.PCIE_4),),
  "NVIDIA A100 80GB PCIe datasheet: servers with 1 to 8 GPUs; of a network it "
  "says nothing",
)
DGX_H100 = _dgx("h100", devices.H100, links.INFINIBAND_NDR, "DGX H100")
DGX_H200 = _dgx("h200", devices.H200, links.INFINIBAND_NDR, "DGX H200")
DGX_B200 = _dgx("b200", devices.B200, links.INFINIBAND_NDR, "DGX B200")
FRONTIER = Cluster(
  "frontier",
  devices.MI250X_GCD,
  (
    # Package, node of four packages, system of nodes.
    Level("mi250x", 2, links.FABRIC_GCD_PAIR),
    Level("node", 4, links.FABRIC_NODE),
    # Four adapters per node of eight GCDs: half an adapter per device.
    Level("system", 9408, links.SLINGSHOT_11, 0.5),
  ),
  "Frontier user guide, https://docs.olcf.ornl.gov/systems/"
  "frontier_user_guide.html; 9,408 nodes: Atchley et al., SC 2023",
)

# The two clusters of Pipette (arXiv 2405.18093), from its published code: nodes
# of eight GPUs with InfiniBand EDR and NVLink of 300 GB/s, or HDR and 600 GB/s
# (sum of both directions). The code does not give the number of adapters per
# node: one, which eight concurrently sending devices share, is assumed.
_PIPETTE_SOURCE = (
  "Pipette (arXiv 2405.18093), published code: 16 nodes of 8 {}; one adapter "
  "per node, shared by all of its devices, is an assumption"
)
PIPETTE_V100 = Cluster(
  "pipette-v100",
  devices.V100,
  (
    Level("node", 8, links.NVLINK_2),
    Level("cluster", 16, links.INFINIBAND_EDR, 1 / 8),
  ),
  _PIPETTE_SOURCE.format("V100 with InfiniBand EDR"),
)
PIPETTE_A100 = Cluster(
  "pipette-a100",
  devices.A100,
  (
    Level("node", 8, links.NVLINK_3),
    Level("cluster", 16, links.INFINIBAND_HDR, 1 / 8),
  ),
  _PIPETTE_SOURCE.format("A100 with InfiniBand HDR"),
)

CLUSTERS = {
  c.name: c
  for c in (DGX_A100, A100_PCIE, DGX_H100, DGX_H200, DGX_B200, FRONTIER,
            PIPETTE_V100, PIPETTE_A100)
}
