"""Properties of prediction intervals."""

import itertools
import math

import numpy as np
import pytest

from parallel.ledger import conformal


def coverage(draw, count, seeds=300, tested=100, **given):
  """Returns the mean share of intervals that contain the time, over seeds."""
  shares = []
  for seed in range(seeds):
    rng = np.random.default_rng(seed)
    residuals, errors = draw(rng, count), draw(rng, tested)
    interval = conformal.interval(3.0, residuals, **given)
    shares.append(np.mean([3.0 * math.exp(e) in interval for e in errors]))
  return float(np.mean(shares))


DISTRIBUTIONS = {
  "normal": lambda rng, n: rng.normal(0.1, 0.05, n),
  "skewed": lambda rng, n: rng.exponential(0.2, n),
  "heavy": lambda rng, n: np.clip(rng.standard_cauchy(n), -50, 50),
  "two kinds": lambda rng, n: rng.choice([-0.2, 0.3], n) + rng.normal(0, 0.01,
                                                                      n),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_intervals_contain_90_of_100_new_times(name):
  """Whatever the distribution is; 20 residuals cover 19 / 21 in the mean."""
  assert 0.84 < coverage(DISTRIBUTIONS[name], 20) < 0.96
  assert coverage(DISTRIBUTIONS[name], 20) == pytest.approx(19 / 21, abs=0.015)
  assert coverage(DISTRIBUTIONS[name], 200) == pytest.approx(0.9, abs=0.015)


def test_smaller_coverage_gives_shorter_intervals():
  draw = DISTRIBUTIONS["skewed"]
  assert coverage(draw, 99, coverage=0.5) == pytest.approx(0.5, abs=0.02)
  residuals = draw(np.random.default_rng(0), 99)
  ends = [conformal.interval(1.0, residuals, c) for c in (0.5, 0.8, 0.9)]
  for inner, outer in itertools.pairwise(ends):
    assert outer.low < inner.low < inner.median < inner.high < outer.high


@pytest.mark.parametrize(("count", "finite"), [
  (0, False), (1, False), (18, False), (19, True), (20, True),
])
def test_too_few_residuals_give_an_infinite_interval(count, finite):
  residuals = np.linspace(-0.1, 0.1, count)
  low, median, high = conformal.interval(2.0, residuals)
  assert (low > 0, high < math.inf) == (finite, finite)
  assert low <= median <= high
  if not count:
    assert median == 2.0


def test_interval_is_relative_and_does_not_depend_on_the_order():
  residuals = np.random.default_rng(0).normal(size=25)
  one = conformal.interval(1.0, residuals)
  ten = conformal.interval(10.0, residuals[::-1])
  np.testing.assert_allclose(ten, 10 * np.array(one))
  assert one.median == pytest.approx(math.exp(np.median(residuals)))


def test_coverage_that_is_no_probability_is_refused():
  with pytest.raises(ValueError, match=r"coverage=1\.5 must lie in \[0, 1\]"):
    conformal.interval(1.0, [0.0], 1.5)
