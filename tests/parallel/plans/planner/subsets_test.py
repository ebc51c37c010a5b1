"""Plans that leave out devices which cost more than they add."""

import dataclasses
import itertools

import numpy as np
import pytest

from parallel.plans.hardware import link_matrix
from parallel.plans.hardware.clusters import CLUSTERS
from parallel.plans.planner import plan, subsets
from tests.parallel.plans.planner.plan_test import CHOICES, _even, _problem

QUICK = dataclasses.replace(CHOICES, schedules=("1f1b",), schemes=("ddp",))
QUICKER = dataclasses.replace(QUICK, remats=("none",), max_microbatches=4)


def _with_slow(size, rates):
  """Returns equal devices, of which some have slow links; ``{device: rate}``"""
  links = _even(size, 25e9, 1e-5)
  bandwidth = links.bandwidth.copy()
  for device, rate in rates.items():
    bandwidth[device] = np.minimum(bandwidth[device], rate)
    bandwidth[:, device] = np.minimum(bandwidth[:, device], rate)
  return dataclasses.replace(links, bandwidth=bandwidth)


def _seconds(problem, devices, choices=QUICK, ordered=3):
  part = dataclasses.replace(problem, links=problem.links.part(devices))
  try:
    found = plan.plan(part, choices, count=1, ordered=ordered)
  except ValueError:
    return np.inf
  return found.best[0].latency.total


def _every(problem, least):
  """Returns the seconds of all subsets of ``least`` devices or more."""
  n = problem.links.num_devices
  return {
    devices: _seconds(problem, devices) for size in range(least, n + 1)
    for devices in itertools.combinations(range(n), size)
  }


@pytest.mark.parametrize("rates", [
  {2: 2e7}, {0: 2e7, 5: 5e8}, {1: 4e9, 2: 4e9}, {},
], ids=str)
def test_plan_is_the_best_of_all_subsets_of_devices(rates):
  problem = _problem(_with_slow(6, rates))
  found = subsets.search(problem, QUICK, least=3, count=1, ordered=3)
  every = _every(problem, 3)
  assert found.seconds == pytest.approx(min(every.values()), rel=1e-9)
  assert every[found.devices] == pytest.approx(found.seconds, rel=1e-9)
  assert {*found.devices, *found.left_out} == {*range(6)}
  if found.left_out:
    assert found.whole_s == pytest.approx(every[*range(6),])
  if min(rates.values(), default=1e9) < 1e9:
    # The device that costs most is named first.
    assert found.left_out[0] == min(rates, key=rates.get)


@pytest.mark.parametrize("slowdowns", [
  {2: 3.0}, {0: 1.1}, {1: 2.0, 4: 5.0}, {0: 4.0, 1: 4.0, 2: 4.0, 3: 4.0},
], ids=str)
def test_slow_devices_are_left_out_if_they_cost_more_than_they_add(slowdowns):
  problem = _problem(
    link_matrix.slow_down_devices(_even(6, 25e9, 1e-5), slowdowns)
  )
  found = subsets.search(problem, QUICK, least=2, count=1, ordered=3)
  least_s = min(_every(problem, 2).values())
  assert found.seconds == pytest.approx(least_s, rel=1e-9)
  if max(slowdowns.values()) > 2:
    assert found.left_out[0] in slowdowns


