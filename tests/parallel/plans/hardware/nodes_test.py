"""Nodes that serve many models: published ratios, ranges and capacities."""

import pytest

from parallel.plans.hardware.nodes import NODES

EXPERT = 13.5e9


@pytest.mark.parametrize("node", NODES.values(), ids=lambda node: node.name)
def test_ranges_are_ordered_and_have_sources(node):
  for name, value in node:
    if hasattr(value, "low"):
      value.check(f"{node.name}.{name}")
      assert value.source


@pytest.mark.parametrize(("name", "times"), [
  ("dgx-h100", 15.625), ("dgx-a100", 31.25),
])
def test_a_switch_is_as_much_slower_as_its_link(name, times):
  base = NODES["sn40l"].switch_s(EXPERT)
  assert NODES[name].switch_s(EXPERT) / base == pytest.approx(times)
  # Eight links carry eight shards at once.
  spread = NODES[name].switch_s(EXPERT, spread=True)
  assert spread == pytest.approx(EXPERT / (8 * NODES[name].copy_rate.value))


@pytest.mark.parametrize(("name", "gbytes"), [
  # Of a device, and per second; of the host, and per second to a device.
  ("sn40l", (64 * 1.073741824, 1800, 12 * 1099.511627776, 200)),
  ("dgx-a100", (80, 2039, 1000, 31.508)),
  ("dgx-h100", (80, 3350, 2000, 63.015)),
  ("tpu-v5e", (16, 819, 512 * 1.073741824, 16)),
  ("tpu-v5p", (95 * 1.073741824, 2765, 448, 16)),
])
def test_nodes_have_the_rates_of_their_sources(name, gbytes):
  node = NODES[name]
  found = node.device_bytes, node.device_rate, node.host_bytes, node.copy_rate
  assert [x.value / 1e9 for x in found] == pytest.approx(gbytes, rel=1e-4)
  assert node.num_devices == (4 if name == "tpu-v5p" else 8)
  if name.startswith("tpu"):  # each device copies its shard
    assert node.node_rate.value == node.num_devices * 16e9


def test_machines_are_counted_by_the_memory_that_serves():
  dgx, sn40l = NODES["dgx-a100"], NODES["sn40l"]
  assert dgx.resident(EXPERT) == 47
  assert [dgx.machines(n, EXPERT) for n in (1, 47, 48, 850)] == [1, 1, 2, 19]
  assert sn40l.machines(sn40l.held(EXPERT), EXPERT) == 1
  assert sn40l.machines(sn40l.held(EXPERT) + 1, EXPERT) == 2


def test_an_expert_that_does_not_fit_is_refused():
  with pytest.raises(ValueError, match="node='tpu-v5e' has too little memory"):
    NODES["tpu-v5e"].machines(1, 200e9)
