"""Benchmark of graph networks: its counts, and an interpreter without DGL."""

import json
import pathlib
import resource
import sys
import time
import types

import numpy as np
import pytest

from caatnet.benchmarks.graphs import graphs
from configs.benchmark import graphs as benchmark_config
from parallel.plans.hardware.devices import DEVICES
from parallel.plans.hardware.links import PCIE_4, PCIE_5
from tests.caatnet.benchmarks.printed import rows_of

# Python that answers with what the given script reads from its arguments.
ANSWER = """#!{python}
import json, runpy, sys
folder, *others = runpy.run_path(sys.argv[1])["parse_arguments"](sys.argv[2:])
print(json.dumps([str(folder), *others]))
"""


def test_counts_of_the_benchmark_agree(capsys):
  config = benchmark_config.get_config("test")
  config.benchmark.parts = ("sampler", "caches", "waits", "predicted")
  config.benchmark.shares = (0.05, 1.0)
  start = time.perf_counter()
  result = json.loads(json.dumps(graphs.run(config)))
  passed = time.perf_counter() - start
  printed = capsys.readouterr().out
  assert "least possible" in printed
  (ours,) = result["sampler"]["rows"]
  table = rows_of(printed)
  assert ours["with_unique_s"] > ours["sampled_s"] > 0
  # Of ten batches.
  assert [
    ours["of"], f"{ours['edges'] / 10:,.0f}",
    f"{ours['edges'] / ours['sampled_s']:,.0f}",
    f"{100 * ours['sampled_s']:.2f}", f"{100 * ours['with_unique_s']:.2f}",
    f"{ours['unique'] / 10:,.0f}",
  ] in table
  # Trees of (3, 2): nine edges at most, ten places.
  assert 0 < ours["edges"] <= 10 * 64 * 9
  assert ours["unique"] <= 10 * 64 * 10
  sizes = result["caches"]["bytes"]
  assert sizes["least"] <= sizes["unique"] < sizes["places"]
  assert sizes["places"] == 10 * 64 * 10 * 8 * 4
  for row in result["caches"]["rows"]:
    assert row["lru"] <= row["belady"]
    assert 0 < row["belady"] < 1
    assert [
      f"{row['share']:.0%}",
      *(f"{row[k]:.1%}" for k in ("degree", "presampling", "lru", "belady")),
      *(f"{sizes['unique'] * (1 - row[k]) / 1e9:.3f}"
        for k in ("presampling", "belady")),
    ] in table
  assert row["degree"] == row["presampling"] == 1  # there is room for all
  reference, *others = result["waits"]["rows"]
  assert all(row["losses"] == reference["losses"] for row in others)
  for row in (reference, *others):
    assert 0 <= row["waited_s"] <= row["step_s"] < passed / 6
    # At most each row of a tree once, of eight features.
    assert 0 < row["fetched_bytes"] <= 64 * 10 * 8 * 4
    (shown,) = (cells for cells in table if cells[0] == row["changes"])
    assert shown[3] == f"{row['waited_s'] / row['step_s']:.1%}"
  assert others[-1]["fetched_bytes"] <= reference["fetched_bytes"]
  for row in result["predicted"]["rows"]:
    assert row["overlapped_s"] <= row["zero_copy_s"] < row["conventional_s"]
    place = [str(row["features"]), row["link"], str(row["devices"])]
    (shown,) = (cells for cells in table if cells[:3] == place)
    assert shown[6:] == [
      f"{row['faster']:.0%}", f"{row['faster_overlapped']:.0%}"
    ]


def test_predicted_compute_is_that_of_two_layers(capsys):
  """The first layer is computed at roots and their neighbours."""
  options = benchmark_config.get_config("test").benchmark
  assert options.fanouts == (3, 2)
  slow = graphs._predict_steps(options)["rows"]
  rate = options.predicted.utilisation * DEVICES["h200"].peak("float32")
  options.predicted.utilisation = 1e30
  for row, fast in zip(
    slow, graphs._predict_steps(options)["rows"], strict=True
  ):
    hidden = options.predicted.hidden
    weights = (1 + 3) * row["features"] * hidden + hidden * 64
    # 2 FLOPs of the forward and 4 of the backward for each of two matrices.
    expected = 2 * 6 * options.batch_size * weights / rate
    for key in ("conventional_s", "zero_copy_s"):
      assert row[key] - fast[key] == pytest.approx(expected)
    # Without compute: float32 rows of distinct places, gathered and copied.
    given = options.predicted
    rows_bytes = 4 * row["features"] * options.batch_size * 10 * given.distinct
    link = {x.name: x for x in (PCIE_4, PCIE_5)}[row["link"]]
    assert fast["conventional_s"] == pytest.approx(
      rows_bytes * row["devices"]
      * max(1 / given.gather, 3 / given.memory_bandwidth)
      + rows_bytes / (given.link_share * link.bandwidth)
    )
    # The device reads whole sectors of 32 bytes; rows begin anywhere.
    width = 4 * row["features"]
    sectors = np.mean([
      (begin + width - 1) // 32 + 1 for begin in np.arange(0, 32, np.gcd(
        width, 32
      ))
    ])
    read = rows_bytes * 32 * sectors / width
    assert fast["zero_copy_s"] == pytest.approx(max(
      read / (given.link_share * link.bandwidth),
      read * row["devices"] / given.memory_bandwidth,
    ))
    assert row["faster"] == pytest.approx(
      row["conventional_s"] / row["zero_copy_s"] - 1
    )
  assert "nothing measured" in capsys.readouterr().out


