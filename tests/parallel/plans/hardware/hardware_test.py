"""Hardware constants: each names its source, and known relations hold."""

import csv
import dataclasses
import functools
import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st
import networkx as nx
import pytest

from parallel.plans.hardware import (
  cluster_imports,
  clusters,
  collective_times,
  devices,
  links,
  sites,
  slices,
  tiers,
)
from parallel.plans.hardware.links import (
  INFINIBAND_HDR,
  NVLINK_3,
  NVLINK_4,
  PCIE_4,
)

LINKS = [v for v in vars(links).values() if isinstance(v, links.LinkKind)]


@pytest.mark.parametrize("thing", [
  *LINKS, *devices.DEVICES.values(), *clusters.CLUSTERS.values(),
  *tiers.HOSTS.values(), *slices.SLICE_RULES.values(),
], ids=lambda t: getattr(t, "name", "slices"))
def test_constant_names_its_source(thing):
  assert len(thing.source) > 10


@pytest.mark.parametrize("device", devices.DEVICES.values(),
                         ids=lambda d: d.name)
def test_memory_is_slower_than_compute_and_faster_than_links(device):
  assert device.peak("bfloat16") > 50 * device.memory_bandwidth
  assert device.memory_bandwidth > device.link.bandwidth * device.num_links
  assert 10e9 < device.memory_bytes < 1e12


def test_published_totals():
  """Recombines figures that were halved or divided for a single device."""
  v5p, h100 = devices.TPU_V5P, devices.H100
  assert v5p.num_links * 2 * v5p.link.bandwidth == pytest.approx(1200e9)
  assert 2 * h100.link.bandwidth == pytest.approx(900e9)
  assert 2 * devices.TPU_7X.peak("bfloat16") == pytest.approx(2307e12)
  node = clusters.FRONTIER.levels
  per_node = node[0].size * node[1].size
  injection = per_node * node[2].link.bandwidth * node[2].links_per_device
  assert injection == pytest.approx(100e9)


@pytest.mark.parametrize(("device", "count", "dtype", "flops"), [
  # Pods, Google Cloud documentation: 1.1 and 4.1 EFLOPS, 100 POPS, 234.9
  # PFLOPS, and 42.5 EFLOPS of chips with two devices each.
  (devices.TPU_V4, 4096, "bfloat16", 1.1e18),
  (devices.TPU_V5P, 8960, "bfloat16", 4.1e18),
  (devices.TPU_V5E, 256, "int8", 100e15),
  (devices.TPU_V6E, 256, "bfloat16", 234.9e15),
  (devices.TPU_7X, 2 * 9216, "float8_e4m3fn", 42.5e18),
  # NVIDIA's systems, halved where their figures are with sparsity: DGX-2 has 2
  # PFLOPS, DGX A100 5, DGX H100 and H200 32, DGX B200 72.
  (devices.V100, 16, "float16", 2e15),
  (devices.A100, 8, "bfloat16", 5e15 / 2),
  (devices.H100, 8, "float8_e4m3fn", 32e15 / 2),
  (devices.H200, 8, "float8_e4m3fn", 32e15 / 2),
  (devices.B200, 8, "float8_e4m3fn", 72e15 / 2),
], ids=str)
def test_systems_have_their_published_peak_flops(device, count, dtype, flops):
  assert count * device.peak(dtype) == pytest.approx(flops, rel=0.03)


@pytest.mark.parametrize(("device", "count", "memory_bytes"), [
  (devices.V100, 16, 512e9), (devices.A100, 8, 640e9), (devices.H100, 8, 640e9),
  (devices.H200, 8, 1128e9), (devices.B200, 8, 1440e9),
], ids=str)
def test_systems_have_their_published_memory(device, count, memory_bytes):
  assert count * device.memory_bytes == memory_bytes


