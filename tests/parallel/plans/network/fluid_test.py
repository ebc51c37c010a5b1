"""Fluid flows: max-min fairness, slow start, and conservation of bytes."""

import math

from hypothesis import given
from hypothesis import strategies as st
import pytest

from parallel.plans.network import fluid

LINKS = "abc"
PATHS = st.lists(
  st.builds(
    fluid.Path,
    st.lists(st.sampled_from(LINKS), min_size=1, unique=True).map(tuple),
    st.sampled_from([1.0, 2.5, 7.0, math.inf]),
    st.sampled_from([0.0, 0.5]),
  ), min_size=1, max_size=6,
)
CAPACITIES = st.fixed_dictionaries(
  dict.fromkeys(LINKS, st.sampled_from([1.0, 3.0, 10.0]))
)


def loads(paths, rates):
  return {
    link: sum(r for p, r in zip(paths, rates, strict=True) if link in p.links)
    for link in LINKS
  }


@given(PATHS, CAPACITIES)
def test_rates_are_max_min_fair(paths, capacities):
  """A rate is its flow's largest, or highest on a link that is full."""
  rates = fluid.max_min(paths, capacities)
  used = loads(paths, rates)
  assert all(used[k] <= capacities[k] * (1 + 1e-9) for k in LINKS)
  for path, rate in zip(paths, rates, strict=True):
    assert 0 < rate <= path.most
    assert rate == path.most or any(
      used[link] >= capacities[link] * (1 - 1e-9) and rate >= max(
        r for p, r in zip(paths, rates, strict=True) if link in p.links
      ) * (1 - 1e-9)
      for link in path.links
    )


@given(st.integers(0, 8), st.integers(2, 5), st.floats(1, 2))
def test_flows_arrive_at_any_time_of_a_long_run(exponent, number, factor):
  """Rounding of times leaves a few bytes, which cause no endless loop."""
  count = 0

  def discipline(paths, capacities):
    nonlocal count
    count += 1
    assert count < 1_000
    return fluid.max_min(paths, capacities)

  start = factor * 10.0**exponent
  network = fluid.Network({"a": 1e7}, discipline)
  for i in range(number):
    path = fluid.Path(("a",), math.inf, 0.004)
    network.start(start + 0.001 * factor * i, i, path, 3e5 + i)
  found = network.run()
  assert set(found) == set(range(number))
  assert max(found.values()) == pytest.approx(
    start + number * 3e5 / 1e7, abs=0.08
  )


@given(
  PATHS, CAPACITIES, st.lists(st.integers(1, 30), min_size=6, max_size=6)
)
def test_all_flows_arrive_and_no_link_is_exceeded(paths, capacities, sizes):
  network = fluid.Network(capacities, window=2.0)
  for i, path in enumerate(paths):
    network.start(0.25 * i, i, path, sizes[i])
  found = network.run()
  assert set(found) == set(range(len(paths)))
  for i, path in enumerate(paths):
    least = min(path.most, *(capacities[k] for k in path.links))
    sent_s = found[i] - 0.25 * i - path.rtt_s / 2
    assert sent_s >= sizes[i] / least * (1 - 1e-6) - 1e-6
  for link, capacity in capacities.items():
    mine = [i for i, p in enumerate(paths) if link in p.links]
    if mine:
      assert max(found[i] for i in mine) >= (
        sum(sizes[i] for i in mine) / capacity - 1e-6
      )


def test_slow_start_in_closed_form():
  """Windows of 1, 2 and 4 s at the full rate, one per round trip of 3 s."""
  network = fluid.Network({"a": 1.0}, window=1.0)
  network.start(1.0, "flow", fluid.Path(("a",), rtt_s=3.0), 20.0)
  # The third window lasts longer than a round trip, and no other limits it:
  # 3 bytes in 6 s, then 17 at the full rate, and half a round trip.
  assert network.run() == {"flow": pytest.approx(1 + 6 + 17 + 1.5)}
  short = fluid.Network({"a": 1.0}, window=1.0)
  short.start(0.0, "flow", fluid.Path(("a",), rtt_s=3.0), 1.0)
  assert short.run() == {"flow": pytest.approx(2.5)}


def test_rates_change_when_a_flow_starts_ends_or_is_cancelled():
  network = fluid.Network({"a": 2.0})
  network.start(0.0, "first", fluid.Path(("a",)), 6.0)
  network.start(1.0, "second", fluid.Path(("a",)), 10.0)
  network.start(1.0, "third", fluid.Path(("a",), most=0.5), 10.0)
  assert network.advance(1.0) == []
  network.cancel(3.0, "third")  # after 2 + 2 x 0.75 bytes of the first
  # 2.5 bytes are left of the first, 8.5 of the second.
  assert network.run() == pytest.approx({"first": 5.5, "second": 8.5})


def test_a_cancelled_flow_whose_bytes_are_under_way_does_not_arrive():
  network = fluid.Network({"a": 2.0})
  for key in ("first", "second"):
    network.start(0.0, key, fluid.Path(("a",), rtt_s=10.0), 2.0)
  assert network.advance(3.0) == []  # all sent at 2.0
  network.cancel(3.0, "first")
  assert network.run() == pytest.approx({"second": 7.0})
