"""Renumberings of a topology, since schedules depend on the numbers of ranks.

MultiTree grows trees in the order of ranks, and a double tree divides the ranks
in that order, so the same network gives another schedule if its ranks have
other numbers. `parallel.plans.schedules.builders.build` builds on a renumbered
topology and restores the numbers; `caatnet.studies.collectives.chosen` selects
a numbering by the simulated time.

Numbering 0 keeps the numbers. For a grid without switches, the next numberings
transpose it, so that meshes of 3 x 5 and of 5 x 3 have the same set. All other
numberings are random permutations of ranks and of switches.
"""

import dataclasses
import itertools
import math
import random
from typing import NamedTuple

from parallel.base.checks import not_negative
from parallel.plans.schedules.schedule import Schedule, Transfer
from parallel.plans.topology.graph import Link, Topology


class Numbering(NamedTuple):
  """Topology with other numbers of its nodes.

  Attributes:
    topology: The renumbered topology.
    order: ``[node]``: the new number of each node.
  """

  topology: Topology
  order: tuple[int, ...]


def renumber_topology(topology: Topology, number: int) -> Numbering:
  """Returns a topology in the numbering with index ``number``.

  Example:
    >>> from parallel.plans.topology.builders import mesh
    >>> found = renumber_topology(mesh((2, 3)), 1)  # transposed
    >>> found.topology.shape, found.order
    ((3, 2), (0, 2, 4, 1, 3, 5))

  Args:
    topology: Network.
    number: 0 keeps the numbers; the next values transpose a grid; larger values
      are seeds of random permutations.

  Raises:
    ValueError: The number is negative.
  """
  not_negative("numbering", number)
  grids = _transposed(topology)
  if number < len(grids):
    return grids[number]
  # Transposed grids thus have the same random permutations.
  base = min(grids, key=lambda found: found.topology.shape)
  rng = random.Random(number)
  ranks = list(range(topology.num_ranks))
  switches = list(range(topology.num_ranks, topology.num_nodes))
  rng.shuffle(ranks)
  rng.shuffle(switches)
  drawn = ranks + switches
  return Numbering(
    _renumbered(base.topology, tuple(drawn), ()),
    tuple(drawn[node] for node in base.order),
  )


def numberings_to_try(topology: Topology, num_random: int = 0) -> list[int]:
  """Returns indices of numberings to try: transpositions, then random ones.

  They give the same networks for a grid and its transpositions.

  Example:
    >>> from parallel.plans.topology.builders import torus
    >>> sizes = ((4, 4), (3, 5), (5, 3), (2, 2, 4))
    >>> [numberings_to_try(torus(x)) for x in sizes]
    [[0], [0, 1], [1, 0], [0, 1, 2]]

  Args:
    topology: Network.
    num_random: Number of random numberings, in addition to the different
      transpositions of a grid.
  """
  grids = _transposed(topology)
  first = sorted(range(len(grids)), key=lambda i: grids[i].topology.shape)
  return [*first, *range(len(grids), len(grids) + num_random)]


def restore_numbers(schedule: Schedule, order: tuple[int, ...]) -> Schedule:
  """Returns a schedule with the node numbers of the original topology.

  Args:
    schedule: Schedule on a renumbered topology.
    order: ``[node]``: the new number of each node, as in `Numbering`.
  """
  node_of = [0] * len(order)
  for node, number in enumerate(order):
    node_of[number] = node
  # Chunks are renumbered so that each rank owns the chunks that it would own if
  # the builder had used the original numbers.
  own: dict[int, list[int]] = {}
  for chunk, rank in enumerate(schedule.owners):
    own.setdefault(rank, []).append(chunk)
  chunk_of = list(range(schedule.num_chunks))
  for rank, chunks in own.items():
    for chunk, other in zip(chunks, own[node_of[rank]], strict=True):
      chunk_of[chunk] = other
  rounds = tuple(
    tuple(
      Transfer(
        node_of[t.source], node_of[t.destination], chunk_of[t.chunk],
        t.operation, tuple(node_of[node] for node in t.path),
      )
      for t in transfers
    )
    for transfers in schedule.rounds
  )
  return dataclasses.replace(schedule, rounds=rounds)


def _transposed(topology: Topology) -> list[Numbering]:
  """Returns a grid's distinct transpositions; just itself if it is no grid."""
  found = [Numbering(topology, tuple(range(topology.num_nodes)))]
  shape = topology.shape
  if topology.num_switches or math.prod(shape) != topology.num_ranks:
    return found
  seen = {shape}
  for dims in itertools.permutations(range(len(shape))):
    new = tuple(shape[dim] for dim in dims)
    if new in seen:  # dims of equal size were exchanged: the same grid
      continue
    seen.add(new)
    strides = _strides(new)
    order = tuple(
      sum(place[d] * stride for d, stride in zip(dims, strides, strict=True))
      for place in itertools.product(*map(range, shape))
    )
    found.append(Numbering(_renumbered(topology, order, new), order))
  return found


def _strides(shape: tuple[int, ...]) -> list[int]:
  """Returns the row-major stride of each dim."""
  return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _renumbered(
  topology: Topology, order: tuple[int, ...], shape: tuple[int, ...]
) -> Topology:
  """Returns the topology with its nodes renumbered.

  Links are in the order of their sources. Links of one source keep their order;
  in a grid, they are in the order of dims, as in `topology.builders`.

  Args:
    topology: Network.
    order: ``[node]``: the new number of each node.
    shape: Shape of the renumbered grid; () if it is not a grid.
  """
  strides = _strides(shape)

  def place(link: Link) -> tuple[int, ...]:
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
      step = (link.destination // stride - link.source // stride) % size
      if step:
        return link.source, dim, step != size - 1  # backward links first
    return (link.source,)

  links = sorted(
    (
      dataclasses.replace(
        link, source=order[link.source], destination=order[link.destination]
      )
      for link in topology.links
    ),
    key=place,
  )
  return dataclasses.replace(
    topology, links=tuple(links), shape=shape, labels=()
  )