@pytest.mark.parametrize(
  ("device", "parts", "size_bytes", "gbytes_s", "link_gbytes_s", "teraflops"),
  [
    # Figures per chip or package, with its number of devices. Links: all ports,
    # both ways.
    (devices.TPU_V4, 1, 32 * 2**30, 1200, 600, {"bfloat16": 275}),
    (devices.TPU_V5E, 1, 16e9, 819, 400, {"bfloat16": 197, "int8": 393}),
    (devices.TPU_V5P, 1, 95 * 2**30, 2765, 1200, {"bfloat16": 459}),
    (devices.TPU_V6E, 1, 32e9, 1640, 800, {"bfloat16": 918}),
    (devices.TPU_7X, 2, 192 * 2**30, 7380, 2 * 1200, {"bfloat16": 2307}),
    (devices.V100, 1, 32e9, 900, 300, {"float16": 125, "float32": 15.7}),
    (devices.A100, 1, 80e9, 2039, 600, {"bfloat16": 312, "float32": 19.5}),
    (devices.A100_PCIE, 1, 80e9, 1935, 63, {"float16": 312, "float32": 19.5}),
    (devices.A10, 1, 24e9, 600, 63, {"bfloat16": 125, "float32": 31.2}),
    (devices.H100, 1, 80e9, 3350, 900, {"bfloat16": 989.4, "float32": 66.9}),
    (devices.H200, 1, 141e9, 4800, 900, {"bfloat16": 989.4, "float32": 66.9}),
    (devices.B200, 1, 180e9, 8000, 1800, {"bfloat16": 2250}),
    (devices.MI250X_GCD, 2, 128 * 2**30, 3200, 800,
     {"bfloat16": 383, "float32": 47.9}),
  ], ids=lambda value: getattr(value, "name", None),
)
def test_devices_have_the_figures_of_their_data_sheets(
  device, parts, size_bytes, gbytes_s, link_gbytes_s, teraflops
):
  close = functools.partial(pytest.approx, rel=2e-3)
  assert parts * device.memory_bytes == size_bytes
  assert parts * device.memory_bandwidth / 1e9 == close(gbytes_s)
  links_both_ways = 2 * device.num_links * device.link.bandwidth
  assert parts * links_both_ways / 1e9 == close(link_gbytes_s)
  for dtype, rate in teraflops.items():
    assert parts * device.peak(dtype) / 1e12 == close(rate)
  assert device.platform == (
    "tpu" if device.name in slices.SLICE_RULES else "gpu"
  )


def test_dtypes_without_a_rate_have_the_one_of_bfloat16():
  v5e, v100 = devices.TPU_V5E, devices.V100
  for device, dtype in (
    (v5e, "float32"), (v5e, "float16"), (v100, "float16"), (v100, "int8")
  ):
    assert device.peak(dtype) == device.peak("bfloat16")


@pytest.mark.parametrize(("kind", "gbits_s"), [
  # Bits per second of one direction, by standard or data sheet.
  ("pcie_4", 16 * 16 * 128 / 130), ("pcie_5", 32 * 16 * 128 / 130),
  ("infiniband_edr", 100), ("infiniband_hdr", 200), ("infiniband_ndr", 400),
  ("slingshot_11", 200), ("ethernet_1g", 1), ("ethernet_10g", 10),
  ("ethernet_100g", 100), ("wide_area_10g", 10), ("lte_uplink", 0.05),
  ("wifi_6", 0.6005), ("fabric_gcd_pair", 8 * 200), ("fabric_node", 8 * 50),
  ("fabric_host", 8 * 36),
])
def test_links_have_the_rates_of_their_standards(kind, gbits_s):
  assert 8 * links.KINDS[kind].bandwidth / 1e9 == pytest.approx(gbits_s)


def test_only_the_wide_area_link_has_a_latency():
  """Light takes 27.3 ms for 5,570 km in fibre; no other latency is published"""
  latencies = {name: kind.latency_s for name, kind in links.KINDS.items()}
  assert latencies.pop("wide_area_10g") == pytest.approx(27.27e-3, rel=1e-3)
  assert set(latencies.values()) == {None}


@pytest.mark.parametrize("thing", [*LINKS, *devices.DEVICES.values()],
                         ids=lambda t: t.name)
def test_confidence_has_a_known_value(thing):
  known = {
    "Infinity Fabric, node": "range", "mi250x-gcd": "reported",
  }
  assert thing.confidence == known.get(thing.name, "published")


def test_nvlinks_add_up_to_the_bandwidth_of_a_gpu():
  """A V100 has 6 NVLinks, an A100 12, later GPUs 18."""
  assert set(cluster_imports.NVLINK_RATES) == {
    "v100", "a100", "h100", "h200", "b200"
  }
  for name, rate in cluster_imports.NVLINK_RATES.items():
    count = {"v100": 6, "a100": 12}.get(name, 18)
    assert count * rate == devices.DEVICES[name].link.bandwidth


