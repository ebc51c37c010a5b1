"""Benchmark of the planner: measured links and device orders."""

import json

import pytest

from caatnet.benchmarks.planner import measured_links, planner
from configs.benchmark import planner as config_of
from parallel.hardware import cluster_files


def test_links_between_processes_are_measured():
  links = measured_links.measure(
    ["127.0.0.1"] * 3, sizes=(1 << 10, 1 << 16, 1 << 20)
  )
  assert links.mark == "measured"
  assert links.nodes == (0, 0, 0)
  assert (links.bandwidth > 1e6).all()
  assert 0 <= links.latency_s.max() < 1
  again = cluster_files.from_json(json.loads(cluster_files.to_json(links)))
  assert again.device.flops["float32"] == links.device.flops["float32"]



def test_fits_are_assigned_to_the_direction_of_messages():
  """Rows send, columns receive."""
  def rows(latency_s, rate):
    return [(n, latency_s + n / rate) for n in (1e3, 1e6)]

  device = {"flops": 2e9, "memory_bandwidth": 1e9, "memory_bytes": 8e9}
  links = measured_links.fitted([
    {"device": device, "links": {"p1": rows(1e-5, 1e9)}},
    {"device": device | {"flops": 1e9}, "links": {"p0": rows(2e-5, 5e8)}},
  ], ["a", "b"])
  assert links.bandwidth[1, 0] == pytest.approx(1e9)
  assert links.bandwidth[0, 1] == pytest.approx(5e8)
  assert links.latency_s[0, 1] == pytest.approx(2e-5)
  assert links.nodes == (0, 1)
  assert links.device.flops["float32"] == 1e9
  assert links.device.memory_bytes == 8e9



def test_device_orders_are_near_the_best():
  result = planner.run(config_of.get_config("test"))
  assert result["against all orders"][0]["ours / best, worst"] <= 1.01
  assert result["certified"][-1]["most"] < 0.1
  assert result["uneven links"][0]["slower than ours"] <= 1
