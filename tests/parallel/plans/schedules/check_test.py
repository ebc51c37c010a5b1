"""Proof of schedules: each fault is refused, and its place is named."""

import dataclasses
import itertools

import pytest

from parallel.plans.schedules.builders import build
from parallel.plans.schedules.check import check
from parallel.plans.schedules.schedule import COLLECTIVES, Schedule, Transfer
from parallel.plans.topology import builders as t
from parallel.plans.topology.graph import Link, Topology


def transfer(source, destination, operation="copy", chunk=0, path=None):
  ends = (source, destination)
  return Transfer(*ends, chunk, operation, ends if path is None else path)


def reduced(*rounds, n=2, chunks=1):
  return Schedule("sums", "all_reduce", n, chunks, rounds)


def gathered(*rounds, n=2, owners=(0, 1), chunks=None):
  chunks = len(owners) if chunks is None else chunks
  return Schedule("slices", "all_gather", n, chunks, rounds, owners)


UP, DOWN = transfer(0, 1, "reduce"), transfer(1, 0)
THERE, BACK = transfer(0, 1), transfer(1, 0, chunk=1)


def test_correct_schedules_are_accepted():
  for net in (None, t.ring(2)):
    check(reduced((UP,), (DOWN,)), net)
    check(gathered((THERE, BACK)), net)
  check(reduced(n=1))
  check(dataclasses.replace(
    gathered((transfer(1, 0, "reduce"), transfer(0, 1, "reduce", 1))),
    collective="reduce_scatter",
  ))


def test_sums_of_one_round_commute():
  """Several reductions reach one copy, and copies may replace partial sums."""
  up = tuple(transfer(rank, 0, "reduce") for rank in (1, 2))
  check(reduced(up, tuple(transfer(0, rank) for rank in (1, 2)), n=3))


LACKS = "after {} rounds chunk {} at rank {} lacks the summands of ranks {}"
ALONE = "a copy allows no other transfer to its chunk in the same round"


@pytest.mark.parametrize(("schedule", "message"), [
  (reduced(n=0), "num_ranks=0 and num_chunks=1 must be at least 1"),
  (reduced(chunks=0), "num_ranks=2 and num_chunks=0 must be at least 1"),
  (dataclasses.replace(reduced(), owners=(0,)),
   "chunks of an all-reduce must have no owners"),
  *((gathered(owners=owners, chunks=chunks),
     "every rank must own an equal share of the "
     f"{chunks} chunks, got {counts}")
    for owners, chunks, counts in (
      ((0, 0), 2, {0: 2}), ((0, 1), 3, {0: 1, 1: 1}), ((0,), 2, {0: 1}),
      ((0, 1, 1), 3, {0: 1, 1: 2}), ((0, 2), 2, {0: 1, 2: 1}),
      ((1, 0, 0, 1), 2, {0: 2, 1: 2}), ((), 2, {}),
    )),
])
def test_wrong_sizes_are_refused(schedule, message):
  with pytest.raises(ValueError) as error:
    check(schedule)
  assert str(error.value) == f"{schedule.name}: {message}"


@pytest.mark.parametrize(("schedule", "place", "message"), [
  *((reduced((UP,), (wrong,)), 0, "ranks must differ, and lie in [0, 2)")
    for wrong in (
      transfer(0, 2), transfer(2, 0), transfer(0, -1), transfer(-1, 0),
      transfer(1, 1),
    )),
  *((reduced((UP,), (transfer(1, 0, chunk=chunk),)), 0,
     "its chunk must lie in [0, 1)")
    for chunk in (-1, 1)),
  (reduced((UP,), (transfer(1, 0, "add"),)), 0,
   "its operation must be reduce or copy"),
  *((reduced((UP,), (transfer(1, 0, path=path),)), 0,
     f"its path is {path}; it must lead from the source to the destination")
    for path in ((), (1,), (0, 1), (1, 0, 1), (0, 0))),
  (gathered((THERE,), (transfer(0, 1, chunk=1),)), 0,
   "the source must hold the chunk, but has no copy of it"),
  (reduced((transfer(2, 1, "reduce"),),
           (transfer(0, 1, "reduce"), transfer(2, 1)), n=3), 1, ALONE),
  (reduced((transfer(2, 1, "reduce"),), (transfer(1, 0), UP), n=3), 0,
   "the copy would lose the summands of ranks 0"),
  (gathered((THERE, BACK), (THERE, THERE)), 1, ALONE),
  (gathered((THERE, BACK), (THERE, UP)), 1, ALONE),
  (reduced((UP,), (UP,)), 0, "the summands of ranks 0 would count twice"),
  (reduced((UP,), (transfer(0, 1),)), 0,
   "the copy would lose the summands of ranks 1"),
])
def test_wrong_transfer_is_named(schedule, place, message):
  with pytest.raises(ValueError) as error:
    check(schedule)
  x = schedule.rounds[1][place]
  assert str(error.value) == (
    f"{schedule.name}, {schedule.collective}: round 1, transfer {place} "
    f"({x.operation} of chunk {x.chunk}, rank {x.source} to {x.destination}): "
    f"{message}"
  )