@pytest.mark.parametrize("name", ["pipette-v100", "pipette-a100"])
def test_eight_devices_of_pipette_share_an_adapter(name):
  cluster = clusters.CLUSTERS[name]
  node, network = cluster.levels
  assert f"{network.size} nodes of {node.size}" in cluster.source
  assert node.size * network.links_per_device == 1


def test_frontier_has_its_published_structure():
  """Nodes have four packages of two GCDs and four network adapters."""
  package, node, system = clusters.FRONTIER.levels
  assert (package.size, node.size, system.size) == (2, 4, 9408)
  assert package.size * node.size * system.links_per_device == 4
  assert package.links_per_device == node.links_per_device == 1


@pytest.mark.parametrize(("host", "gbytes_s"), [
  ("dgx-a100", 31.5), ("dgx-h100", 63.0), ("frontier", 36.0),
])
def test_hosts_have_the_bandwidth_of_their_bus(host, gbytes_s):
  link = tiers.HOSTS[host].device_link
  for rate in (link.read, link.write):
    assert rate.value / 1e9 == pytest.approx(gbytes_s, rel=1e-3)


@pytest.mark.parametrize("device", devices.DEVICES.values(),
                         ids=lambda d: d.name)
def test_half_the_bits_double_the_peak(device):
  """Exception: on a TPU v4, int8 is as fast as bfloat16."""
  for dtype in set(device.flops) & {"int8", "float8_e4m3fn"}:
    ratio = device.peak(dtype) / device.peak("bfloat16")
    wanted = 1 if device is devices.TPU_V4 else 2
    assert ratio == pytest.approx(wanted, rel=3e-3)


@pytest.mark.parametrize("name", ["v4", "v5p", "tpu7x"])
def test_largest_slice_is_the_one_of_its_source(name):
  found = slices.SLICE_RULES[name]
  assert f"{found.max_chips:,} chips" in found.source
  assert found.max_chips % 4**3 == 0  # whole cubes


@pytest.mark.parametrize(
  ("generation", "topology", "reason"),
  [
    ("v5e", (16, 16), None), ("v6e", (4, 2), None), ("v4", (12, 12, 24), None),
    ("v5p", (2, 2, 1), None), ("v5p", (16, 16, 24), None),
    ("tpu7x", (16, 16, 36), None),
    ("v5e", (2, 2, 2), "2 dims"), ("v5p", (4, 4), "3 dims"),
    ("v5e", (16, 32), "256 chips, not 512"), ("v6e", (3, 4), "2x2, 2x4"),
    ("v5p", (16, 20, 20), "6144 chips, not 6400"),
    ("v4", (1, 4, 3), None), ("v4", (5, 5, 5), "multiples of 4"),
    ("v4", (4, 4, 6), "multiples of 4"), ("v4", (2, 4, 8), "multiples of 4"),
  ],
)
def test_only_existing_slices_are_accepted(generation, topology, reason):
  found = slices.SLICE_RULES[generation].refusal(topology)
  assert reason in found if reason else found is None


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200"])
def test_clusters_have_nodes_of_eight_and_the_published_node_count(name):
  node, network = clusters.CLUSTERS[name].levels
  assert node.size == 8
  assert f"{network.size:,} nodes" in clusters.CLUSTERS[name].source


