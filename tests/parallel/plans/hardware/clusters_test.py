"""Clusters as link matrices: files, examples, imports and refusals."""

import dataclasses
import json
import math

import numpy as np
import pytest

from parallel.base import schema
from parallel.plans.hardware import cluster_files, cluster_imports, link_matrix
from parallel.plans.hardware.clusters import CLUSTERS, Cluster, Level
from parallel.plans.hardware.devices import A10, A100, H100, V100, Device
from parallel.plans.hardware.links import (
  ETHERNET_10G,
  INFINIBAND_HDR,
  PCIE_4,
  WIDE_AREA_10G,
)

# Output of `nvidia-smi topo -m`, with its underlined header.
TOPO = (
  "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity"
  "\tGPU NUMA ID\x1b[0m\n"
  "GPU0\t X \tNV12\tSYS\tSYS\tPXB\t48-63,176-191\t3\t\tN/A\n"
  "GPU1\tNV12\t X \tSYS\tSYS\tPXB\t48-63,176-191\t3\t\tN/A\n"
  "GPU2\tSYS\tSYS\t X \tNV12\tSYS\t16-31,144-159\t1\t\tN/A\n"
  "GPU3\tSYS\tSYS\tNV12\t X \tSYS\t16-31,144-159\t1\t\tN/A\n"
  "NIC0\tPXB\tPXB\tSYS\tSYS\t X \t\t\t\t\n\n"
  "Legend:\n\n  X    = Self\n"
  "  NV#  = Connection traversing a bonded set of # NVLinks\n\n"
  "NIC Legend:\n\n  NIC0: mlx5_0\n"
)
# Output of sendrecv_perf; the times follow from 30 us and 5 GB/s.
NCCL = """\
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 67108864 step: 8(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid 1478709 on      {0} device  {1} [0x31] NVIDIA A40
#  Rank  1 Group  0 Pid 1171742 on      {2} device  {3} [0x31] NVIDIA A40
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1   239.72    4.37    4.37      0   240.11    4.37    4.37    N/A
     8388608       2097152     float     sum      -1  1707.72    4.91    4.91      0  1708.02    4.91    4.91    N/A
    67108864      16777216     float     sum      -1 13451.77    4.99    4.99      0 13452.02    4.99    4.99    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 4.7567
"""  # noqa: E501


# A device that is not in the registry.
DEVICE = {
  "name": "mine", "flops": {"float32": 1e13, "int8": 4e13},
  "memory_bytes": 3_000_000_000, "memory_bandwidth": 2e11, "source": "a test",
}


def _file(**changes):
  found = {
    "name": "two", "source": "a test", "mark": "drawn", "device": "a100",
    "nodes": [1, 1], "rows": "device", "bandwidth": [[None, 2e9], [1e9, None]],
    "latency_s": 1e-5,
  }
  return found | changes


def test_file_round_trips(tmp_path):
  links = cluster_files.cluster("frontier:3,uneven=4")
  path = tmp_path / "a.json"
  path.write_text(cluster_files.to_json(links))
  again = cluster_files.cluster(str(path))
  for key in ("bandwidth", "latency_s"):
    np.testing.assert_allclose(getattr(again, key), getattr(links, key), 1e-5)
  assert (again.nodes, again.device) == (links.nodes, links.device)


@pytest.mark.parametrize("nodes", [[1, 1], [2, 3], [1]], ids=str)
@pytest.mark.parametrize("device", ["v100", DEVICE], ids=["known", "other"])
def test_written_object_equals_the_read_one(nodes, device):
  n = sum(nodes)
  matrix = [[None if i == j else 1e9 + 1e5 * (i + 10 * j) for j in range(n)]
            for i in range(n)]
  latency = [[None if i == j else (1 + i) / 8 for j in range(n)]
             for i in range(n)]
  given = _file(
    nodes=nodes, device=device, bandwidth=matrix, latency_s=latency
  )
  links = cluster_files.from_json(given)
  # A rate of bfloat16 is added, the default of other dtypes.
  flops = DEVICE["flops"] | {"bfloat16": 4e13}
  assert json.loads(cluster_files.to_json(links)) == given | {
    "device": device if device == "v100" else device | {"flops": flops}
  }
  again = cluster_files.from_json(json.loads(cluster_files.to_json(links)))
  assert again.device == links.device
  assert again.nodes == links.nodes


