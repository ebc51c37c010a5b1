"""Properties of prediction intervals."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st
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


@given(
  st.lists(st.floats(-1, 1), min_size=19, max_size=40), st.floats(0, 3),
  st.floats(0, 3),
)
def test_wider_intervals_contain_the_others(residuals, first, second):
  inner = conformal.interval(2.0, residuals, wider=first)
  outer = conformal.interval(2.0, residuals, wider=first + second)
  assert outer.low <= inner.low <= inner.median <= inner.high <= outer.high
  assert outer.median == inner.median
  low, _, high = conformal.interval(2.0, residuals, wider=math.inf)
  assert (low, high) == (0, math.inf)


PROGRAMS = st.lists(
  st.fixed_dictionaries({
    "ranks": st.integers(1, 8), "scheme": st.sampled_from(["ddp", "zero3"]),
  }), min_size=1, max_size=30,
)


@given(PROGRAMS, st.integers(-9, 9))
def test_family_contains_its_programs_and_nothing_beyond(programs, ranks):
  family = conformal.values_by_key(programs)
  assert all(conformal.find_extrapolations(family, p) == [] for p in programs)
  seen = [p["ranks"] for p in programs]
  inside = conformal.find_extrapolations(
    family, programs[0] | {"ranks": ranks}
  ) == []
  assert inside == (min(seen) <= ranks <= max(seen))
  assert len(
    conformal.find_extrapolations(family, {"ranks": 99, "scheme": "zero9"})
  ) == 2
  # keys that it does not have
  assert len(conformal.find_extrapolations(family, {})) == 2
  assert conformal.find_extrapolations({}, programs[0]) != []


@pytest.mark.parametrize("shift", [0.0, 0.3, -0.3])
def test_widening_is_what_a_left_out_group_needs(shift):
  """The group of 8 ranks is shifted; without a shift little is needed."""
  rng = np.random.default_rng(0)
  programs = [{"ranks": r, "only": 1} for r in (1, 2, 4, 8) for _ in range(50)]
  residuals = rng.uniform(-0.1, 0.1, 200) + shift * (np.arange(200) >= 150)
  wider = conformal.widening(programs, residuals)
  assert wider == pytest.approx(abs(shift), abs=0.02)
  others = conformal.interval(1.0, residuals[:150], wider=wider)
  inside = [math.exp(r) in others for r in residuals[150:]]
  assert np.mean(inside) >= 0.9
  assert conformal.widening(programs[:20], residuals[:20]) == math.inf
  assert conformal.widening(programs[40:60], residuals[:20]) == math.inf


def test_coverage_that_is_no_probability_is_refused():
  with pytest.raises(ValueError, match=r"coverage=1\.5 must lie in \[0, 1\]"):
    conformal.interval(1.0, [0.0], 1.5)


def test_an_interval_is_widened_for_all_but_a_tenth_of_a_group():
  """The next one is among the first 28 of 30 in 28 of 31 cases."""
  programs = [{"k": 1}] * 30 + [{"k": 2}] * 40
  residuals = [0.0] * 27 + [5.0] * 3 + [0.0] * 40
  assert conformal.widening(programs, residuals, 0.9) == 5.0
