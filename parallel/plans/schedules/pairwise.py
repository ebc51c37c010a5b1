"""Pairwise exchange schedules: recursive halving and doubling in log2 n rounds.

A partner function, partner(r, s), gives the rank with which rank r exchanges
chunks in round s. It defines the whole reduce-scatter. Let B(r, s) be the
chunks whose owners r can still reach in rounds s, s + 1, ... Then

    B(r, log2 n) = {r}      B(r, s) = B(r, s + 1) + B(partner(r, s), s + 1)

and in round s rank r sends its partial sums of B(partner(r, s), s + 1).

Sources: halving-doubling is the all-reduce of Thakur, Rabenseifner and Gropp,
IJHPCA 19, 2005, with the distances of MPICH. HDRM maps its ranks onto a
BiGraph: Dong et al., "EFLOPS", HPCA 2020; that text was not available, and the
mapping is the one in MultiTree's simulator (farabimahmud/accelerator). Swing is
from De Sensi et al., NSDI 2024, arXiv 2401.09356; it is limited here to powers
of two. The mirrored exchanges, which use all ports of a torus, are those of its
authors' code (HLC-Lab/bine_trees_fugaku).
"""

from collections.abc import Callable, Sequence
import math

from parallel.plans.schedules.schedule import Schedule, Transfer
from parallel.plans.topology.graph import Topology

# (rank, round of the reduce-scatter) -> rank that it exchanges with
Partner = Callable[[int, int], int]


def halving_doubling(topology: Topology) -> Schedule:
  """Builds the all-gather in which rank r's partner in round s is r XOR 2^s.

  The largest messages, those of round 0 of the reduce-scatter, go to the ranks
  with the nearest numbers.

  Args:
    topology: Network that the schedule runs on.

  Returns:
    For n ranks, an all-gather of n chunks in log2 n rounds.

  Raises:
    ValueError: The number of ranks is not a power of two.
  """
  ranks = list(range(topology.num_ranks))
  return _gather("halving_doubling", topology, [_flip_bit], ranks)


def hdrm(topology: Topology) -> Schedule:
  """Builds halving-doubling in which every exchange crosses a BiGraph.

  Each exchange is between an upper and a lower switch, so that its path has one
  link between switches.

  Args:
    topology: A BiGraph.

  Returns:
    For n ranks, an all-gather of n chunks in log2 n rounds.

  Raises:
    ValueError: The topology is not a BiGraph, has failed links, or its number
      of ranks is not a power of two.
  """
  if topology.num_switches == 0 or len(topology.shape) != 2:
    raise ValueError(
      f"hdrm: {topology.name} is not a BiGraph (or one with failed links)"
    )
  return _gather("hdrm", topology, [_flip_bit], bigraph_places(*topology.shape))


def _flip_bit(rank: int, number: int) -> int:
  """Flips bit ``number`` of a rank: the partner in halving-doubling."""
  return rank ^ 1 << number


def bigraph_places(ranks_per_switch: int, switches: int) -> list[int]:
  """Returns HDRM's mapping: for each rank of the exchange, its node.

  Ranks with an even number of one bits are at upper switches, the others at
  lower switches. Partners differ in one bit, so each exchange is between an
  upper and a lower switch. With s switches, ranks j s to j s + s - 1 are at
  port j of the switches, and those at upper switches are rotated left by (s / 2
  - j) mod (s / 2) switches.

  Args:
    ranks_per_switch: Number of ranks at each switch.
    switches: Number of switches, s; even.
  """
  half = switches // 2
  places = [0] * (ranks_per_switch * switches)
  for port in range(ranks_per_switch):
    group = range(port * switches, (port + 1) * switches)
    upper = [rank for rank in group if rank.bit_count() % 2 == 0]
    lower = [rank for rank in group if rank.bit_count() % 2]
    # Without this rotation, the ranks at one upper switch would have all their
    # partners at one lower switch, and share the link between the two.
    turn = (half - port) % half
    for switch, rank in enumerate(upper[turn:] + upper[:turn] + lower):
      places[rank] = switch * ranks_per_switch + port
  return places


def swing(topology: Topology) -> Schedule:
  """Builds Swing: partners at distances 1, 1, 3, 5, 11, ... along a ring.

  On grids, successive rounds use successive dims, cyclically. The data are
  split equally over all rotations of the dims and their mirror images, so that
  all ports of a torus are used.

  Args:
    topology: Ring, torus or mesh.

  Returns:
    For n ranks, an all-gather of 2 n chunks per dim of more than one rank, in
    log2 n rounds.

  Raises:
    ValueError: The topology is not a ring, torus or mesh, has failed links, or
      a dim is not a power of two.
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
  """Returns Swing's partner function on a grid.

  Args:
    shape: Sizes of the grid's dims.
    order: Order of the dims in successive rounds.
    mirror: 1, or -1 for the mirror image.
  """
  strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
  # (dim, round within the dim) of each round. A dim of 2^k ranks has k rounds
  # and is skipped afterwards.
  turns = []
  for step in range(max(shape).bit_length()):
    turns += [(dim, step) for dim in order if 2 << step <= shape[dim]]

  def partner(rank: int, number: int) -> int:
    dim, step = turns[number]
    size, stride = shape[dim], strides[dim]
    place = rank // stride % size
    # 1, -1, 3, -5, 11, ...: the sum 1 - 2 + 4 - ... of step + 1 terms. All are
    # odd, so ranks at even places are paired with ranks at odd places. Ranks at
    # odd places use the opposite sign. Hence partner(partner(r)) = r.
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
  """Builds the all-gather: the reduce-scatter's exchanges, last round first.

  Args:
    name: Name of the schedule.
    topology: Network; its number of ranks must be a power of two.
    partners: Partner functions. Each is used for an equal part of the data.
    places: For each rank of the exchange, its rank in the topology.

  Raises:
    ValueError: The number of ranks is not a power of two.
  """
  n = topology.num_ranks
  # A product is a power of two only if all its factors are. So this also checks
  # the single dims of Swing.
  if n & (n - 1):
    raise ValueError(
      f"{name}: {topology.name} has {n} ranks, not a power of two"
    )
  num_rounds = n.bit_length() - 1
  parts = len(partners)
  rounds: list[list[Transfer]] = [[] for _ in range(num_rounds)]
  for part, partner in enumerate(partners):
    # blocks[r] is B(r, step + 1) of the module's docstring: the chunks whose
    # owners r can still reach in the rounds after `step`.
    blocks = [[rank] for rank in range(n)]
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