def test_device_of_a_file_has_its_own_figures():
  found = cluster_files.from_json(_file(device=DEVICE)).device
  assert isinstance(found, Device)
  assert (found.name, found.source) == ("mine", "a test")
  assert found.memory_bytes == 3e9
  assert found.memory_bandwidth == 2e11
  assert found.peak("float32") == 1e13
  # Dtypes without a rate have the fastest one, as bfloat16 has.
  assert found.peak("bfloat16") == found.peak("int8") == 4e13
  flops = {"float32": 2e13, "bfloat16": 1e13}
  other = cluster_files.from_json(_file(device=DEVICE | {"flops": flops}))
  assert other.device.peak("bfloat16") == 1e13
  assert found.platform == "gpu"
  assert found.overhead_s == 0
  device = DEVICE | {"overhead_s": 2e-6}
  links = cluster_files.from_json(_file(device=device))
  again = cluster_files.from_json(json.loads(cluster_files.to_json(links)))
  assert again.device.overhead_s == 2e-6


def test_devices_of_several_kinds_are_written_and_read():
  """A program with equal shards sees the least of each rate."""
  given = _file(nodes=[2, 2], bandwidth=1e9, others=[
    {"devices": [1], "slowdown": 1.5}, {"devices": [3], "device": "h100"},
    {"devices": [0], "device": DEVICE | {"overhead_s": 2e-6}, "slowdown": 2.0},
  ])
  links = cluster_files.from_json(given)
  half = {"float32": DEVICE["flops"]["float32"] / 2}
  assert links.per_device(lambda x: x.peak("float32")).tolist() == [
    half["float32"], 13e12, 19.5e12, H100.peak("float32")
  ]
  assert links.device.memory_bytes == min(DEVICE["memory_bytes"], 80e9)
  assert links.per_device(lambda x: x.memory_bandwidth).tolist() == [
    1e11, A100.memory_bandwidth / 1.5, A100.memory_bandwidth,
    H100.memory_bandwidth,
  ]
  assert links.device.memory_bandwidth == 1e11
  assert links.device.overhead_s == 4e-6  # the longest, of the slow one
  assert links.device.peak("float32") == half["float32"]
  assert links.device.peak("bfloat16") == 2e13
  again = cluster_files.from_json(json.loads(cluster_files.to_json(links)))
  assert cluster_files.to_json(again) == cluster_files.to_json(links)
  assert [x.name for x in again.devices] == [x.name for x in links.devices]
  assert links.part([1, 3]).devices == (links.devices[1], links.devices[3])
  alone = links.part([3])
  assert (alone.devices, alone.device) == ((), H100)
  same = cluster_files.from_json(_file(others=[{"devices": [0, 1]}]))
  assert same.devices == ()
  for others, message in (
    ([{"devices": [1], "device": "v5e"}], "must all be GPUs or all be TPUs"),
    ([{"devices": [2], "slowdown": 2.0}], "others.devices=2 must lie in .0, 2"),
    ([{"devices": [1], "device": DEVICE | {"name": "a100"}}], "same name"),
  ):
    with pytest.raises(ValueError, match=message):
      cluster_files.from_json(_file(others=others))