def test_racks_have_the_published_totals():
  """Compares with NVIDIA's data sheets of a GB200 NVL72 and a DGX H100."""
  gb200, h100 = sites.RACKS["gb200"], sites.RACKS["h100"]
  # 1,440, 720 and 360 PFLOPS with sparsity, 13.4 TB, 130 TB/s of NVLink.
  for dtype, petaflops in (("fp4", 1440), ("fp8", 720), ("bf16", 360)):
    dense = gb200.per_rack * gb200.flops[dtype]
    assert dense == pytest.approx(petaflops * 1e15 / 2)
  assert gb200.per_rack * gb200.memory_bytes == pytest.approx(13.4e12, rel=2e-3)
  both_ways = 2 * gb200.per_rack * gb200.scale_up_bits / 8
  assert both_ways == pytest.approx(130e12, rel=5e-3)
  # Derived from outputs of arXiv 2407.12819: 154.5 kW for 120.
  assert gb200.rack_w * gb200.overhead == pytest.approx(154.5e3)
  assert gb200.rack_price / gb200.per_rack == pytest.approx(41_725)
  assert gb200.scale_out_bits == 400e9  # one adapter each
  # Four nodes of eight; a node draws 10.2 kW and costs 350,000 dollars.
  assert h100.per_rack == 4 * 8
  assert h100.rack_w == pytest.approx(40.8e3)
  assert h100.rack_price == pytest.approx(4 * 350e3)
  device = devices.H100
  assert h100.flops["bf16"] == pytest.approx(device.peak("bfloat16"), rel=1e-3)
  assert h100.memory_bytes == device.memory_bytes
  assert h100.scale_up_bits == pytest.approx(8 * device.link.bandwidth)
  network = clusters.CLUSTERS["h100"].levels[1].link
  assert h100.scale_out_bits == pytest.approx(8 * network.bandwidth)
  for rack in sites.RACKS.values():
    assert rack.flops["fp8"] == pytest.approx(2 * rack.flops["bf16"], rel=1e-3)
    assert rack.scale_up_bits > 2 * rack.scale_out_bits
    assert 1 < rack.overhead < 1.5
    fields = {f.name for f in dataclasses.fields(rack)}
    assert set(rack.sources) - {"peak"} == fields - {"name", "flops", "sources"}


def test_sites_have_equal_power():
  east, west = sites.SITES["east"], sites.SITES["west"]
  assert east.power_w == west.power_w == 2.4e9


def test_interruptions_have_the_published_shares():
  """The Llama 3 Herd of Models, table 5: 419 in 54 days, and percentages.

  The table's 30.1% for 148 faulty GPUs contradicts that count, which the total
  requires; the row is omitted here.
  """
  found = sites.INTERRUPTIONS
  assert sum(found.values()) == 419
  published = {
    "GPU memory": 17.2, "software": 12.9, "network switch or cable": 8.4,
    "host maintenance": 7.6, "GPU SRAM": 4.5,
    "GPU system processor": 4.1, "network adapter": 1.7, "NCCL watchdog": 1.7,
    "silent corruption": 1.4, "GPU temperature": 1.4,
  }
  for cause, percent in published.items():
    assert 100 * found[cause] / 419 == pytest.approx(percent, abs=0.06)
  assert sites.OBSERVED_GPUS == 2**14
  assert sites.OBSERVED_HOURS == 1296
  named = {*sites.NETWORK_CAUSES, *sites.SOFTWARE_CAUSES}
  assert named <= set(found)
  assert len(named) == 5


def test_liquid_cooling_needs_less_power_than_air_cooling():
  factors = {name: factor for name, (factor, _) in sites.COOLING.items()}
  assert 1 < factors["fleet"] < factors["liquid"] < factors["air"] < 2
  assert 1.156 <= factors["liquid"] <= 1.308  # range in the source


def test_slice_shapes_double_from_four_chips_to_the_largest():
  """Shapes of v5e and v6e double the short dim of the previous shape."""
  for name in ("v5e", "v6e"):
    found = slices.SLICE_RULES[name]
    for (a, b), (c, d) in itertools.pairwise(found.shapes):
      assert sorted((2 * a, b)) == [c, d]
    assert math.prod(found.shapes[0]) == 4
    assert math.prod(found.shapes[-1]) == found.max_chips == 256


@pytest.mark.parametrize(("generation", "sizes"), [
  ("v4", {4, 8, 12, 16}), ("v5p", {4, 8, 12, 16}), ("tpu7x", {4, 8, 12, 16}),
  ("v5e", {16}), ("v6e", {16}),
])
def test_dims_that_close_into_a_ring(generation, sizes):
  closes = slices.SLICE_RULES[generation].wraps_around
  assert {size for size in range(1, 17) if closes(size)} == sizes


