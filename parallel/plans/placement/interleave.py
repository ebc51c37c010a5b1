"""Policy: pages of all tensors alternate between all NUMA nodes.

This is what ``numactl --interleave=all`` does for a process. A node that is
full gets no more pages.
"""

from parallel.plans.placement import greedy
from parallel.plans.placement.costs import Placement
from parallel.plans.placement.problem import Problem


def place(problem: Problem) -> Placement:
  """Returns the placement; tensors are allocated in the order of the problem.

  Raises:
    ValueError: The host has files only.
  """
  nodes = greedy.tiers(problem, "dram", "cxl")
  if not nodes:
    raise ValueError(
      f"host {problem.host.name!r} has only tiers of kind file; it must have a "
      "NUMA node"
    )
  room, host, ways = greedy.zero_offload_layout(problem)
  left = [
    (key, tensor, room.stripe(
      key, tensor, dict.fromkeys(nodes, 1.0), tensor.size_bytes
    ))
    for key, tensor in host
  ]
  return greedy.finish(room, ways, left)