def test_nodes_of_two_kinds_share_the_slower_adapter():
  links = cluster_files.cluster("h100:2+a100:1,slow=(3,1.5)")
  alone = cluster_files.cluster("h100:2"), cluster_files.cluster("a100:1")
  assert links.nodes == (0,) * 8 + (1,) * 8 + (2,) * 8
  np.testing.assert_array_equal(links.bandwidth[:16, :16], alone[0].bandwidth)
  np.testing.assert_array_equal(links.bandwidth[16:, 16:], alone[1].bandwidth)
  across = cluster_files.cluster("a100:2")
  assert {*links.bandwidth[:16, 16:].flat, *links.bandwidth[16:, :16].flat} == {
    across.bandwidth[0, 8]
  }
  assert {*links.latency_s[:16, 16:].flat} == {14e-6}
  rates = links.per_device(lambda x: x.peak("bfloat16")) / 1e12
  assert rates == pytest.approx([989.5 / 1.5 if i == 3 else 989.5
                                 for i in range(16)] + [312] * 8, rel=1e-3)
  assert links.mark == "assumption"


def test_nodes_of_two_kinds_share_the_longer_latency_and_an_adapter():
  """Two devices of the second kind share an adapter over the wide area."""
  far = Cluster("far", A100, (
    Level("site", 2, PCIE_4), Level("world", 4, WIDE_AREA_10G, 1 / 2),
  ), "a test")
  links = link_matrix.joined([(CLUSTERS["h100"], 1), (far, 2)])
  assert links.name == "h100:1 + far:2"
  assert links.nodes == (0,) * 8 + (1, 1, 2, 2)
  for pair in ((0, 8), (11, 7), (8, 10)):
    assert links.bandwidth[pair] == WIDE_AREA_10G.bandwidth / 2
    assert links.latency_s[pair] == WIDE_AREA_10G.latency_s
  assert links.latency_s[0, 7] == 3.4e-6
  assert links.latency_s[8, 9] == 5.7e-6
  assert link_matrix.slow_down_devices(
    links, {9: 2.0, 0: 3.0}
  ).name.endswith(", 2 slow")


def test_part_with_a_gap_between_nodes_is_written_with_its_counts():
  links = cluster_files.cluster("a100:3").part([0, 16, 17])
  assert links.nodes == (0, 2, 2)
  found = json.loads(cluster_files.to_json(links))
  assert found["nodes"] == [1, 2]
  assert found["rows"] == "device"
  assert found["bandwidth"][0][0] is None


def test_rows_are_sources_and_columns_are_destinations():
  """An asymmetric matrix has a bandwidth per direction."""
  links = cluster_files.from_json(_file())
  seconds = links.seconds(1e9)
  assert seconds[0, 1] == pytest.approx(0.5 + 1e-5)
  assert seconds[1, 0] == pytest.approx(1 + 1e-5)
  assert seconds[0, 0] == 0


def test_node_rows_apply_to_all_devices_of_the_node():
  by_node = cluster_files.from_json(_file(
    nodes=[2, 1], rows="node", bandwidth=[[9e9, 2e9], [1e9, 7e9]]
  ))
  assert by_node.bandwidth.tolist() == [
    [math.inf, 9e9, 2e9], [9e9, math.inf, 2e9], [1e9, 1e9, math.inf]
  ]