def test_torus_of_chips_uses_the_links_of_its_dims():
  """A part of a ring has one link, a closed ring two, a single chip none."""
  link = devices.TPU_V5E.link
  for shape, farthest, num_links in (
    ((16, 16), 16, 4), ((16, 1), 8, 2), ((4, 4), 6, 2), ((4, 1), 3, 1),
    ((1, 1), 0, 1),
  ):
    found = collective_times.on_torus("v5e", link, (16, 16), shape)
    n = math.prod(shape)
    assert found == collective_times.TorusTimeModel(
      (farthest, 2 * (n - 1)), n, num_links * link.bandwidth
    )


def test_bytes_on_a_torus_add_the_time_of_a_ring_all_reduce():
  """Each chip sends 2 (n - 1) / n of the operand."""
  times = collective_times.on_torus("v5e", links.ICI_V5E, (4, 2), (4, 2))
  assert times.mark == "assumption"
  assert "1 us per hop" in times.source
  bare, loaded = times.all_reduce(0), times.all_reduce(8e9)
  for a, b in zip(bare, loaded, strict=True):
    assert b - a == pytest.approx(2 * 7 / 8 * 8e9 / times.rate)


SAMPLES = collective_times.read_measured_tables()
each_sample = pytest.mark.parametrize("sample", SAMPLES.values(), ids=str)


@each_sample
def test_larger_messages_take_longer(sample):
  assert "vidur" in sample.source
  for a, b in itertools.pairwise(sample.spans):
    assert 0 < a.least <= b.least
    assert a.greatest <= b.greatest
  assert all(s.least <= s.greatest for s in sample.spans)


@each_sample
def test_times_are_interpolated_and_bounded_by_the_measured_sizes(sample):
  """Linear on log scales; constant below the first size, undefined above."""
  for i, (a, b) in enumerate(itertools.pairwise(sample.sizes)):
    left, right = sample.spans[i : i + 2]
    middle = sample.all_reduce(math.sqrt(a * b))
    for x, y, z in zip(left, middle, right, strict=True):
      assert y == pytest.approx(math.sqrt(x * z))
    assert sample.all_reduce(a) == pytest.approx(left)
  assert sample.all_reduce(1) == pytest.approx(sample.spans[0])
  with pytest.raises(ValueError, match="is larger than the largest measured"):
    sample.all_reduce(sample.sizes[-1] + 1)


@settings(max_examples=50)
@given(st.lists(
  st.tuples(st.integers(1, 10**6), st.integers(1, 10**5)), min_size=2,
  unique_by=lambda m: m[0],
))
def test_reduced_sample_bounds_the_measured_times(messages):
  """A message can be sent as a larger one, and noise only adds time."""
  rows = [("n", 2, size, t / 1e3) for size, t in messages]
  found = collective_times.resample_times(rows)
  for *_, size, least, greatest in found:
    larger = [t for s, t in messages if s >= size]
    smaller = [t for s, t in messages if s <= size]
    assert least <= min(larger) * (1 + 1e-9)
    assert greatest >= max(smaller) * (1 - 1e-9)
    assert min(t for _, t in messages) * (1 - 1e-9) <= least <= greatest
  for a, b in itertools.pairwise(found):
    assert a[3] <= b[3] * (1 + 1e-9)


def test_noise_free_sample_is_reproduced():
  rows = [("n", 4, 2**i, 3.0**i / 1e3) for i in range(12)]
  for i, (network, workers, size, *ends) in enumerate(
    collective_times.resample_times(reversed(rows))
  ):
    assert (network, workers, size) == ("n", 4, 2**i)
    assert ends == pytest.approx([3.0**i, 3.0**i])


def test_written_sample_contains_the_reduced_times(tmp_path):
  """Times are whole microseconds; a group has the powers of two in its range.
  """
  rows = [
    (network, n, size, (size / 1e4 + n) / 1e3)
    for network, n in (("a", 2), ("b", 4)) for size in (3000, 40_000, 70_000)
  ]
  path = tmp_path / "times.csv"
  collective_times.write_sample(rows, path)
  lines = [x for x in path.read_text().splitlines() if not x.startswith("#")]
  assert len(path.read_text().splitlines()) == len(lines) + 2
  found = list(csv.DictReader(lines))
  assert [(r["network"], int(r["num_workers"])) for r in found] == (
    [("a", 2)] * 5 + [("b", 4)] * 5
  )
  assert [int(r["size_bytes"]) for r in found[:5]] == [
    2**power for power in range(12, 17)
  ]
  for row, (*_, least, greatest) in zip(
    found, collective_times.resample_times(rows), strict=True
  ):
    assert abs(float(row["least_us"]) - least) <= 0.5
    assert abs(float(row["greatest_us"]) - greatest) <= 0.5


