"""Pipelined schedules: placement and time, computed again from definitions."""

import collections
import itertools

import pytest

from parallel.plans.network import simulate
from parallel.plans.network.routed import on_links
from parallel.plans.schedules.builders import build
from parallel.plans.schedules.check import check
from parallel.plans.schedules.pipeline import pipelined
from parallel.plans.schedules.schedule import COLLECTIVES, Schedule, Transfer
from parallel.plans.topology import builders as t
from tests import pairwise

NETS = {
  "ring": t.ring(8), "torus": t.torus((4, 4)), "switch": t.switch(8),
  "tree": t.leaf_spine(2, 2, 4),
}
TABLE = pairwise.rows(
  {
    "name": ("double_tree", "multitree", "halving_doubling"),
    "net": tuple(NETS), "collective": COLLECTIVES, "pieces": (2, 3, 5),
    "capacity": (None, 2),
  },
)


def in_order(schedule, pieces):
  """Returns the transfers of each piece in turn."""
  return [
    x._replace(chunk=x.chunk * pieces + piece) for piece in range(pieces)
    for transfers in schedule.rounds for x in transfers
  ]


def earliest_rounds(transfers, room):
  """Returns the round of each transfer: the earliest that is possible.

  Compares each transfer with all transfers before it. A round reads the values
  from before it; sums commute, and a copy replaces what was there.
  """
  numbers, loads = [], collections.Counter()
  for i, x in enumerate(transfers):
    number = 0
    for earlier, at in zip(transfers[:i], numbers, strict=True):
      if earlier.chunk != x.chunk:
        continue
      if earlier.destination == x.source:  # it must have arrived
        number = max(number, at + 1)
      if earlier.source == x.destination:  # not before it is read
        number = max(number, at)
      if earlier.destination == x.destination and x.operation == "copy":
        number = max(number, at + 1)
    way = list(itertools.pairwise(x.path))
    while any(loads[pair, number] >= room[pair] for pair in way):
      number += 1
    loads.update((pair, number) for pair in way)
    numbers.append(number)
  return numbers


def barrier_s(rounds, net, chunk):
  """Returns the sum over rounds of the slowest path, in seconds."""
  links = {(link.source, link.destination): link for link in net.links}
  total = 0.0
  for transfers in rounds:
    load = collections.Counter(
      pair for x in transfers for pair in itertools.pairwise(x.path)
    )
    total += max(
      sum(links[pair].latency_s for pair in itertools.pairwise(x.path))
      + max(load[pair] * chunk / links[pair].bandwidth
            for pair in itertools.pairwise(x.path))
      for x in transfers
    )
  return total


@pytest.mark.parametrize("row", TABLE, ids=pairwise.label)
def test_each_piece_moves_in_the_earliest_round(row):
  net, pieces = NETS[row["net"]], row["pieces"]
  whole = build(row["name"], net, row["collective"])
  found = pipelined(whole, net, pieces, row["capacity"])
  check(found, net)
  transfers = in_order(whole, pieces)
  room = net.link_capacities(found.link_capacity)
  expected = collections.Counter(
    zip(earliest_rounds(transfers, room), transfers, strict=True)
  )
  assert collections.Counter(
    (number, x) for number, moved in enumerate(found.rounds) for x in moved
  ) == expected
  rounds = [[] for _ in range(1 + max(n for n, _ in expected))]
  for (number, x), count in expected.items():
    rounds[number] += [x] * count
  chunk = 2**16
  assert simulate.lockstep(
    on_links(found, net), chunk * found.num_chunks
  ) == pytest.approx(barrier_s(rounds, net, chunk))


@pytest.mark.parametrize("pieces", [2, 8, 32])
@pytest.mark.parametrize("leaves", [1, 3])
def test_pipelined_trees_take_depth_and_pieces(leaves, pieces):
  """Chains of 4 ranks into one root: d + k - 1 rounds in, as many out.

  Sums from several chains arrive in the same round; copies leave in the same
  round. Waits of sums for sums would take a multiple of this.
  """
  n = 1 + 3 * leaves
  net = t.fully_connected(n, bandwidth=1e9, latency_s=1e-6)
  steps = [
    [(1 + 3 * leaf + place, 3 * leaf + place if place else 0)
     for leaf in range(leaves)] for place in (2, 1, 0)
  ]
  down = [
    tuple(Transfer(a, b, 0, "reduce", (a, b)) for a, b in pairs)
    for pairs in steps
  ]
  up = [
    tuple(Transfer(b, a, 0, "copy", (b, a)) for a, b in pairs)
    for pairs in reversed(steps)
  ]
  tree = Schedule("tree", "all_reduce", n, 1, (*down, *up))
  check(tree, net)
  found = pipelined(tree, net, pieces, 1)
  # A piece leaves the root in the round after it has arrived.
  assert len(found.rounds) == 6 + pieces - 1
  size = 2**20
  piece_s = 1e-6 + size / pieces / 1e9
  assert simulate.lockstep(on_links(found, net), size) == pytest.approx(
    (6 + pieces - 1) * piece_s
  )
  # Links pass each piece on as soon as it has arrived.
  events = simulate.events(on_links(found, net), size)
  assert events.finish_ns == pytest.approx(
    1e9 * (6 * piece_s + (pieces - 1) * (piece_s - 1e-6)), abs=6 * pieces
  )


def test_a_given_capacity_replaces_that_of_the_schedule():
  net = t.torus((3, 3))
  whole = build("multitree", net, "all_gather")
  usual, wide = (pipelined(whole, net, 4, n) for n in (None, 2))
  assert (usual.link_capacity, wide.link_capacity) == (1, 2)
  check(wide, net)
  assert len(wide.rounds) < 0.6 * len(usual.rounds)
