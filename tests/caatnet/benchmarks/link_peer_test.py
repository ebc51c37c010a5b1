"""Processes that measure links: messages of all pairs, rates of compute."""

import concurrent.futures
import itertools
import time

from caatnet.benchmarks.planner import link_peer

COUNT, SIZES = 3, [100, 20_000]


def test_each_pair_is_measured_from_both_ends():
  made = [link_peer.Peer(f"p{i}", "127.0.0.1") for i in range(COUNT)]
  members = {f"p{i}": peer.address() for i, peer in enumerate(made)}
  start = time.perf_counter()
  with concurrent.futures.ThreadPoolExecutor(COUNT) as pool:
    found = list(pool.map(lambda peer: peer.measure(members, SIZES), made))
    list(pool.map(lambda peer: peer.close(), made))
  passed = time.perf_counter() - start
  for peer in made:
    peer._listener.close()
  for i, answer in enumerate(found):
    assert set(answer["links"]) == set(members) - {f"p{i}"}
    for rows in answer["links"].values():
      assert [size for size, _ in rows] == SIZES
      assert all(0 < seconds < passed for _, seconds in rows)
    device = answer["device"]
    # Any processor of a test is within these rates.
    assert 1e7 < device["flops"] < 1e13
    assert 1e7 < device["memory_bandwidth"] < 1e13
    assert device["memory_bytes"] > 2**28


def test_rates_are_of_products_and_of_bytes_read_and_written(monkeypatch):
  """On a clock that each look at it advances by a second: two calls in four.
  """
  monkeypatch.setattr(time, "perf_counter", itertools.count().__next__)
  found = link_peer.computed(min_s=2.5)
  assert found["flops"] == 2 * 2 * 512**3 / 4
  assert found["memory_bandwidth"] == 2 * 2 * 4 * 2**23 / 4
