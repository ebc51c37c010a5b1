"""Devices of the benchmark of planned steps: sums, barriers, waits, rates."""

import time

import numpy as np
import pytest

from caatnet.benchmarks.planner import planner_truth_peer
from parallel.elastic.ring.bandwidth import rounds

COUNT = 3


@pytest.fixture(scope="module")
def peers(pool):
  made = [planner_truth_peer.Peer(str(i), "127.0.0.1") for i in range(COUNT)]
  addresses = [peer.address() for peer in made]
  list(pool.map(lambda peer: peer.connect(addresses), made))
  yield made
  for peer in made:
    peer._links._server.close()


@pytest.mark.parametrize("ring", [[0, 1, 2], [2, 0, 1], [2, 0], [1]])
@pytest.mark.parametrize("size", [9, 7, 2])
def test_ring_sums_all_arrays_in_their_order(peers, pool, ring, size):
  arrays = np.random.default_rng(0).normal(size=(COUNT, size)).astype("f4")
  before = [peer._links.sent_bytes for peer in peers]
  found = list(pool.map(
    lambda i: planner_truth_peer.ring_sum(peers[i]._links, ring, arrays[i]),
    ring,
  ))
  for x in found:
    np.testing.assert_allclose(x, arrays[ring].sum(0), rtol=1e-5)
  sent = sum(peer._links.sent_bytes for peer in peers) - sum(before)
  assert sent == 2 * (len(ring) - 1) * 4 * size


def test_no_process_passes_a_barrier_before_all_have_reached_it(peers, pool):
  times = {}

  def wait(i, delay_s):
    time.sleep(delay_s)
    reached = time.monotonic()
    peers[i]._links.barrier(COUNT)
    times[i] = reached, time.monotonic()

  for late in range(COUNT):
    list(pool.map(wait, range(COUNT), [
      0.05 * (i == late) for i in range(COUNT)
    ]))
    assert max(reached for reached, _ in times.values()) <= min(
      passed for _, passed in times.values()
    )


def test_links_are_measured_from_senders(peers, pool):
  """Rates are positive, also if small messages take no longer than empty ones.
  """
  for size in (4, 4, 4, 1 << 12):
    options = {"rounds": rounds(COUNT), "size": size, "train": 1, "times": 3}
    found = list(pool.map(
      lambda peer, options=options: peer.measure(**options), peers
    ))
    for i, rates in enumerate(found):
      assert set(rates) == {*range(COUNT)} - {i}
      for empty_s, rate in rates.values():
        assert empty_s > 0
        assert 0 < rate < np.inf


@pytest.mark.parametrize("quota", [0.0, 0.5])
def test_wait_takes_its_time_and_a_fraction_of_a_processor(quota):
  for seconds in (0.035, 0.004):
    start, used = time.monotonic(), time.thread_time()
    planner_truth_peer.compute(seconds, quota)
    # The last of several slices ends at the whole time.
    assert time.monotonic() - start >= 0.99 * seconds
    assert time.thread_time() - used >= 0.9 * quota * seconds


def test_job_waits_computes_reduces_and_sends(peers, pool):
  """A pipeline of two stages, and a third device with a head."""
  common = {"quota": 0.0, "boundary": 400, "reduction": 80, "gradients": 120,
            "head_s": 0.0}
  jobs = [
    common | {"actions": [[None, 0, 0.02, 0, 1, 5]], "tensor": [0],
              "data": [0, 2]},
    common | {"actions": [[0, 5, 0.02, 2, None, 0]], "tensor": [1, 2],
              "data": [1]},
    common | {"actions": [[None, 0, 0.0, 2, None, 0]], "tensor": [1, 2],
              "data": [0, 2], "head_s": 0.01},
  ]
  found = list(pool.map(lambda peer, job: peer.run(job), peers, jobs))
  assert [x["sum"] for x in found] == [1 + 3, 2, 1 + 3]
  # A boundary, two sums of 80 bytes, and one of 120 bytes.
  assert [x["sent"] for x in found] == [400 + 120, 2 * 80, 2 * 80 + 120]
  for x in found[:2]:  # these compute
    assert x["end"] - x["start"] >= 0.02
  ends = max(x["end"] for x in found)
  assert ends - min(x["start"] for x in found) >= 0.04