def test_committed_sample_is_read_with_its_units():
  """Two H100s need 7 us for 2 KiB and 245 to 246 us for 64 MiB."""
  pair = SAMPLES["h100_dgx", 2]
  assert pair.sizes == tuple(2**power for power in range(11, 27))
  assert pair.spans[0] == pytest.approx((7e-6, 7e-6))
  assert pair.spans[-1] == pytest.approx((245e-6, 246e-6))


@pytest.mark.parametrize(
  ("network", "workers", "least", "most"),
  [
    ("h100_dgx", 8, NVLINK_4.bandwidth / 2, NVLINK_4.bandwidth),
    ("a100_pairwise_nvlink", 2, NVLINK_3.bandwidth / 2, NVLINK_3.bandwidth),
    ("a100_pairwise_nvlink", 4, PCIE_4.bandwidth / 2, PCIE_4.bandwidth),
    # Named after one machine with an NVLink switch, but ran over a network.
    ("a100_dgx", 8, INFINIBAND_HDR.bandwidth / 2, INFINIBAND_HDR.bandwidth),
  ],
)
def test_measured_bandwidth_matches_the_link_of_the_sample(
  network, workers, least, most
):
  """Infers the bandwidth from the bytes of a 64 MiB ring all-reduce."""
  time = SAMPLES[network, workers].all_reduce(2**26).least
  assert least < 2 * (workers - 1) / workers * 2**26 / time < most


def test_extrapolation_to_other_links_is_marked_as_an_assumption():
  switch = collective_times.times_between_gpus(NVLINK_4, 8)
  assert switch.mark == "measured"
  pair = collective_times.times_between_gpus(NVLINK_3, 2)
  assert pair is SAMPLES["a100_pairwise_nvlink", 2]
  assert collective_times.times_between_gpus(PCIE_4, 4) is SAMPLES[
    "a100_pairwise_nvlink", 4
  ]
  slower = collective_times.times_between_gpus(NVLINK_3, 8)
  four, bus = (collective_times.times_between_gpus(PCIE_4, n) for n in (4, 8))
  assert slower.mark == bus.mark == "assumption"
  for size in (2**12, 2**20, 2**26):
    span, reference = slower.all_reduce(size), switch.all_reduce(size)
    assert span.least == pytest.approx(reference.least)
    assert span.greatest == pytest.approx(1.5 * reference.greatest)
    # 14 steps of an eighth, compared with 6 steps of a quarter for four ranks.
    assert bus.all_reduce(size) == pytest.approx(
      (7 / 6 * four.all_reduce(size).least,
       7 / 3 * four.all_reduce(size / 2).greatest)
    )
  for link, workers in (
    (NVLINK_4, 6), (NVLINK_3, 6), (PCIE_4, 2), (PCIE_4, 3), (INFINIBAND_HDR, 8)
  ):
    with pytest.raises(ValueError, match="were not measured"):
      collective_times.times_between_gpus(link, workers)


@pytest.mark.parametrize(
  ("generation", "whole", "part"),
  [
    ("v5p", (2, 2, 2), (2, 2, 2)), ("v5p", (4, 4, 8), (4, 4, 8)),
    ("v5p", (4, 4, 4), (4, 2, 1)), ("v6e", (2, 4), (2, 4)),
    ("v6e", (16, 16), (16, 1)),
  ],
)
def test_torus_hops_equal_those_of_its_graph(generation, whole, part):
  closed = [
    n == w and slices.SLICE_RULES[generation].wraps_around(w)
    for w, n in zip(whole, part, strict=True)
  ]
  graph = nx.grid_graph(part[::-1], periodic=closed[::-1])
  link = links.ICI_V5P
  times = collective_times.on_torus(generation, link, whole, part)
  assert times.hops == (nx.diameter(graph), 2 * (math.prod(part) - 1))
  ports = sum((n > 1) * (1 + c) for n, c in zip(part, closed, strict=True))
  assert times.rate == ports * link.bandwidth
  assert times.all_reduce(0) == pytest.approx([h * 1e-6 for h in times.hops])
