"""Direct: every rank sends its chunk to every other rank, in one round."""

from parallel.schedules.schedule import Schedule, Transfer
from parallel.topology.graph import Topology


def gather(topology: Topology) -> Schedule:
  """Builds the all-gather of one round.

  Args:
    topology: The network that the schedule runs on.
  """
  n = topology.num_ranks
  # In the order of distances. A link that sends one message at a time sends in
  # this order, so no destination is first for all ranks at once.
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
