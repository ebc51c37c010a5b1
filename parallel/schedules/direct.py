"""Direct: every rank sends its chunk to every other one, in one round."""

from parallel.schedules.schedule import Schedule, Transfer
from parallel.topology import Topology


def gather(topology: Topology) -> Schedule:
  """The all-gather; a rank's first message goes to the rank after it."""
  n = topology.num_ranks
  transfers = []
  for distance in range(1, n):
    for source in range(n):
      there = (source + distance) % n
      path = topology.shortest_path(source, there)
      transfers.append(Transfer(source, there, source, "copy", path))
  full = all(len(t.path) == 2 for t in transfers)
  return Schedule(
    "direct", "all_gather", n, n, (tuple(transfers),) if transfers else (),
    tuple(range(n)), link_capacity=1 if full else None,
  )
