"""Constants: every one has its source, and the obvious relations hold."""

import pytest

from parallel.hardware import clusters, devices, links, slices

LINKS = [v for v in vars(links).values() if isinstance(v, links.LinkKind)]


@pytest.mark.parametrize("thing", [
  *LINKS, *devices.DEVICES.values(), *clusters.CLUSTERS.values(),
  *clusters.MEMORY_TIERS.values(), *slices.SLICES.values(),
], ids=lambda t: getattr(t, "name", "slices"))
def test_every_constant_names_its_source(thing):
  assert len(thing.source) > 10


@pytest.mark.parametrize("device", devices.DEVICES.values(),
                         ids=lambda d: d.name)
def test_memory_is_slower_than_compute_and_faster_than_links(device):
  assert device.peak("bfloat16") > 50 * device.memory_bandwidth
  assert device.memory_bandwidth > device.link.bandwidth * device.num_links
  assert 10e9 < device.memory_bytes < 1e12


def test_published_totals():
  """Halved and divided figures, put together again."""
  v5p, h100 = devices.TPU_V5P, devices.H100
  assert v5p.num_links * 2 * v5p.link.bandwidth == pytest.approx(1200e9)
  assert 2 * h100.link.bandwidth == pytest.approx(900e9)
  assert 2 * devices.TPU_7X.peak("bfloat16") == pytest.approx(2307e12)
  node = clusters.FRONTIER.levels
  per_node = node[0].size * node[1].size
  injection = per_node * node[2].link.bandwidth * node[2].links_per_device
  assert injection == pytest.approx(100e9)


@pytest.mark.parametrize(
  ("generation", "topology", "reason"),
  [
    ("v5e", (16, 16), None), ("v6e", (4, 2), None), ("v4", (12, 12, 24), None),
    ("v5p", (2, 2, 1), None), ("v5p", (16, 16, 24), None),
    ("tpu7x", (16, 16, 36), None),
    ("v5e", (2, 2, 2), "2 dims"), ("v5p", (4, 4), "3 dims"),
    ("v5e", (16, 32), "256 chips, not 512"), ("v6e", (3, 4), "2x2, 2x4"),
    ("v5p", (16, 20, 20), "6144 chips, not 6400"),
    ("v4", (4, 4, 6), "multiples of 4"), ("v4", (2, 4, 8), "multiples of 4"),
  ],
)
def test_slices_are_those_that_exist(generation, topology, reason):
  found = slices.SLICES[generation].refusal(topology)
  assert reason in found if reason else found is None
