"""Policy: the largest tensors first, each on the fastest tier with room."""

from parallel.plans.placement import greedy
from parallel.plans.placement.costs import Placement
from parallel.plans.placement.problem import Problem


def place(problem: Problem) -> Placement:
  """Returns the placement; what does not fit on a tier is on the next one."""
  room, host, ways = greedy.zero_offload_layout(problem)
  left = []
  for key, tensor in sorted(host, key=lambda item: -item[1].size_bytes):
    size = room.fill(
      key, tensor, greedy.tiers(problem), tensor.size_bytes
    )
    left.append((key, tensor, size))
  return greedy.finish(room, ways, left)
