"""Policy: everything on the host is in local DRAM, whether it fits or not."""

from parallel.plans.placement import greedy
from parallel.plans.placement.costs import Placement
from parallel.plans.placement.problem import Problem


def place(problem: Problem) -> Placement:
  """Returns the placement; `costs.Cost.missing` has the bytes in excess.

  Raises:
    ValueError: The host has no DRAM tier.
  """
  dram = greedy.tiers(problem, "dram")
  if not dram:
    raise ValueError(
      f"host {problem.host.name!r} must have a tier of kind dram"
    )
  room, host, ways = greedy.zero_offload_layout(problem)
  for key, tensor in host:
    size = room.fill(key, tensor, dram, tensor.size_bytes)
    room.put(key, tensor, dram[-1], size)
  return Placement(ways, room.tiers)
