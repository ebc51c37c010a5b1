"""Direct schedule: each rank sends its chunk to all others in one round."""

from parallel.plans.schedules.schedule import Schedule, Transfer
from parallel.plans.topology.graph import Topology


def gather(topology: Topology) -> Schedule:
  """Builds the all-gather of one round.

  Args:
    topology: Network that the schedule runs on.

  Returns:
    For n ranks, an all-gather of n chunks and n (n - 1) transfers.
  """
  n = topology.num_ranks
  # Sorted by distance: a link that sends one message at a time uses this order,
  # so that not all ranks send to the same destination first.
  transfers = []
  for distance in range(1, n):
    for source in range(n):
      there = (source + distance) % n
      path = topology.shortest_path(source, there)
      transfers.append(Transfer(source, there, source, "copy", path))
  # Each ordered pair has one transfer, so if every path is a single link, no
  # link carries two chunks.
  full = all(len(t.path) == 2 for t in transfers)
  return Schedule(
    "direct", "all_gather", n, n, (tuple(transfers),) if transfers else (),
    tuple(range(n)), link_capacity=1 if full else None,
  )
