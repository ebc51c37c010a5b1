"""Device orders: costs of exchanges, optimality, and lower bounds."""

import itertools

import numpy as np
import pytest

from parallel.plans.hardware import cluster_files
from parallel.plans.planner import device_order
from parallel.plans.planner.bound import cost_lower_bound
from parallel.plans.planner.device_order import _Exchanges
from parallel.plans.planner.message_costs import (
  Grid,
  Traffic,
  cost,
  costs_by_term,
)

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
  assert costs_by_term(traffic, order).tolist() == [13, 130, 1200, 0]


@pytest.mark.quick
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_exchange_costs_equal_those_of_the_resulting_orders(grid):
  traffic = _drawn(grid, 1)
  start = np.random.default_rng(2).permutation(grid.size)
  exchanges = _Exchanges(traffic, start, share=0.3)
  everyone = np.arange(grid.size)
  bare = _Exchanges(traffic, start, share=0.0)
  assert bare.value == pytest.approx(cost(traffic, start.reshape(grid)))
  for a in everyone:
    found = exchanges.values(a, everyone)
    for b in everyone:
      swapped = start.copy()
      swapped[[a, b]] = swapped[[b, a]]
      again = _Exchanges(traffic, swapped, share=0.3)
      assert found[b] == pytest.approx(again.value)


@pytest.mark.parametrize(("grid", "seed"), [
  (Grid(3, 2, 1), 0), (Grid(1, 3, 2), 0), (Grid(7, 1, 1), 1),
], ids=str)
def test_search_is_optimal_up_to_eight_devices(grid, seed):
  traffic = _drawn(grid, seed)
  best = device_order.brute_force(traffic)
  found = device_order.search(traffic, exact=False, kicks=64)
  assert sorted(found.devices.ravel()) == list(range(grid.size))
  assert found.seconds == cost(traffic, found.devices)
  assert best.seconds <= found.seconds <= 1.01 * best.seconds


def test_hidden_order_is_found():
  """Its links cost 1, and all others between 1.5 and 20 at random."""
  grid, rng = Grid(3, 4, 1), np.random.default_rng(0)
  size = (4, grid.size, grid.size)
  traffic = Traffic(grid, *np.exp(rng.uniform(np.log(1.5), np.log(20), size)))
  hidden = rng.permutation(grid.size)
  for family in traffic.families():
    family.seconds[hidden[family.source], hidden[family.target]] = 1
  found = device_order.search(traffic, kicks=0)
  assert found.seconds == cost(traffic, hidden.reshape(grid))


@pytest.mark.parametrize("grid", [
  Grid(3, 1, 8), Grid(4, 6, 1), Grid(1, 24, 1), Grid(4, 2, 4),
], ids=str)
def test_no_order_is_below_the_bound(grid):
  traffic = _in_nodes(grid, grid.data)
  least = cost_lower_bound(traffic)
  rng = np.random.default_rng(0)
  orders = np.array([rng.permutation(grid.size) for _ in range(200)])
  found = device_order.search(traffic, kicks=2)
  own = device_order.default_order(traffic)
  assert 0 < least <= found.seconds <= own.seconds
  assert least <= cost(traffic, orders.reshape(-1, *grid)).min()


@pytest.mark.parametrize("grid", [Grid(2, 2, 8), Grid(4, 1, 8)], ids=str)
def test_groups_within_nodes_are_certified(grid):
  """Device numbers are shuffled; the groups are found with a small gap."""
  names = np.random.default_rng(3).permutation(grid.size)
  traffic = _renamed(_in_nodes(grid, 5), names)
  found = device_order.search(traffic, kicks=2)
  assert found.seconds <= 1.05 * cost_lower_bound(traffic)
  own = device_order.default_order(traffic)
  assert own.seconds > 2 * found.seconds


def test_cost_counts_the_links_around_rings():
  seconds = np.arange(36.0).reshape(6, 6)
  traffic = Traffic(Grid(1, 2, 3), *[seconds] * 3, 100 * seconds)
  order = np.array([[[0, 1, 2], [3, 4, 5]]])
  # Rings 0, 3 and 1, 4 and 2, 5; tensor groups 0, 1, 2 and 3, 4, 5.
  assert costs_by_term(traffic, order).tolist() == [0, 0, seconds[5, 2], 3300]
  many = np.stack([np.stack([order] * 2)] * 3)
  assert costs_by_term(traffic, many).shape == (3, 2, 4)
  assert (cost(traffic, many) == seconds[5, 2] + 3300).all()
  assert str(traffic.grid) == "stage 1 x data 2 x tensor 3"
  assert traffic.grid.size == 6


def test_walk_starts_runs_at_the_farthest_device():
  """Devices on a line: each run takes the nearest ones from an end."""
  place = np.array([5.0, 0.0, 9.0, 1.0, 8.0, 4.0])
  distance = np.abs(place[:, None] - place)
  one_way = np.triu(distance)  # the slower direction of a link counts
  for seconds in (distance, one_way):
    assert device_order._walk(seconds, 6).tolist() == [1, 3, 5, 0, 4, 2]
    # The rest is 1, 4, 8, 9 after the first run from 0 to 1, and so on.
    assert device_order._walk(seconds, 2).tolist() == [1, 3, 2, 4, 0, 5]


