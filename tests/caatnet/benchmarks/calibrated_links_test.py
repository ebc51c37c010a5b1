"""Sums over shaped links: their draws, model and fit."""

import numpy as np
import pytest

from caatnet.benchmarks.elastic import calibrated_links, ring_orders
from caatnet.benchmarks.elastic.calibrated_links import Rates, Sum
from caatnet.config.schema.benchmarks.swarms import CalibratedLinks
from configs.benchmark import calibration as config_of
from parallel.elastic.ring.times import Matrix
from tests.caatnet.benchmarks import unavailable

OPTIONS = CalibratedLinks()


def test_draws_repeat_and_cover_orders_peers_and_links():
  some = [calibrated_links.drawn(i, OPTIONS) for i in range(120)]
  assert some == [calibrated_links.drawn(i, OPTIONS) for i in range(120)]
  assert {each.links for each in some} == {1, 2, 3, 4, 5, 6}
  assert {(each.order, len(each.peers)) for each in some} == {
    (order, count) for order in ("direct", "ring") for count in (2, 3, 4)
  }
  for each in some:
    assert len({*each.peers}) == len(each.peers)
    assert 100_000 <= each.nbytes <= 4_000_000
    assert each.nbytes % 4 == 0


def test_a_sum_of_two_takes_its_bytes_and_three_delays():
  """Both send halves, then sums of halves, after they have opened the sum."""
  links = Matrix(np.full((3, 3), 1e6), np.full((3, 3), 0.25))
  links.rates[0, :] = links.rates[:, 0] = 1.0  # of the peer that is left out
  for order in ("direct", "ring"):
    each = Sum(0, order, (2, 1), 2_000_000, 1 << 20)
    found = calibrated_links.predicted_s(each, links, Rates(1.0, 0.0, 0.0))
    assert found == pytest.approx(2.75)
    # Half of the rate, 1 us per byte, and 0.1 s more for both messages.
    found = calibrated_links.predicted_s(each, links, Rates(0.5, 1e-6, 0.1))
    assert found == pytest.approx(4 + 2 + 0.75 + 0.2)


def test_fit_returns_the_rates_of_sums_that_follow_the_model():
  true = Rates(0.93, 3e-9, 4e-4)
  matrices = {seed: ring_orders.drawn(seed, OPTIONS) for seed in (0, 1)}
  fitted = [Sum(0, *given) for given in OPTIONS.fitted]
  found = calibrated_links.fit(
    [
      (each, [calibrated_links.predicted_s(each, matrices[0], true) * x
              for x in (0.9, 1.0, 1.3)])
      for each in fitted
    ], matrices,
  )
  assert found == pytest.approx(true, rel=1e-3)
  # Sums over other links follow.
  other = Sum(1, "ring", (3, 0, 2, 1), 700_000, 1 << 18)
  assert calibrated_links.predicted_s(
    other, matrices[1], found
  ) == pytest.approx(calibrated_links.predicted_s(other, matrices[1], true),
                     rel=1e-3)


def test_small_benchmark_measures_all_sums(capsys):
  config = config_of.get_config("links")
  config.benchmark.update({
    "peers": 3, "links": 1, "held_out": 1, "tested": 2, "rounds": 2,
    "delays_ms": (0.5,), "kilobytes": (20.0, 50.0),
    "fitted": (("direct", (0, 1), 80_000, 1 << 16),
               ("ring", (0, 1, 2), 20_000, 1 << 16)),
  })
  try:
    found = calibrated_links.run(config)
  except ValueError as error:
    unavailable.skip(error)
  assert [len(row["blocks_s"]) for row in found["rows"]] == [2, 2]
  assert found["summary"]["tested"] == 2
  assert len(found["residuals"]) == 1
  for row in found["rows"]:
    assert row["measured_s"] >= 0.0015  # three delays
  printed = capsys.readouterr().out
  assert "2 configurations: error of the median" in printed
  assert "fitted: payload" in printed


def test_mistakes_name_their_key():
  config = config_of.get_config("links")
  config.benchmark.peers = 3
  with pytest.raises(ValueError, match=r"fitted=.* peers below .*peers=3$"):
    calibrated_links.run(config)
