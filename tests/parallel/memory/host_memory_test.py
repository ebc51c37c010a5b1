"""Pages on nodes, and the loops that measure them."""

import numpy as np
import pytest

from parallel.memory import host_memory, rates

NODE = host_memory.nodes()[0]


def test_pages_are_on_the_node_that_was_asked_for():
  for node in host_memory.nodes():
    x = host_memory.allocate(2**22, node=node)
    assert not x.any()
    x[:] = 1
    assert set(host_memory.nodes_of(x)) == {node}
    assert 0 < host_memory.free_bytes(node) < 1e15


def test_a_page_that_was_not_touched_is_on_no_node():
  with pytest.raises(OSError, match="No such file"):  # ENOENT of move_pages
    host_memory.nodes_of(host_memory.allocate(2**22, node=NODE))


@pytest.mark.parametrize("node", [-1, 4096])
def test_an_unknown_node_lists_the_nodes(node):
  message = f"node={node} does not exist; the nodes of this machine are 0"
  with pytest.raises(ValueError, match=message):
    host_memory.allocate(4096, node=node)


def test_loops_move_every_element():
  arrays = [np.full(1000, value, np.float32) for value in (0, 2, 1)]
  found = rates.measure(arrays, num_threads=2)
  assert set(found) == set(rates.MOVED)
  np.testing.assert_array_equal(arrays[0], 2 + 3 * 1)  # triad is the last


def test_dependent_loads_visit_every_line_once_in_one_cycle():
  x = host_memory.allocate(64 * 1000, node=NODE)
  assert rates.latency_s(x, num_loads=10) > 0
  order, place, visited = x.view(np.int64), 0, []
  for _ in range(1000):
    visited.append(place)
    place = int(order[place])
  assert place == 0
  assert sorted(visited) == list(range(0, 8000, 8))