@pytest.mark.parametrize("grid", [
  Grid(6, 1, 1), Grid(4, 3, 1), Grid(3, 2, 2),
], ids=str)
def test_no_swap_or_reversal_of_stages_or_replicas_helps(grid):
  for seed in range(12):
    traffic = _drawn(grid, seed)
    start = np.random.default_rng(seed).permutation(grid.size)
    best = device_order._exchange_blocks(traffic, start).reshape(grid)
    least = cost(traffic, best)
    assert least <= cost(traffic, start.reshape(grid))
    for dim in (0, 1):
      for i, j in itertools.combinations(range(grid[dim]), 2):
        turned, swapped = np.arange(grid[dim]), np.arange(grid[dim])
        turned[i : j + 1] = np.flip(turned[i : j + 1])
        swapped[[i, j]] = swapped[[j, i]]
        for x in (turned, swapped):
          assert cost(traffic, best.take(x, dim)) >= least * (1 - 1e-9)


def test_exchanges_end_where_none_helps_or_the_budget_ends():
  traffic = _drawn(Grid(3, 2, 2), 1)
  start = np.arange(12)
  devices = _Exchanges(traffic, start, 0.3).run(device_order._Budget())
  end = _Exchanges(traffic, devices, 0.3)
  assert end.value < _Exchanges(traffic, start, 0.3).value
  for a in range(12):
    assert end.values(a, np.arange(12)).min() >= end.value * (1 - 1e-9)
  budget = device_order._Budget(150 + 12)
  assert budget.left
  once = _Exchanges(traffic, start, 0.3).run(budget)
  assert not budget.left
  assert (once != start).sum() == 2
  assert _Exchanges(traffic, start, 0.3).run(budget).tolist() == [*range(12)]


def test_annealing_returns_the_best_of_many_orders():
  grid = Grid(3, 3, 1)
  traffic = _drawn(grid, 2)
  orders = device_order._annealed(traffic, 48, np.random.default_rng(0))
  assert orders.shape == (device_order._NUM_KEPT_ORDERS, 9)
  assert (np.sort(orders, 1) == np.arange(9)).all()
  drawn = np.random.default_rng(1).permuted(
    np.tile(np.arange(9), (48, 1)), axis=1
  )
  found = cost(traffic, orders.reshape(-1, *grid))
  assert found.max() < np.median(cost(traffic, drawn.reshape(-1, *grid)))
  assert found[0] <= 1.05 * found.min()
  # A chain's hops add up along each of two pipelines.
  grid = Grid(4, 2, 1)
  none = np.zeros((8, 8))
  chain = np.random.default_rng(3).uniform(1, 9, (8, 8))
  traffic = Traffic(grid, chain, none, none, none)
  orders = device_order._annealed(traffic, 32, np.random.default_rng(0))
  best = device_order.brute_force(traffic).seconds
  assert cost(traffic, orders[:1].reshape(-1, *grid)) <= 1.02 * best


def test_even_network_needs_no_order():
  grid = Grid(2, 2, 2)
  even = np.ones((8, 8))
  traffic = Traffic(grid, even, even, even, even)
  found = device_order.search(traffic)
  assert found.devices.ravel().tolist() == list(range(8))
  assert cost_lower_bound(traffic) == found.seconds == 4


@pytest.mark.filterwarnings("error")
def test_orders_without_traffic_cost_nothing():
  none = np.zeros((12, 12))
  traffic = Traffic(Grid(3, 4, 1), none, none, none, none)
  assert device_order.search(traffic, kicks=0).seconds == 0


def test_bound_of_equal_links_is_tight():
  even = np.ones((16, 16))
  none = np.zeros((16, 16))
  traffic = Traffic(Grid(16, 1, 1), even, none, none, none)
  assert (
    cost_lower_bound(traffic)
    == device_order.default_order(traffic).seconds
    == 15
  )


def test_bound_of_compatible_pairs_is_tight():
  """Ten nodes of two: each device has one fast link to each other node."""
  place, node = np.arange(20) % 2, np.arange(20) // 2
  ring = np.where(place[:, None] == place, 1.0, 5.0)
  reduce = np.where(node[:, None] == node, 0.1, 100.0)
  none = np.zeros((20, 20))
  traffic = Traffic(Grid(1, 10, 2), none, none, ring, reduce)
  assert (
    cost_lower_bound(traffic)
    == device_order.default_order(traffic).seconds
    == 1.1
  )


def test_search_is_deterministic():
  traffic = _drawn(Grid(5, 1, 1), 1)
  first, again = (
    device_order.search(traffic, exact=False, kicks=3) for _ in range(2)
  )
  assert (first.devices == again.devices).all()


def test_brute_force_refuses_too_many_devices():
  with pytest.raises(ValueError, match="9 devices have too many orders"):
    device_order.brute_force(_drawn(Grid(9, 1, 1), 0))