def test_script_of_dgl_reads_the_arguments_of_the_benchmark(tmp_path):
  python = tmp_path / "python"
  python.write_text(ANSWER.format(python=sys.executable))
  python.chmod(0o755)
  options = types.SimpleNamespace(
    python_path=str(python), threads=3, fanouts=(15, 10)
  )
  roots = np.arange(6, dtype=np.int32).reshape(3, 2)
  found = graphs._time_dgl_sampler(
    options, types.SimpleNamespace(folder=tmp_path), roots, warm=1
  )
  assert found == [str(tmp_path), 1, 3, [15, 10]]
  np.testing.assert_array_equal(np.load(tmp_path / "roots.npy"), roots)


def test_interpreter_without_dgl_is_an_error():
  config = benchmark_config.get_config("test")
  config.benchmark.parts = ("sampler",)
  config.benchmark.python_path = sys.executable
  with pytest.raises(ValueError, match=r"python_path=.*No module named 'dgl'"):
    graphs.run(config)


# Python that answers as the script of DGL would: with its warm-up batches.
DGL = """#!{python}
import json, sys
import numpy as np
folder, warm, threads = sys.argv[2:5]
print(json.dumps({{
  "of": "DGL", "edges": 3600, "unique": len(np.load(folder + "/roots.npy")),
  "sampled_s": None, "with_unique_s": float(warm),
}}))
"""


def test_samplers_are_compared_on_the_batches_after_the_warm_up(
  tmp_path, capsys
):
  """A tenth of the batches more, which are not counted."""
  python = tmp_path / "python"
  python.write_text(DGL.format(python=sys.executable))
  python.chmod(0o755)
  config = benchmark_config.get_config("test")
  config.benchmark.update({
    "parts": ("sampler",), "samples": 30, "python_path": str(python),
  })
  ours, dgl = graphs.run(config)["sampler"]["rows"]
  assert (dgl["with_unique_s"], dgl["unique"]) == (3, 30 + 3)
  assert ours["edges"] <= 30 * 64 * 9
  # 3600 edges and 33 nodes in 30 batches, 3 seconds.
  assert rows_of(capsys.readouterr().out)[-1] == [
    "DGL", "120", "-", "-", "100.00", "1",
  ]


def test_part_has_the_memory_of_its_process():
  start = time.perf_counter()
  row = graphs._time_and_memory_row("a part", start, "a loss")
  assert (row["part"], row["loss"]) == ("a part", "a loss")
  assert 0 <= row["seconds"] <= time.perf_counter() - start
  pages = list(map(int, pathlib.Path("/proc/self/statm").read_text().split()))
  page = resource.getpagesize() / 1e6
  # Resident pages without those of files, now; and most resident ones.
  assert row["own_mb"] == pytest.approx((pages[1] - pages[2]) * page, rel=0.1)
  most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
  assert row["resident_mb"] == pytest.approx(most, rel=0.1)


def test_edges_are_counted_without_padding():
  degrees = np.array([[5, 1, 0, 2, 9, 9, 9]])  # fan-outs (2, 2)
  assert graphs.num_edges(degrees, (2, 2)) == 2 + 1 + 0
  # One root, three neighbours, and theirs.
  degrees = np.array([[5, 4, 1, 2, *[9] * 6], [1, 3, *[0] * 8]])
  assert graphs.num_edges(degrees, (3, 2)) == (3 + 2 + 1 + 2) + (1 + 2)


def test_large_graph_is_trained_on_in_a_separate_process():
  config = benchmark_config.get_config("test")
  config.benchmark.parts = ("large",)
  found = graphs.run(config)["large"]
  assert found["nodes"] == 2**config.benchmark.large.scale
  assert [row["part"] for row in found["rows"]] == ["build", "train, 3 steps"]
  # MB of an interpreter with jax.
  for row in found["rows"]:
    assert 10 < row["own_mb"] < row["resident_mb"] < 10_000
    assert row["seconds"] > 0


def test_graph_that_exceeds_the_memory_limit_is_an_error():
  config = benchmark_config.get_config("test")
  config.benchmark.parts = ("large",)
  config.benchmark.large.limit_mb = 1
  with pytest.raises(ValueError, match=r"benchmark\.large: the process has"):
    graphs.run(config)
