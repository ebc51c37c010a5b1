"""Pages on nodes, and the loops that measure them."""

import itertools
import pathlib

import numpy as np
import pytest

from parallel.memory import host_memory
from parallel.plans.placement import rates

NODE = host_memory.nodes()[0]


def test_pages_are_on_the_node_that_was_asked_for():
  for node in host_memory.nodes():
    x = host_memory.allocate(2**22, node=node)
    assert not x.any()
    x[:] = 1
    assert set(host_memory.nodes_of(x)) == {node}
    assert 0 < host_memory.free_bytes(node) < 1e15


def test_the_kernel_binds_the_pages_to_the_node():
  maps = pathlib.Path("/proc/self/numa_maps")
  if not maps.exists():
    pytest.skip("a kernel without NUMA")
  x = host_memory.allocate(2**22, node=NODE)
  x[:] = 1
  (line,) = (
    line for line in maps.read_text().splitlines()
    if int(line.split()[0], 16) == x.ctypes.data
  )
  assert line.split()[1] == f"bind:{NODE}"


def test_a_page_that_was_not_touched_is_on_no_node():
  with pytest.raises(OSError, match="No such file"):  # ENOENT of move_pages
    host_memory.nodes_of(host_memory.allocate(2**22, node=NODE))


def test_nodes_and_their_free_bytes_are_those_of_the_kernel(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(host_memory, "_SYSTEM", tmp_path)
  assert host_memory.nodes() == [0]  # unknown
  (tmp_path / "has_memory").write_text("0-2,4,7-8\n")
  assert host_memory.nodes() == [0, 1, 2, 4, 7, 8]
  (tmp_path / "node7").mkdir()
  (tmp_path / "node7/meminfo").write_text(
    "Node 7 MemTotal:  9000 kB\nNode 7 MemFree:    321 kB\n"
    "Node 7 MemUsed:  8679 kB\n"
  )
  assert host_memory.free_bytes(7) == 321 * 1024
  with pytest.raises(ValueError, match=r"node=3 does not exist; .* 0, 1, 2, 4"):
    host_memory.free_bytes(3)


@pytest.mark.parametrize("node", [-1, 4096])
def test_an_unknown_node_lists_the_nodes(node):
  message = f"node={node} does not exist; the nodes of this machine are 0"
  with pytest.raises(ValueError, match=message):
    host_memory.allocate(4096, node=node)


def test_at_most_the_requested_number_of_pages_is_read_back():
  x = host_memory.allocate(100 * 4096, node=NODE)
  x[:] = 1
  for most in (1, 3, 60, 1000):
    assert 1 <= len(host_memory.nodes_of(x, most)) <= most


@pytest.mark.parametrize(("name", "expected"), [
  ("read", 5), ("write", 1), ("copy", 2), ("triad", 2 + 3 * 7),
])
def test_loops_move_every_element(name, expected):
  arrays = [np.full(1000, value, np.float32) for value in (5, 2, 7)]
  total = getattr(rates._loops(), name)(*arrays)
  np.testing.assert_array_equal(arrays[0], expected)
  assert total == (5000 if name == "read" else 0)


def test_a_rate_is_the_bytes_of_all_accesses_over_the_time(monkeypatch):
  """On a clock on which each pass takes 0.5 s."""
  clock = itertools.count()
  monkeypatch.setattr(rates.time, "perf_counter", lambda: next(clock) / 2)
  arrays = [np.zeros(1000, np.float32) for _ in range(3)]
  assert rates.measure(arrays, num_threads=2) == {
    "read": 8000, "write": 8000, "copy": 16_000, "triad": 24_000
  }
  x = host_memory.allocate(64 * 1000, node=NODE)
  assert rates.latency_s(x, num_loads=50) == 0.01


def test_dependent_loads_visit_every_line_once_in_one_cycle():
  x = host_memory.allocate(64 * 1000, node=NODE)
  assert rates.latency_s(x, num_loads=10) > 0
  order, place, visited = x.view(np.int64), 0, []
  for _ in range(1000):
    visited.append(place)
    place = int(order[place])
  assert place == 0
  assert sorted(visited) == list(range(0, 8000, 8))
