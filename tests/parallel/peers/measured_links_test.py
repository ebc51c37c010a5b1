"""Processes that measure links: messages of all pairs, rates of compute."""

import concurrent.futures
import itertools
import json
import time
import types

import pytest

from parallel.peers.ring import measured_links
from parallel.plans.hardware import cluster_files
from tests.parallel.peers.worlds import world

COUNT, SIZES = 3, [100, 20_000]


def test_each_pair_is_measured_from_both_ends():
  made = [measured_links.Peer(f"p{i}", "127.0.0.1") for i in range(COUNT)]
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
  found = measured_links.measure_compute(min_s=2.5)
  assert found["flops"] == 2 * 2 * 512**3 / 4
  assert found["memory_bandwidth"] == 2 * 2 * 4 * 2**23 / 4


def test_links_between_processes_are_measured():
  """Hosts are assigned in turn; processes of a node are neighbours."""
  text, words = measured_links.build_cluster_file(
    3, ["127.0.0.2", "127.0.0.1"], "", "", [], "h200", 1, "", ""
  )
  links = cluster_files.from_json(json.loads(text))
  assert words == f"3 devices, {links.source}"
  assert links.mark == "measured"
  assert links.nodes == (0, 0, 1)
  assert (links.bandwidth > 1e6).all()
  assert 0 <= links.latency_s.max() < 1


def test_time_of_a_message_is_that_of_the_fastest_third(monkeypatch):
  passed = [5.0, 1.0, 9.0, 2.0, 7.0, 3.0, 8.0]
  clock = itertools.chain.from_iterable(
    (100.0 * i, 100.0 * i + seconds) for i, seconds in enumerate(passed)
  )
  monkeypatch.setattr(
    measured_links, "time", types.SimpleNamespace(perf_counter=clock.__next__)
  )
  with world(1) as (links,):
    assert measured_links._seconds(links, ["p0"], 8) == pytest.approx(1.5)


def test_messages_are_timed_from_latencies_to_rates():
  """At 100 MB/s, the largest one takes less than a tenth of a second."""
  assert list(measured_links.SIZES) == sorted(measured_links.SIZES)
  assert measured_links.SIZES[0] <= 1 << 10
  assert 1 << 20 < measured_links.SIZES[-1] < 10_000_000


def test_fits_are_assigned_to_the_direction_of_messages():
  """Rows send, columns receive."""
  def rows(latency_s, rate):
    return [(n, latency_s + n / rate) for n in (1e3, 1e6)]

  device = {"flops": 2e9, "memory_bandwidth": 1e9, "memory_bytes": 8e9}
  links = measured_links.fit_link_matrix([
    {"device": device, "links": {"p1": rows(1e-5, 1e9)}},
    {"device": device | {"flops": 1e9}, "links": {"p0": rows(2e-5, 5e8)}},
  ], ["a", "b"])
  assert links.bandwidth[1, 0] == pytest.approx(1e9)
  assert links.bandwidth[0, 1] == pytest.approx(5e8)
  assert links.latency_s[0, 1] == pytest.approx(2e-5)
  assert links.nodes == (0, 1)
  assert links.device.flops["float32"] == 1e9
  assert links.device.memory_bytes == 8e9
  assert links.device.memory_bandwidth == 1e9
  # Processes of one host share its memory.
  shared = measured_links.fit_link_matrix([
    {"device": device,
     "links": {f"p{i}": rows(1e-5, 1e9) for i in range(3) if i != j}}
    for j in range(3)
  ], ["a", "a", "b"])
  assert shared.device.memory_bytes == 4e9
  assert shared.nodes == (0, 0, 1)
  with pytest.raises(ValueError, match="links need two processes or more"):
    measured_links.measure(["127.0.0.1"])