@pytest.mark.parametrize(("changes", "message"), [
  ({"bandwidth": [[None, 2e9], [None, None]]}, r"bandwidth\[1\]\[0\] is miss"),
  ({"bandwidth": [[None, 0], [1e9, None]]}, r"\[0\]\[1\]=0, .* be positive"),
  ({"bandwidth": [[None, -1], [1e9, None]]}, "must be positive"),
  ({"bandwidth": [[None, 2e9]]}, "has 1 rows whose lengths are .2.; it must"),
  ({"bandwidth": [[None, 2e9], [1e9]]}, r"lengths are \[1, 2\]"),
  ({"latency_s": [[0, -1e-6], [0, 0]]}, "latency_s.* at least 0"),
  ({"nodes": [10_000], "rows": "node", "bandwidth": [[1e9]]},
   "10,000 devices are more than 4,096"),
  ({"nodes": [1, 0]}, r"nodes\[1\]=0 must be greater than or equal"),
  ({"device": "a101"}, "did you mean a10"),
  ({"device": {"name": "mine"}}, "device.flops is missing; keys are name"),
  ({"device": DEVICE | {"memory_bytes": 0}}, "memory_bytes=0 must be greater"),
  ({"device": DEVICE | {"memory_bandwidth": 0}}, "memory_bandwidth=0 must be"),
  ({"device": DEVICE | {"flops": {"int8": -1}}}, "flops.int8=-1 must be"),
  ({"nodes": []}, r"nodes=\[\] must have a number"),
  ({"mark": "guess"}, "mark=\"guess\" must be 'measured'"),
  ({"rows": "rack"}, "rows=\"rack\" must be 'device' or 'node'"),
  ({"device": DEVICE | {"overhead_s": -1}}, "device.overhead_s=-1 must be gr"),
  ({"device": DEVICE | {"flops": {}}}, "device.flops={} must have the rate"),
  ({"nodes": [10**9]}, "1,000,000,000 devices are more than 4,096"),
  ({"residuals": [101.0]}, r"residuals\[0\]=101.0 must be less than or equ"),
  ({"family": {"a": []}}, "family.a must satisfy: list should have at least 1"),
  ({"widening": -0.5}, "widening=-0.5 must be greater"),
  ({"residuals": [-101.0]}, r"residuals\[0\]=-101.0 must be greater than or"),
])
def test_invalid_cluster_file_is_refused(tmp_path, changes, message):
  path = tmp_path / "wrong.json"
  path.write_text(json.dumps(_file(**changes)))
  with pytest.raises(ValueError, match=message) as error:
    cluster_files.read(path)
  assert str(path) in str(error.value)


def test_residuals_of_predictions_are_optional():
  given = _file(nodes=[1, 1])
  assert cluster_files.from_json(given).residuals == ()
  links = cluster_files.from_json(given | {"residuals": [-0.25, 0.5]})
  assert links.residuals == (-0.25, 0.5)
  assert (links.family, links.widening) == ({}, math.inf)
  family = {"parallel.tensor": [1.0, 4.0], "zero.scheme": ["ddp"]}
  named = {"residuals": [0.5], "family": family, "widening": 0.25}
  other = cluster_files.from_json(given | named)
  assert other.family == family
  for made in (links, other):
    again = cluster_files.from_json(json.loads(cluster_files.to_json(made)))
    for key in ("residuals", "family", "widening"):
      assert getattr(again, key) == getattr(made, key)


@pytest.mark.parametrize("key", _file())
def test_every_key_of_a_cluster_file_is_required(key):
  with pytest.raises(ValueError, match=f"^{key} is missing; keys are name"):
    cluster_files.from_json({k: v for k, v in _file().items() if k != key})


def test_nested_brackets_and_large_files_are_refused(tmp_path):
  path = tmp_path / "deep.json"
  path.write_text(100_000 * "[" + 100_000 * "]")
  with pytest.raises(ValueError, match="is not JSON: recursion limit"):
    cluster_files.read(path)
  with pytest.raises(ValueError, match="has more than 9 bytes"):
    schema.read(schema.Schema, path, 9)


def test_a_cluster_may_have_4096_devices():
  """The matrices are refused for their shape, before they are large."""
  def made(n):
    empty = np.empty((0, 0))
    return link_matrix.LinkMatrix(
      "", A100, (0,) * n, empty, empty, "", "published"
    )

  with pytest.raises(ValueError, match="bandwidth has shape 0 x 0; it must be"):
    made(4096)
  with pytest.raises(ValueError, match=r"take 0\.3 GB"):
    made(4097)
  large = Cluster("large", A100, (Level("node", 10**6, PCIE_4),), "a test")
  with pytest.raises(ValueError, match=r"two matrices would take 16000\.0 GB"):
    link_matrix.of_cluster(large, 10**6)