@pytest.mark.parametrize(("schedule", "message"), [
  (reduced((UP,)), LACKS.format(1, 0, 0, 1)),
  (gathered((BACK,)), LACKS.format(1, 0, 1, "0, 1")),
  (dataclasses.replace(gathered((UP,)), collective="reduce_scatter"),
   LACKS.format(1, 0, 0, 1)),
  (reduced(n=9), LACKS.format(0, 0, 0, "1, 2, 3, 4, 5, 6, 7, 8")),
  (reduced(n=10), LACKS.format(0, 0, 0, "1, 2, 3, 4, 5, 6, 7, 8 ...")),
  (reduced((UP,), (), (DOWN,)), "round 1 of 3 has no transfer"),
  (reduced((UP,), (DOWN,), ()), "round 2 of 3 has no transfer"),
])
def test_incomplete_schedule_is_refused(schedule, message):
  with pytest.raises(ValueError) as error:
    check(schedule)
  assert str(error.value) == (
    f"{schedule.name}, {schedule.collective}: {message}"
  )


def test_collective_and_number_of_ranks_are_checked():
  schedule = reduced((UP,), (DOWN,))
  with pytest.raises(ValueError, match="sums has 2 ranks, but topology ring 3"):
    check(schedule, t.ring(3))
  with pytest.raises(ValueError, match="sums: collective='gather' must be one"):
    check(dataclasses.replace(schedule, collective="gather"))


def test_paths_follow_links():
  net = t.ring(3).without((1, 0))
  down = tuple(transfer(0, rank) for rank in (1, 2))
  for path, fits in (((1, 2, 0), True), ((1, 0), False)):
    up = transfer(2, 0, "reduce"), transfer(1, 0, "reduce", path=path)
    schedule = reduced(up, down, n=3)
    check(schedule)
    if fits:
      check(schedule, net)
      continue
    with pytest.raises(ValueError, match=(
      r"round 0, transfer 1 \(.*\): ring 3 without 1 links has no link from 1 "
      "to 0$"
    )):
      check(schedule, net)


def test_claimed_capacity_grows_with_the_bandwidth_of_a_link():
  """Both ranks send two chunks at once, one of them over a link twice as fast.
  """
  net = Topology("pair", 2, 0, (Link(0, 1, 2.0), Link(1, 0, 1.0)))
  transfers = tuple(
    transfer(rank, 1 - rank, chunk=2 * rank + part)
    for rank in range(2) for part in range(2)
  )
  schedule = gathered(transfers, owners=(0, 0, 1, 1))
  for capacity in (None, 2):
    check(dataclasses.replace(schedule, link_capacity=capacity), net)
  claim = dataclasses.replace(schedule, link_capacity=1)
  check(claim)
  with pytest.raises(ValueError, match=(
    r"round 0, transfer 2 \(.*\): 2 chunks share the link from 1 to 0, which "
    "has room for 1$"
  )):
    check(claim, net)


@pytest.mark.parametrize("name", ["ring", "bucket", "multitree", "swing"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_transfer_is_needed(name, collective):
  net = t.torus((2, 2))
  schedule = build(name, net, collective)
  check(schedule, net)
  merged = tuple(itertools.chain(*schedule.rounds))
  faults = [schedule.rounds[:-1], (merged,)]
  for number, transfers in enumerate(schedule.rounds):
    faults += [
      (*schedule.rounds[:number], (*transfers[:i], *transfers[i + 1:]),
       *schedule.rounds[number + 1:])
      for i in range(len(transfers))
    ]
  for rounds in faults:
    with pytest.raises(ValueError, match=f"{name}, {collective}: "):
      check(dataclasses.replace(schedule, rounds=rounds), net)


def test_two_chunks_do_not_fit_one_link():
  topology = t.switch(3)
  schedule = dataclasses.replace(
    build("direct", topology, "all_gather"), link_capacity=1
  )
  with pytest.raises(ValueError, match=r"round 0.*share the link.* for 1"):
    check(schedule, topology)
