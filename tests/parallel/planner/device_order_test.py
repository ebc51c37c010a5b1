"""Device orders: costs of exchanges, optimality, and lower bounds."""

import itertools

import numpy as np
import pytest

from parallel.hardware import cluster_files
from parallel.planner import device_order
from parallel.planner.bound import bound
from parallel.planner.device_order import _Exchanges
from parallel.planner.message_costs import Grid, Traffic, cost, parts

GRIDS = [Grid(3, 2, 1), Grid(2, 3, 2), Grid(1, 2, 3), Grid(4, 1, 2),
         Grid(2, 2, 2), Grid(5, 1, 1)]


def _drawn(grid, seed):
  """Draws the cost of each pair, with the range of links of 1 to 20 GB/s."""
  rng = np.random.default_rng(seed)
  size = (4, grid.size, grid.size)
  return Traffic(grid, *np.exp(rng.uniform(0, np.log(20), size)))


def _in_nodes(grid, seed, share=1.0):
  """Returns uneven traffic for nodes of four devices with fast inner links."""
  links = cluster_files.cluster(f"pipette-a100:{grid.size // 8},uneven={seed}")
  hops, data = links.seconds(4e7), links.seconds(2e8)
  return Traffic(grid, hops, hops, share * data, 20 * hops)


def _renamed(traffic, names):
  return Traffic(traffic.grid, *(
    matrix[np.ix_(names, names)] for matrix in (
      traffic.chain, traffic.hop, traffic.ring, traffic.reduce
    )
  ))


def test_cost_of_an_order_by_hand():
  """Adds up two stages of two replicas on four devices."""
  seconds = np.arange(16.0).reshape(4, 4)
  traffic = Traffic(Grid(2, 2, 1), seconds, 10 * seconds, 100 * seconds,
                    seconds)
  order = np.array([[[3], [0]], [[1], [2]]])
  # Hops 3 -> 1 and 0 -> 2; rings 3 -> 0 -> 3 and 1 -> 2 -> 1.
  assert parts(traffic, order).tolist() == [13, 130, 1200, 0]


@pytest.mark.quick
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_exchange_costs_equal_those_of_the_resulting_orders(grid):
  traffic = _drawn(grid, 1)
  start = np.random.default_rng(2).permutation(grid.size)
  exchanges = _Exchanges(traffic, start, share=0.3)
  everyone = np.arange(grid.size)
  for a in everyone:
    found = exchanges.values(a, everyone)
    for b in everyone:
      swapped = start.copy()
      swapped[[a, b]] = swapped[[b, a]]
      again = _Exchanges(traffic, swapped, share=0.3)
      assert found[b] == pytest.approx(again.value)


@pytest.mark.parametrize(("grid", "seed"), [
  *itertools.product([Grid(3, 2, 1), Grid(7, 1, 1), Grid(1, 3, 2)], range(2)),
  (Grid(1, 6, 1), 0), (Grid(2, 2, 1), 0),
], ids=str)
def test_search_is_optimal_up_to_eight_devices(grid, seed):
  traffic = _drawn(grid, seed)
  best = device_order.brute_force(traffic)
  found = device_order.search(traffic, exact=False, kicks=64)
  assert sorted(found.devices.ravel()) == list(range(grid.size))
  assert found.seconds == cost(traffic, found.devices)
  assert best.seconds <= found.seconds <= 1.01 * best.seconds


@pytest.mark.parametrize("seed", range(3))
def test_hidden_order_is_found(seed):
  """Its links cost 1, and all others between 1.5 and 20 at random."""
  grid, rng = Grid(3, 4, 1), np.random.default_rng(seed)
  size = (4, grid.size, grid.size)
  traffic = Traffic(grid, *np.exp(rng.uniform(np.log(1.5), np.log(20), size)))
  hidden = rng.permutation(grid.size)
  for family in traffic.families():
    family.seconds[hidden[family.source], hidden[family.target]] = 1
  found = device_order.search(traffic, kicks=0)
  assert found.seconds == cost(traffic, hidden.reshape(grid))


@pytest.mark.parametrize("grid", [
  Grid(2, 1, 8), Grid(4, 4, 1), Grid(2, 4, 2), Grid(1, 16, 1), Grid(16, 1, 1),
  Grid(4, 2, 4), Grid(2, 8, 2),
], ids=str)
def test_no_order_is_below_the_bound(grid):
  traffic = _in_nodes(grid, grid.data)
  least = bound(traffic)
  rng = np.random.default_rng(0)
  orders = np.array([rng.permutation(grid.size) for _ in range(200)])
  found = device_order.search(traffic, kicks=2)
  own = device_order.identity(traffic)
  assert 0 < least <= found.seconds <= own.seconds
  assert least <= cost(traffic, orders.reshape(-1, *grid)).min()


@pytest.mark.parametrize("grid", [Grid(2, 2, 8), Grid(4, 1, 8)], ids=str)
def test_groups_within_nodes_are_certified(grid):
  """Device numbers are shuffled; the groups are found with a small gap."""
  names = np.random.default_rng(3).permutation(grid.size)
  traffic = _renamed(_in_nodes(grid, 5), names)
  found = device_order.search(traffic, kicks=2)
  assert found.seconds <= 1.05 * bound(traffic)
  own = device_order.identity(traffic)
  assert own.seconds > 2 * found.seconds


def test_even_network_needs_no_order():
  grid = Grid(2, 2, 2)
  even = np.ones((8, 8))
  traffic = Traffic(grid, even, even, even, even)
  found = device_order.search(traffic)
  assert found.devices.ravel().tolist() == list(range(8))
  assert bound(traffic) == found.seconds == 4


@pytest.mark.filterwarnings("error")
def test_orders_without_traffic_cost_nothing():
  none = np.zeros((12, 12))
  traffic = Traffic(Grid(3, 4, 1), none, none, none, none)
  assert device_order.search(traffic, kicks=0).seconds == 0


def test_bound_of_equal_links_is_tight():
  even = np.ones((16, 16))
  none = np.zeros((16, 16))
  traffic = Traffic(Grid(16, 1, 1), even, none, none, none)
  assert bound(traffic) == device_order.identity(traffic).seconds == 15


def test_bound_of_compatible_pairs_is_tight():
  """Ten nodes of two: each device has one fast link to each other node."""
  place, node = np.arange(20) % 2, np.arange(20) // 2
  ring = np.where(place[:, None] == place, 1.0, 5.0)
  reduce = np.where(node[:, None] == node, 0.1, 100.0)
  none = np.zeros((20, 20))
  traffic = Traffic(Grid(1, 10, 2), none, none, ring, reduce)
  assert bound(traffic) == device_order.identity(traffic).seconds == 1.1


def test_search_is_deterministic():
  traffic = _in_nodes(Grid(2, 4, 2), 1)
  first, again = (device_order.search(traffic, kicks=3) for _ in range(2))
  assert (first.devices == again.devices).all()


def test_brute_force_refuses_too_many_devices():
  with pytest.raises(ValueError, match="9 devices have too many orders"):
    device_order.brute_force(_drawn(Grid(9, 1, 1), 0))