@pytest.mark.parametrize(("text", "message"), [
  ("a100", "as in a100:2"), ("a100:1025", "1 to 1,024 groups"),
  ("a100:2,uneven=-1", "uneven=-1 must be an integer, at least 0"),
  ("a100:2,uneven=x", "uneven='x' must be an integer, at least 0"),
  ("a100:2,uneven=1e99", r"uneven=1e\+99 must be an integer, at least 0"),
  ("a100:²", "as in a100:2"),
  ("a100:0", "1 to 1,024 groups"),
  ("a100:2,slow=3", r"slow=3 must be the index of .* as in slow=\(3,1.5\)"),
  ("a100:2,slow=(1.5,2)", r"slow=\(1.5, 2\) must be the index of a device and"),
  ("a100:2,slow=(1,2,3)", r"slow=\(1, 2, 3\) must be the index of a device"),
  ("a100:2,slow=ab", "slow='ab' must be the index of a device and"),
  ("a100:2,slow=(16,2)", "device 16 must be one of 0 to 15"),
  ("a100:2,slow=(1,0)", "slowdown 0 of .* must lie in"),
  ("a100:2,slow=(1,1e300)", r"slowdown 1e\+300 of .* must lie"),
  ("a100:2+", "cluster='a100:2[+]': '' must be one of"),
  ("a100:2+a100-pcie:2", "'a100-pcie' has one level"),
  ("a100:2+h100", "as in h100:2"),
  ("a200:2", "did you mean h200"), ("a100:2,even=1", "'even' must be one of"),
  ("h100:1024", "8,192 devices are more than 4,096"),
])
def test_invalid_example_is_refused(text, message):
  with pytest.raises(ValueError, match=message):
    cluster_files.cluster(text)


@pytest.mark.parametrize("name", CLUSTERS)
def test_example_has_the_bandwidths_of_its_levels(name):
  """The innermost group with both devices determines their bandwidth."""
  cluster = CLUSTERS[name]
  links = cluster_files.cluster(f"{name}:2")
  first, last = cluster.levels[0], cluster.levels[-1]
  assert links.bandwidth[0, 1] == first.link.bandwidth * first.links_per_device
  assert links.bandwidth[0, -1] == last.link.bandwidth * last.links_per_device
  assert (np.isfinite(links.bandwidth) != np.eye(links.num_devices)).all()


def test_levels_have_their_published_latencies_or_those_of_nccl():
  """NCCL's hwLat of a ring, Simple: NVLink 3.4 us, PCIe 5.7, network 14.

  The outermost level is the network, unless it is the only one.
  """
  for name, inside, outside in (
    ("a100:2", 3.4e-6, 14e-6), ("frontier:2", 3.4e-6, 14e-6),
    ("a100-pcie:8", 5.7e-6, 5.7e-6),
  ):
    latency_s = cluster_files.cluster(name).latency_s
    assert latency_s[0, 1] == inside
    assert latency_s[0, -1] == outside
  frontier = cluster_files.cluster("frontier:2")
  assert frontier.latency_s[0, 2] == 3.4e-6  # another package of the node
  assert frontier.nodes == (0,) * 8 + (1,) * 8
  alone = cluster_files.cluster("a100-pcie:3")
  assert alone.nodes == (0,) * 3
  far = link_matrix.of_cluster(Cluster("sites", H100, (
    Level("site", 2, ETHERNET_10G), Level("world", 3, WIDE_AREA_10G)
  ), "a test"), 2)
  assert far.latency_s[0, [1, 2]].tolist() == [3.4e-6, WIDE_AREA_10G.latency_s]
  assert far.name == "sites:2"
  assert far.mark == "published"