def _drawn(seed):
  """Returns 12 devices, in one or three nodes, and the one or two slow ones."""
  rng = np.random.default_rng(seed)
  links = _even(12, 25e9, 1e-5)
  nodes = np.arange(12) // (4 if seed % 2 else 12)
  bandwidth = np.where(nodes[:, None] == nodes, 2e11, 25e9)
  slow = rng.choice(12, 1 + seed // 2 % 2, replace=False).tolist()
  for device in slow:
    rate = np.exp(rng.uniform(np.log(2e7), np.log(2e10)))
    bandwidth[device] = np.minimum(bandwidth[device], rate)
    bandwidth[:, device] = np.minimum(bandwidth[:, device], rate)
  return dataclasses.replace(
    links, nodes=tuple(nodes.tolist()), bandwidth=bandwidth
  ), slow


def _different(links, slow, least):
  """Returns subsets that differ in more than the names of equal devices."""
  found = {}
  for size in range(least, links.num_devices + 1):
    for devices in itertools.combinations(range(links.num_devices), size):
      nodes = {}
      for device in devices:
        name = device if device in slow else -1
        nodes.setdefault(links.nodes[device], []).append(name)
      found.setdefault(str(sorted(map(sorted, nodes.values()))), devices)
  return list(found.values())


@pytest.mark.rotated(10)  # 6 s each
@pytest.mark.parametrize("seed", range(20))
def test_plan_is_no_worse_than_subsets_of_a_random_cluster(seed):
  """All subsets without slow devices, and up to 16 of the others."""
  links, slow = _drawn(seed)
  problem = _problem(links)
  found = subsets.search(problem, QUICKER, least=8, count=1, ordered=1)
  every = _different(links, slow, 8)
  others = [x for x in every if {*slow} & {*x}]
  drawn = np.random.default_rng(seed).permutation(len(others))[:16]
  some = [x for x in every if x not in others] + [others[i] for i in drawn]
  best_s = min(_seconds(problem, x, QUICKER, ordered=1) for x in some)
  assert found.seconds <= best_s * (1 + 1e-9)


def test_number_without_a_configuration_uses_fewer_devices():
  """The model has 8 layers and heads, the batch 64: 11 divides none."""
  problem = _problem(_even(11))
  with pytest.raises(ValueError, match="no configuration of 11 devices"):
    plan.plan(problem, QUICK)
  lines = []
  found = subsets.search(
    problem, QUICK, count=1, ordered=1, started=lines.append
  )
  # Each number of devices that was tried is announced, and the last plan.
  assert lines[1:3] == [
    f"smaller cluster {i} of at most 5: {11 - i} devices" for i in (1, 2)
  ]
  assert lines[-1] == f"searching plans on {len(found.devices)} devices"
  assert found.whole_s is None
  assert found.left_out == tuple(range(10, len(found.devices) - 1, -1))
  assert found.seconds == min(
    _seconds(problem, range(size)) for size in range(6, 11)
  )
  with pytest.raises(ValueError, match="no configuration of 11 devices"):
    subsets.search(problem, QUICK, least=11)


def test_equal_devices_are_all_used():
  lines = []
  found = subsets.search(
    _problem(_even(8)), QUICK, count=1, ordered=1, started=lines.append
  )
  assert lines == ["searching plans on all 8 devices"]
  assert found.devices == tuple(range(8))
  assert (found.left_out, found.whole_s) == ((), None)


def test_slow_devices_are_removed_first_then_the_last_ones():
  links = link_matrix.of_cluster(CLUSTERS["a100"], 2)
  slow = links.bandwidth.copy()
  slow[9, :] /= 10
  slow[:, 3] /= 20
  links = dataclasses.replace(links, bandwidth=slow)
  order, num_slow = subsets.removals(links, 12)
  assert (order, num_slow) == ((3, 9, 15, 14), 2)


def test_nodes_keep_multiples_of_a_group():
  """Nodes of 4 devices with one slow device in two of them: 3, 4 and 3."""
  links = _with_slow(12, {1: 5e9, 8: 1e9})
  links = dataclasses.replace(links, nodes=(0,) * 4 + (1,) * 4 + (2,) * 4)
  order, num_slow = subsets.removals(links, 6)
  assert (order[:2], num_slow) == ((8, 1), 2)
  pairs, whole = subsets._node_aligned_orders(links, order, num_slow)
  assert pairs == (8, 1, 11, 3, 10, 9)  # 2, 4 and 2, then 2 and 4
  assert whole == (8, 1, 11, 10, 9, 3)  # 3 and 4, then 2 and 4


@pytest.mark.parametrize(("n", "num_slow", "expected"), [
  (12, 1, range(1, 7)), (12, 0, []), (64, 1, range(1, 9)),
  (64, 3, range(1, 9)), (100, 2, range(1, 5)), (64, 17, range(9, 25)),
])
def test_large_clusters_are_reduced_to_a_round_number(n, num_slow, expected):
  assert list(
    subsets._removal_counts(n, n // 2, num_slow, False)
  ) == [*expected]


def test_all_or_the_fast_devices_are_left_or_a_round_number_of_them():
  assert subsets._removal_counts_by_kind(1000, 504 + 8, 496) == [8, 496, 504]
  assert subsets._removal_counts_by_kind(20, 15, 7) == [4, 7, 12]
  assert subsets._removal_counts_by_kind(6, 4, 2) == [1, 2, 3, 4]


@pytest.mark.parametrize("searches", [0, 1, 4, 1000])
def test_search_without_time_keeps_the_best_so_far(searches):
  """One device is slow: with enough time, it is left out."""
  problem = _problem(_with_slow(8, {2: 2e7}))
  left = [searches]

  def has_time():
    left[0] -= 1
    return left[0] >= 0

  found = subsets.search(problem, QUICK, count=1, ordered=3, has_time=has_time)
  full = subsets.search(problem, QUICK, count=1, ordered=3)
  skipped = found.plan.skipped + found.skipped
  assert (skipped > 0) == (searches < 1000)
  assert found.seconds >= full.seconds
  assert found.devices == (full.devices if searches == 1000 else (*range(8),))
  # What the default order of all devices takes is known without a search.
  assert found.seconds <= plan.plan(problem, QUICK, count=1).front[0].own_s
