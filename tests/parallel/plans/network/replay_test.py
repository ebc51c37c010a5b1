"""Replayed execution traces: order, waiting and times."""

import pytest

from parallel.plans.network import replay
from parallel.plans.network.chakra import Node

SECONDS = replay.make_ring_timer(1e9)


def compute(seconds, after=()):
  return Node("compute", "c", after, 0, seconds=seconds)


def test_collective_waits_for_all_of_its_ranks():
  total = Node("all_reduce", "a", (0,), 8 * 10**9, ranks=(0, 1))
  found = replay.replay([
    [compute(1.0), total, compute(1.0, (1,))],
    [compute(2.0), total, compute(0.5, (1,))],
  ], SECONDS)
  # 2 seconds, then twice half of the bytes, then 1 second.
  assert found.finish_s == pytest.approx(2 + 8 + 1)
  assert found.communicating_s == pytest.approx((8, 8))


def test_independent_nodes_overlap():
  gather = Node("all_gather", "a", (), 10**9, ranks=(0, 1))
  other = Node("all_to_all", "b", (), 10**9, ranks=(0, 1))
  trace = [gather, other, compute(3.0), compute(1.0, (0, 2))]
  found = replay.replay([trace, trace], SECONDS)
  assert found.finish_s == pytest.approx(4.0)
  assert found.communicating_s == pytest.approx((1, 1))


def test_message_has_two_ends():
  sent = Node("send", "p", (0,), 10**9, ranks=(0, 1), tag=1)
  received = sent._replace(kind="receive", after=())
  found = replay.replay([[compute(1.0), sent], [received]], SECONDS)
  assert found.finish_s == pytest.approx(2.0)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ring_sends_the_bytes_of_the_closed_form(ranks):
  size = 24 * 10**6
  for kind, factor in (
    ("all_reduce", 2 * (ranks - 1) / ranks),
    ("all_gather", ranks - 1),
    ("reduce_scatter", (ranks - 1) / ranks),
    ("all_to_all", (ranks - 1) / ranks),
    ("broadcast", 1), ("send", 1),
  ):
    assert SECONDS(kind, size, ranks) == pytest.approx(factor * size / 1e9)
  assert SECONDS("all_reduce", 1, ranks) == pytest.approx(2 * (ranks - 1) / 1e9)
  late = replay.make_ring_timer(1e9, latency_s=1.0)
  assert late("all_gather", 1, ranks) == pytest.approx(ranks - 1, rel=1e-6)
  assert late("all_to_all", 1, ranks) == pytest.approx(ranks - 1, rel=1e-6)


@pytest.mark.parametrize(("traces", "message"), [
  ([[Node("all_reduce", "a", (), 8, ranks=(0, 1))], []],
   r"a: ranks \[1\] do not take part"),
  ([[Node("all_reduce", "a", (), 8, ranks=(0, 1))],
    [Node("all_reduce", "a", (), 4, ranks=(0, 1))]], "must agree in kind and"),
  ([[Node("all_reduce", "a", (), 8, ranks=(0, 1))],
    [Node("all_gather", "a", (), 8, ranks=(0, 1))]], "must agree in kind and"),
  ([[compute(1.0, (1,)), compute(1.0, (0,))]], "2 executions can never"),
])
def test_traces_that_do_not_fit_are_refused(traces, message):
  with pytest.raises(ValueError, match=message):
    replay.replay(traces, SECONDS)


def test_messages_of_a_pair_are_matched_by_their_tags():
  """The second one is awaited first, and arrives before the first is sent."""
  sent = [
    Node("send", "p", (0,), 10**9 * (3 - tag), ranks=(0, 1),
         tag=tag) for tag in (1, 2)
  ]
  late, early = sent[0], sent[1]._replace(after=())
  found = replay.replay([
    [compute(9.0), late, early],
    [x._replace(kind="receive", after=()) for x in (early, late)],
  ], SECONDS)
  assert found.finish_s == pytest.approx(9 + 2)
  assert found.communicating_s == pytest.approx((3, 3))
