"""Tail latencies with intervals."""

import math

import numpy as np
import pytest

from caatnet.studies.serving import tails


def test_tail_has_a_curve():
  found = tails.summary([np.arange(1.0, 10_002.0)], seed=3)
  assert (found["n"], found["requests"]) == (10_001, 1)
  assert found["curve"][0] == 1  # all samples exceed the least
  assert found["curve"][10] == pytest.approx(9001)  # a tenth of them
  assert found["curve"][-1] == pytest.approx(10_000)
  assert len(found["curve"]) == 41
  empty = tails.summary([np.zeros(0)])
  assert (empty["n"], empty["requests"], empty["curve"]) == (0, 0, [])
  assert empty["99.9"] == [None] * 3
  assert tails.summary([np.zeros(0), np.ones(2)])["requests"] == 1


def test_intervals_of_tails_have_their_level():
  """Compares with quantiles of a binomial count, for 400 requests."""
  found = tails.summary([np.array([float(i)]) for i in range(400)])
  _, low, high = found["50"]
  spread = 1.96 * math.sqrt(400 / 4)
  assert low == pytest.approx(200 - spread, abs=7)
  assert high == pytest.approx(200 + spread, abs=7)
  again = tails.summary([np.array([float(i)]) for i in range(400)], seed=1)
  assert again["50"] != found["50"]
  assert again["curve"] == found["curve"]


def test_fairness_does_not_depend_on_the_unit():
  values = np.array([3.0, 1.0, 0.0])
  found = tails.jain(values)
  assert 1 / 3 < found < 1
  for unit in (1e-300, 1e-3, 1e300):
    assert tails.jain(unit * values) == pytest.approx(found)
    assert tails.jain(np.full(3, unit)) == pytest.approx(1)
  assert tails.jain(np.zeros(3)) == 1