def test_uneven_links_are_only_slower():
  even = cluster_files.cluster("pipette-a100:4")
  drawn = link_matrix.randomize_bandwidths(even, 1)
  other = np.ones_like(even.bandwidth) - np.eye(32) > 0
  share = drawn.bandwidth[other] / even.bandwidth[other]
  assert 0.22 < share.min() < 0.5
  assert 0.9 < share.max() <= 1
  assert drawn.mark == "drawn"
  # Each pair of nodes has one share, reduced by up to 5% twice per direction.
  nodes = np.array(even.nodes)
  inside = (nodes[:, None] == nodes) & other
  ratio = drawn.bandwidth / even.bandwidth.clip(max=1e30)
  assert ratio[inside].min() >= 0.95
  assert ratio[inside].max() <= 1
  both = drawn.bandwidth[inside] / drawn.bandwidth.T[inside]
  assert 1 < both.max() < 0.95**-2
  for a in range(4):
    for b in range(a):
      pair = ratio[np.ix_(nodes == a, nodes == b)]
      assert pair.min() >= 0.95 * pair.max()
  half = link_matrix.randomize_bandwidths(even, 1, least=1.0, jitter=0.0)
  np.testing.assert_array_equal(half.bandwidth, even.bandwidth)
  again = link_matrix.randomize_bandwidths(even, 1)
  assert (again.bandwidth == drawn.bandwidth).all()


def test_nvidia_smi_topology_is_imported():
  links = cluster_imports.from_topo(TOPO, A100, PCIE_4, INFINIBAND_HDR, 2)
  assert links.nodes == (0,) * 4 + (1,) * 4
  assert links.bandwidth[0, 1:5].tolist() == [
    12 * 25e9, PCIE_4.bandwidth, PCIE_4.bandwidth, INFINIBAND_HDR.bandwidth
  ]
  assert links.bandwidth[4, 5] == links.bandwidth[0, 1]
  # NCCL's hwLat of a ring, Simple: NVLink, PCI Express and network.
  assert links.latency_s[0, [1, 2, 4]].tolist() == [3.4e-6, 5.7e-6, 14e-6]
  alone = cluster_imports.from_topo(TOPO, A100, PCIE_4)
  assert alone.nodes == (0,) * 4
  np.testing.assert_array_equal(alone.bandwidth, links.bandwidth[:4, :4])
  with pytest.raises(ValueError, match="link from GPU0 to GPU1 is 'NVX'"):
    cluster_imports.parse_topo_matrix(TOPO.replace("NV12", "NVX"))
  with pytest.raises(ValueError, match="link from GPU1 to GPU0 is 'X'"):
    cluster_imports.parse_topo_matrix(TOPO.replace("NV12\t X ", " X \tNV12"))
  with pytest.raises(ValueError, match="GPU0 has 2 links to GPUs; it must"):
    cluster_imports.parse_topo_matrix(
      "GPU0 X PHB\nGPU1 PHB X PHB\nGPU2 PHB PHB X"
    )
  with pytest.raises(ValueError, match=r"NVLinks of device='a10' must be one"):
    cluster_imports.from_topo(TOPO, A10, PCIE_4)
  with pytest.raises(ValueError, match="no rows of GPUs"):
    cluster_imports.parse_topo_matrix("GPU topology is not supported")
  with pytest.raises(ValueError, match="need a network"):
    cluster_imports.from_topo(TOPO, A100, PCIE_4, nodes=2)


@pytest.mark.parametrize("header", [
  "\tGPU0", "\tGPU0\tCPU Affinity", "\tGPU0\tNIC0\tCPU Affinity",
  "GPU0\tNIC0", "",
])
def test_topology_of_a_single_gpu_is_imported(header):
  text = f"{header}\nGPU0\t X \tPHB\t0-7\n"
  assert cluster_imports.parse_topo_matrix(text) == [["X"]]
  links = cluster_imports.from_topo(text, A100, PCIE_4, INFINIBAND_HDR, 2)
  assert links.nodes == (0, 1)
  assert links.bandwidth[0, 1] == INFINIBAND_HDR.bandwidth
  assert links.mark == "published"


