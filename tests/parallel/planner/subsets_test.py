"""Plans that leave out devices which cost more than they add."""

import dataclasses
import itertools

import numpy as np
import pytest

from parallel.hardware import link_matrix
from parallel.hardware.clusters import CLUSTERS
from parallel.planner import plan, subsets
from tests.parallel.planner.plan_test import CHOICES, _even, _problem

QUICK = dataclasses.replace(CHOICES, schedules=("1f1b",), schemes=("ddp",))


def _with_slow(size, rates):
  """Returns equal devices, of which some have slow links; ``{device: rate}``"""
  links = _even(size, 25e9, 1e-5)
  bandwidth = links.bandwidth.copy()
  for device, rate in rates.items():
    bandwidth[device] = np.minimum(bandwidth[device], rate)
    bandwidth[:, device] = np.minimum(bandwidth[:, device], rate)
  return dataclasses.replace(links, bandwidth=bandwidth)


def _seconds(problem, devices):
  part = dataclasses.replace(problem, links=problem.links.part(devices))
  try:
    return plan.plan(part, QUICK, count=1, ordered=3).best[0].latency.total
  except ValueError:
    return np.inf


@pytest.mark.parametrize("rates", [
  {2: 2e7}, {0: 2e7, 5: 5e8}, {1: 4e9, 2: 4e9}, {},
], ids=str)
def test_plan_is_the_best_of_all_subsets_of_devices(rates):
  problem = _problem(_with_slow(6, rates))
  found = subsets.search(problem, QUICK, least=3, count=1, ordered=3)
  every = {
    devices: _seconds(problem, devices)
    for size in range(3, 7)
    for devices in itertools.combinations(range(6), size)
  }
  assert found.seconds == pytest.approx(min(every.values()), rel=1e-9)
  assert every[found.devices] == pytest.approx(found.seconds, rel=1e-9)
  assert {*found.devices, *found.left_out} == {*range(6)}
  if found.left_out:
    assert found.whole_s == pytest.approx(every[*range(6),])
  if min(rates.values(), default=1e9) < 1e9:
    # The device that costs most is named first.
    assert found.left_out[0] == min(rates, key=rates.get)


def test_number_without_a_configuration_uses_fewer_devices():
  """The model has 8 layers and heads, the batch 64: 11 divides none."""
  problem = _problem(_even(11))
  with pytest.raises(ValueError, match="no configuration of 11 devices"):
    plan.plan(problem, QUICK)
  found = subsets.search(problem, QUICK, count=1, ordered=1)
  assert found.whole_s is None
  assert found.left_out == tuple(range(10, len(found.devices) - 1, -1))
  assert found.seconds == min(
    _seconds(problem, range(size)) for size in range(6, 11)
  )
  with pytest.raises(ValueError, match="no configuration of 11 devices"):
    subsets.search(problem, QUICK, least=11)


def test_equal_devices_are_all_used():
  found = subsets.search(_problem(_even(8)), QUICK, count=1, ordered=1)
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


@pytest.mark.parametrize(("n", "num_slow", "expected"), [
  (12, 1, range(1, 7)), (12, 0, []), (64, 1, range(1, 9)),
  (64, 3, range(1, 9)), (100, 2, range(1, 5)), (64, 17, range(9, 25)),
])
def test_large_clusters_are_reduced_to_a_round_number(n, num_slow, expected):
  assert list(subsets._numbers(n, n // 2, num_slow, False)) == [*expected]
