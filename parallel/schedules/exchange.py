"""Recursive exchanges: partners swap halves, quarters, ... in log2 n rounds.

A chunk's reduce-scatter is told by who a rank's partner is in each round. With
B(r, s) the chunks that end at ranks that r still reaches from round s on,

    B(r, log2 n) = {r}      B(r, s) = B(r, s + 1) + B(partner(r, s), s + 1)

and in round s rank r sends B(partner(r, s), s + 1). Halving-doubling: Thakur,
Rabenseifner and Gropp, IJHPCA 19, 2005. HDRM: its ranks mapped onto a BiGraph,
Dong et al., "EFLOPS", HPCA 2020. Swing: De Sensi et al., NSDI 2024, arXiv
2401.09356, here for powers of two only; the mirrored exchanges that use all
ports of a torus are as recalled from that paper.
"""

from collections.abc import Callable, Sequence
import math

from parallel.schedules.schedule import Schedule, Transfer
from parallel.topology import Topology

Partner = Callable[[int, int], int]  # (rank, round) -> rank


def halving_doubling(topology: Topology) -> Schedule:
  """Round s: rank XOR 2^s; the largest messages go to the nearest ranks."""
  ranks = list(range(topology.num_ranks))
  return _gather("halving_doubling", topology, [_flip], ranks)


def hdrm(topology: Topology) -> Schedule:
  """Halving-doubling whose every exchange crosses a BiGraph."""
  if topology.num_switches == 0 or len(topology.shape) != 2:
    raise ValueError(
      f"hdrm: {topology.name} is not a BiGraph (or one with failed links)"
    )
  return _gather("hdrm", topology, [_flip], bigraph_places(*topology.shape))


def _flip(rank: int, number: int) -> int:
  return rank ^ 1 << number


def bigraph_places(ranks_per_switch: int, switches: int) -> list[int]:
  """HDRM's mapping: of each rank, its node.

  Ranks of even popcount go to upper switches, odd ones to lower switches, so
  that flipping a bit crosses. Ranks j s to j s + s - 1 take port j; the upper
  ones are rotated left by (s / 2 - j) mod s / 2.
  """
  half = switches // 2
  places = [0] * (ranks_per_switch * switches)
  for port in range(ranks_per_switch):
    group = range(port * switches, (port + 1) * switches)
    upper = [rank for rank in group if rank.bit_count() % 2 == 0]
    lower = [rank for rank in group if rank.bit_count() % 2]
    turn = (half - port) % half
    for switch, rank in enumerate(upper[turn:] + upper[:turn] + lower):
      places[rank] = switch * ranks_per_switch + port
  return places


def swing(topology: Topology) -> Schedule:
  """Partners at distances 1, 1, 3, 5, 11, ... of a ring, dim after dim.

  Every rotation of the dims and both mirror images take an equal share of the
  data, so that all ports of a torus are used.
  """
  if topology.num_switches or not topology.shape:
    raise ValueError(
      f"swing: {topology.name} is not a ring, torus or mesh without failures"
    )
  dims = [i for i, size in enumerate(topology.shape) if size > 1] or [0]
  partners = [
    _swing_partner(topology.shape, dims[first:] + dims[:first], mirror)
    for first in range(len(dims))
    for mirror in (1, -1)
  ]
  ranks = list(range(topology.num_ranks))
  return _gather("swing", topology, partners, ranks)


def _swing_partner(
  shape: Sequence[int], order: Sequence[int], mirror: int
) -> Partner:
  strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
  turns = []  # (dim, which of its rounds), as long as a dim has rounds left
  for step in range(max(shape).bit_length()):
    turns += [(dim, step) for dim in order if 2 << step <= shape[dim]]

  def partner(rank: int, number: int) -> int:
    dim, step = turns[number]
    size, stride = shape[dim], strides[dim]
    place = rank // stride % size
    distance = mirror * (1 - (-2) ** (step + 1)) // 3
    there = place + (distance if place % 2 == 0 else -distance)
    return rank + (there % size - place) * stride

  return partner


def _gather(
  name: str,
  topology: Topology,
  partners: Sequence[Partner],
  places: Sequence[int],
) -> Schedule:
  """The all-gather: the reduce-scatter's exchanges, last one first.

  Args:
    name: Of the schedule.
    topology: Its number of ranks is a power of two.
    partners: One exchange each, for equal shares of the data.
    places: Of each rank of the exchange, the rank of the topology.
  """
  n = topology.num_ranks
  if n & (n - 1):  # n is one if and only if all dims of a grid are
    raise ValueError(
      f"{name}: {topology.name} has {n} ranks, not a power of two"
    )
  num_rounds = n.bit_length() - 1
  parts = len(partners)
  rounds: list[list[Transfer]] = [[] for _ in range(num_rounds)]
  for part, partner in enumerate(partners):
    blocks = [[rank] for rank in range(n)]  # B(r, s + 1)
    for step in reversed(range(num_rounds)):
      there = [partner(rank, step) for rank in range(n)]
      for rank in range(n):
        source, destination = places[rank], places[there[rank]]
        path = topology.shortest_path(source, destination)
        rounds[num_rounds - 1 - step] += [
          Transfer(
            source, destination, places[block] * parts + part, "copy", path
          )
          for block in blocks[rank]
        ]
      blocks = [blocks[rank] + blocks[there[rank]] for rank in range(n)]
  owners = tuple(rank for rank in range(n) for _ in range(parts))
  return Schedule(
    name, "all_gather", n, n * parts, tuple(map(tuple, rounds)), owners
  )