def test_nccl_tests_tables_are_imported():
  pairs = [("gpu23", 0, "gpu24", 0), ("gpu23", 0, "gpu24", 1),
           ("gpu24", 0, "gpu24", 1)]
  texts = {f"{i}.txt": NCCL.format(*pair) for i, pair in enumerate(pairs)}
  links = cluster_imports.from_nccl(texts, V100)
  assert links.nodes == (0, 1, 1)
  assert links.bandwidth[0, 1] == pytest.approx(5e9, 1e-3)
  assert links.latency_s[1, 2] == pytest.approx(30e-6, 1e-2)
  assert links.latency_s[2, 1] == links.latency_s[1, 2]
  assert links.mark == "measured"
  run = cluster_imports.parse_nccl_run(texts["0.txt"])
  assert run.ranks == (("gpu23", 0), ("gpu24", 0))
  assert run.sizes == (1048576, 8388608, 67108864)
  assert run.seconds == pytest.approx((239.72e-6, 1707.72e-6, 13451.77e-6))
  one_rank = texts["0.txt"].replace("#  Rank  1", "#  Rang  1")
  with pytest.raises(ValueError, match=r"d.txt: the run has 1 ranks"):
    cluster_imports.from_nccl({"d.txt": one_rank}, V100)
  with pytest.raises(ValueError, match="at least one output of sendrecv_perf"):
    cluster_imports.from_nccl({}, V100)
  del texts["2.txt"]
  with pytest.raises(ValueError, match=r"\[1\]\[2\] is missing, one of 2"):
    cluster_imports.from_nccl(texts, V100)
  with pytest.raises(ValueError, match=r"c.txt: the text has no list of ranks"):
    cluster_imports.from_nccl({"c.txt": "nothing"}, V100)
  # Older versions print no "root" column.
  old = NCCL.replace("    root", "").replace("      -1", "")
  assert cluster_imports.parse_nccl_run(old.format(*pairs[0])).seconds[0] == (
    pytest.approx(239.72e-6)
  )


def test_fit_recovers_latency_and_bandwidth():
  sizes = [2.0**k for k in range(8, 27, 3)]
  latency_s, rate = link_matrix.fit(sizes, [3e-6 + n / 7e9 for n in sizes])
  assert latency_s == pytest.approx(3e-6)
  assert rate == pytest.approx(7e9)
  with pytest.raises(ValueError, match="took no longer"):
    link_matrix.fit([1e3, 1e6], [2e-6, 1e-6])
  with pytest.raises(ValueError, match="two or more sizes"):
    link_matrix.fit([1e3, 1e3], [2e-6, 1e-6])


def test_fit_has_the_least_squared_relative_error():
  """Noisy times: no latency or rate in the neighbourhood fits better."""
  rng = np.random.default_rng(0)
  sizes = 2.0 ** np.arange(10, 28, 2)
  seconds = (2e-5 + sizes / 4e9) * rng.uniform(0.8, 1.2, len(sizes))
  fitted = link_matrix.fit(sizes, seconds)

  def error(latency_s, rate):
    return np.sum(((latency_s + sizes / rate) / seconds - 1) ** 2)

  for change in (0.99, 1.01):
    assert error(*fitted) < error(fitted[0] * change, fitted[1])
    assert error(*fitted) < error(fitted[0], fitted[1] * change)


def test_fitted_latency_is_not_negative():
  latency_s, rate = link_matrix.fit([1e3, 2e3], [1e-6, 3e-6])
  assert latency_s == 0
  assert rate > 0


def test_part_of_a_cluster_keeps_its_links():
  links = cluster_files.cluster("a100:2,uneven=1")
  part = links.part([9, 1])
  assert part.nodes == (0, 1)
  assert part.bandwidth[0, 1] == links.bandwidth[1, 9]
  assert part.bandwidth[1, 0] == links.bandwidth[9, 1]
  assert part.latency_s[0, 1] == links.latency_s[1, 9]
  assert part.device is links.device
  with pytest.raises(ValueError, match="node 0 follows node 1"):
    dataclasses.replace(links, nodes=(0, 1) * 8)
