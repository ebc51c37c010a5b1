"""Schedules of uplinks against sharing, all orders, and searches in slots."""

import functools
import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from caatnet.federated import uplinks
from caatnet.federated.uplinks import Uplink

CAPACITY = 3
# Small integers, which the searches in slots need.
LIMITED = st.lists(
  st.builds(
    Uplink, st.integers(0, 3), st.integers(1, 4), st.integers(1, CAPACITY)
  ), min_size=1, max_size=4,
)
UNLIMITED = LIMITED.map(
  lambda each: [uplink._replace(most=math.inf) for uplink in each]
)


def in_slots(each, deadline):
  """Returns the largest number of uplinks that whole slots can complete."""
  @functools.cache
  def search(time, left):
    if time == deadline:
      return sum(size == 0 for size in left)
    choices = [
      range(min(size, each[k].most) + 1) if each[k].ready_s <= time else (0,)
      for k, size in enumerate(left)
    ]
    return max(
      search(time + 1, tuple(a - b for a, b in zip(left, sent, strict=True)))
      for sent in itertools.product(*choices) if sum(sent) <= CAPACITY
    )

  return search(0, tuple(uplink.size for uplink in each))


@settings(max_examples=40)
@given(UNLIMITED)
def test_without_limits_no_order_ends_earlier(each):
  """All orders that never idle end when sharing does."""
  shared = max(uplinks.fair_sharing_ends_s(each, CAPACITY))
  assert uplinks.earliest_schedule(
    each, CAPACITY
  ).end_s == pytest.approx(shared)
  for order in itertools.permutations(range(len(each))):
    ends = uplinks.group_priority_ends_s(each, CAPACITY, [[k] for k in order])
    assert max(ends) == pytest.approx(shared)


@settings(max_examples=40)
@given(LIMITED)
def test_earliest_end_is_that_of_a_search(each):
  schedule = uplinks.earliest_schedule(each, CAPACITY)
  shared = max(uplinks.fair_sharing_ends_s(each, CAPACITY))
  best, groups = uplinks.best_groups(each, CAPACITY)
  assert schedule.end_s <= best + 1e-6 <= shared + 2e-6
  assert max(uplinks.group_priority_ends_s(each, CAPACITY, groups)) == best
  slots = next(n for n in itertools.count() if in_slots(each, n) == len(each))
  assert math.ceil(schedule.end_s - 1e-6) == slots


@settings(max_examples=40)
@given(LIMITED)
def test_schedule_sends_each_update_within_all_limits(each):
  schedule = uplinks.earliest_schedule(each, CAPACITY)
  sent = [0.0] * len(each)
  for start, end, rates in schedule.intervals:
    assert sum(rates) <= CAPACITY + 1e-6
    for k, rate in enumerate(rates):
      assert -1e-9 <= rate <= each[k].most + 1e-6
      assert rate == 0 or start >= each[k].ready_s
      sent[k] += rate * (end - start)
  assert sent == pytest.approx([uplink.size for uplink in each])
  assert schedule.intervals[-1].end_s == schedule.end_s


@settings(max_examples=40)
@given(LIMITED, st.integers(0, 5))
def test_most_updates_by_a_deadline_are_those_of_a_search(each, deadline):
  chosen = uplinks.select_on_time_clients(each, CAPACITY, deadline)
  assert len(chosen) == in_slots(each, deadline)
  if chosen:
    end_s = uplinks.earliest_schedule([each[k] for k in chosen], CAPACITY).end_s
    assert end_s <= deadline + 1e-6
  shared = uplinks.fair_sharing_ends_s(each, CAPACITY)
  assert len(chosen) >= sum(end <= deadline for end in shared)


def test_sharing_completes_no_update_where_an_order_completes_most():
  each = [Uplink(0.0, 3.0)] * 8
  assert sum(end <= 7.5 for end in uplinks.fair_sharing_ends_s(each, 3.0)) == 0
  assert len(uplinks.select_on_time_clients(each, 3.0, 7.5)) == 7
  ends = uplinks.group_priority_ends_s(each, 3.0, [[k] for k in range(8)])
  assert ends == pytest.approx([1.0 * k for k in range(1, 9)])


def _round_s(order, compute, down, up):
  """End of a round whose models are sent in an order, one after another."""
  return max(uplinks.fair_sharing_ends_s([
    Uplink((i + 1) * down + compute[k], up) for i, k in enumerate(order)
  ], 1.0))


def _shared_round_s(compute, down, up):
  """End of a round whose models share the cell."""
  received_s = len(compute) * down
  return max(uplinks.fair_sharing_ends_s(
    [Uplink(received_s + each, up) for each in compute], 1.0
  ))


@settings(max_examples=40)
@given(
  st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 4),
  st.integers(1, 4), st.randoms(),
)
def test_no_order_of_downlinks_ends_later_than_sharing(
  compute, down, up, draw
):
  order = list(range(len(compute)))
  draw.shuffle(order)
  gain = _shared_round_s(compute, down, up) - _round_s(order, compute, down, up)
  assert -1e-6 < gain < (len(compute) - 1) * down + 1e-6


def test_downlinks_in_order_gain_all_but_one_if_the_cell_stays_busy():
  compute = [4.0] * 8
  assert _round_s(range(8), compute, 1.0, 1.0) == pytest.approx(1 + 4 + 8)
  assert _shared_round_s(compute, 1.0, 1.0) == pytest.approx(8 + 4 + 8)
