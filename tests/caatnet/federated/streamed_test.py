"""Times of streamed fragments: compute, links and clients that wait."""

import numpy as np
import pytest

from caatnet.federated import predict
from caatnet.federated.streamed import compute_merge_times_s
from parallel.plans.hardware import client_links as links
from parallel.plans.hardware.client_links import Link

FAST = Link("fast", 1e12, 1e12, 0.0, 0.0, 0.0, 0.0, False, "the tests")
SIZES = predict.MessageSizes(1000, 1000, 4000)


@pytest.mark.parametrize("fragments", [1, 2, 5])
def test_compute_of_the_slowest_client_hides_fast_transfers(fragments):
  ends = compute_merge_times_s(
    [FAST] * 3, SIZES, [1.0, 3.0, 2.0], fragments, rounds=4
  )
  expected = 3.0 * np.arange(1, 4 * fragments + 1)
  np.testing.assert_allclose(ends, expected, atol=1e-3)


def test_client_waits_for_the_merged_fragment_of_its_piece():
  ends = compute_merge_times_s(
    [FAST] * 2, SIZES, [1.0, 1.0], fragments=2, rounds=3, aggregation_s=5.0
  )
  # Fragment 0 is merged at 1 s and there at 6 s; its next piece takes 1 s.
  np.testing.assert_allclose(ends, [1, 2, 7, 8, 13, 14], atol=1e-3)


@pytest.mark.parametrize("model", [9_000_000, None])
def test_client_alone_waits_for_its_transfers(model):
  """The model, or all fragments of it, is received first."""
  link = Link("slow", 5e6, 2e6, 0.0, 0.0, 0.0, 0.0, False, "the tests")
  sizes = predict.MessageSizes(3_000_000, 500_000, model)
  down, up, first = (
    predict.framed(size) / rate / predict.DATA_SHARE
    for size, rate in (
      (sizes.down, 5e6), (sizes.up, 2e6), (model or 2 * sizes.down, 5e6)
    )
  )
  ends = compute_merge_times_s([link], sizes, [0.1], fragments=2, rounds=1)
  assert ends[0] == pytest.approx(first + 0.1 + up, rel=0.2)
  assert ends[1] < first + 0.2 + 2 * up
  if model:
    ends = compute_merge_times_s(
      [link], sizes, [0.1], fragments=1, rounds=3, fixed_s=0.03,
      aggregation_s=0.2,
    )
    again = 0.2 + 0.03 + down + 0.1 + 0.03 + up
    begin = 0.03 + first + 0.1 + 0.03 + up
    assert ends == pytest.approx([begin, begin + again, begin + 2 * again])


def test_more_fragments_fill_the_gaps_of_a_busy_cell():
  """A cell whose transfers take longer than compute limits the rounds."""
  size, num, cell = 4_000_000, 4, links.link("5g-20mhz")

  def run_s(fragments):
    part = size // fragments
    return compute_merge_times_s(
      [cell] * num, predict.MessageSizes(part, part, size),
      [1.0 / fragments] * num, fragments, rounds=6,
    )[-1]

  busy_s = 6 * num * size / (predict.DATA_SHARE * cell.up)
  slow, faster, fastest = map(run_s, (1, 2, 8))
  # The uplink, the slower direction, sends all bytes.
  assert busy_s < fastest < 1.2 * busy_s
  assert fastest < faster < slow
