"""Policy: DRAM for tensors that the CPU accesses, other tiers for the rest.

Source: CXL-aware allocation (arXiv 2507.03305). Tensors are placed in
descending order of the bytes that the CPU reads and writes per byte of the
tensor. Tensors that the CPU accesses fill DRAM. Bytes for which DRAM has no
room, and tensors that only the device accesses (by DMA), are striped over the
CXL cards in proportion to their bandwidth. Deviation: files are used like
cards.
"""

from parallel.plans.placement import greedy
from parallel.plans.placement.costs import Placement
from parallel.plans.placement.problem import Problem


def place(problem: Problem) -> Placement:
  """Returns the placement; without CXL cards and files, all is in DRAM."""
  room, host, ways = greedy.zero_offload_layout(problem)
  dram = greedy.tiers(problem, "dram")
  cards = {
    name: problem.host.tier(name).read.value
    for name in greedy.tiers(problem, "cxl", "file")
  }
  left = []
  for key, tensor in sorted(host, key=lambda item: -item[1].cpu_bytes_per_byte):
    size = tensor.size_bytes
    if tensor.cpu_bytes_per_byte:
      size = room.fill(key, tensor, dram, size)
    size = room.stripe(key, tensor, cards, size)
    left.append((key, tensor, room.fill(key, tensor, dram, size)))
  return greedy.finish(room, ways, left)
