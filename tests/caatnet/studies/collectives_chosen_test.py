"""Schedules chosen by message size, compared with the cut bound."""

import pytest

from caatnet.benchmarks.training.schedules import random_graph
from caatnet.studies.collectives import chosen
from caatnet.studies.collectives.chosen import MIN_CHUNK_BYTES, fastest
from parallel.plans.network import simulate
from parallel.plans.network.routed import on_links
from parallel.plans.schedules.builders import build
from parallel.plans.schedules.check import check
from parallel.plans.schedules.optimal.cut_bound import cut_bound
from parallel.plans.topology import builders as t

MIB = 2**20


# Seed 1 has switches, seed 2 failed links. Rounds cannot give unequal links
# exactly their shares, so lockstep takes longer.
@pytest.mark.parametrize(
  ("kind", "seed", "model", "most"),
  [
    ("doubling", 1, "events", 1.05), ("doubling", 2, "events", 1.05),
    ("doubling", 2, "lockstep", 1.1), ("uneven", 1, "events", 1.05),
    ("uneven", 2, "events", 1.05), ("uneven", 2, "lockstep", 1.25),
  ],
)
def test_large_messages_take_little_longer_than_the_cut_bound(
  kind, seed, model, most
):
  net = random_graph(seed, 9, kind)
  bound = 64 * MIB * cut_bound(net).seconds_per_byte
  found = fastest("optimal", net, "all_gather", 64 * MIB, model=model)
  check(found.schedule, net)
  assert 1 <= found.seconds / bound <= most


def test_pieces_compensate_for_depth():
  """64 MiB by events; packed trees in whole chunks take 1.2 times or more."""
  net = t.leaf_spine(4, 4, 4)
  bound = 64 * MIB * cut_bound(net).seconds_per_byte
  whole = on_links(build("optimal", net, "all_gather"), net)
  assert simulate.events(whole, 64 * MIB).finish_ns > 1.2e9 * bound
  assert fastest("optimal", net, "all_gather", 64 * MIB).seconds <= 1.05 * bound


def test_choice_is_no_slower_than_its_candidates():
  net, sizes = t.leaf_spine(2, 2, 4), (2**15, MIB)
  for name in ("ring", "double_tree", "multitree", "optimal"):
    for model in ("events", "barrier", "lockstep"):
      for size in sizes:
        found = fastest(name, net, "all_reduce", size, model=model)
        whole = fastest(name, net, "all_reduce", size, model=model, pieces=1)
        assert whole.pieces == 1
        assert found.seconds <= whole.seconds
        routed = on_links(found.schedule, net)
        if model == "lockstep":
          expected = simulate.lockstep(routed, size)
        else:
          barrier = model == "barrier"
          timeline = simulate.events(routed, size, barrier=barrier)
          expected = timeline.finish_ns / 1e9
        assert found.seconds == expected
        if found.pieces > 1:
          assert size >= found.schedule.num_chunks * MIN_CHUNK_BYTES


@pytest.mark.parametrize("grid", [t.mesh, t.torus])
@pytest.mark.parametrize("name", ["multitree", "double_tree", "optimal"])
def test_time_does_not_depend_on_the_order_of_dims(name, grid):
  """Numbers of ranks determine the schedule, so transpositions are tried."""
  collective, size = "all_reduce", MIB
  nets = [grid(shape) for shape in ((2, 5), (5, 2))]
  first, second = (
    fastest(name, net, collective, size, pieces=1).seconds for net in nets
  )
  plain = [
    fastest(name, net, collective, size, pieces=1, numbering=0).seconds
    for net in nets
  ]
  assert first == second == min(plain)
  if name != "optimal":  # may be equal
    assert max(plain) > min(plain)


def test_random_numberings_are_tried_on_request():
  """A builder that needs the shape of a grid keeps its own numbering."""
  net = t.mesh((4, 4))
  plain, best = (
    fastest("multitree", net, "all_reduce", MIB, pieces=1, random_numberings=n)
    for n in (0, 3)
  )
  assert "numbering" not in plain.options
  assert 1 <= best.options["numbering"] <= 3
  assert best.seconds < 0.95 * plain.seconds
  bucket = fastest(
    "bucket", net, "all_reduce", MIB, pieces=1, random_numberings=3
  )
  assert "numbering" not in bucket.options


def test_large_schedules_are_not_renumbered(monkeypatch):
  net = t.mesh((2, 5))
  renumbered = fastest("multitree", net, "all_reduce", MIB, pieces=1)
  assert renumbered.options == {"numbering": 1}
  most = renumbered.schedule.num_transfers
  monkeypatch.setattr(chosen, "MAX_TRANSFERS", most - 1)
  kept = fastest("multitree", net, "all_reduce", MIB, pieces=1)
  assert kept.options == {}


def test_small_messages_take_few_rounds_and_large_ones_many():
  net = t.torus((4, 4))
  rounds = [
    len(fastest(
      "optimal", net, "all_gather", size, model="lockstep"
    ).schedule.rounds)
    for size in (2**14, 64 * MIB)
  ]
  assert rounds[0] == 4  # the diameter
  assert rounds[1] > 2 * 4


@pytest.mark.parametrize(
  ("seconds", "tried"),
  [
    # The search over 2, 4, 8, ... pieces ends after two steps without a gain.
    ([9, 5, 4.9999, 4, 3, 2], [2, 4, 8, 16, 32, 64]),
    ([9, 5, 4.9999, 4.9998, 1, 1], [2, 4, 8, 16]),
    ([10, 10, 1, 1, 1, 1], [2, 4]),
  ],
)
def test_pieces_are_doubled_until_two_steps_without_gain(seconds, tried):
  net = t.ring(2)
  schedule = build("ring", net, "all_gather")
  after = dict(zip((2, 4, 8, 16, 32, 64), seconds, strict=True))

  def timed(builder, options, pieces, capacity):
    return chosen.ChosenSchedule(
      schedule, builder, options, pieces, after[pieces]
    )

  whole = chosen.ChosenSchedule(schedule, "ring", {}, 1, 10.0)
  found = chosen._try_piece_counts(whole, net, 2**30, "events", timed)
  assert [choice.pieces for choice in found] == tried
