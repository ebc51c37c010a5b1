"""Rows of a plan: sums of their causes, and a ring's time on its links."""

import dataclasses
import importlib

import numpy as np
import pytest

from caatnet.schema import tree
from caatnet.studies.placement import study as placement
from caatnet.studies.planner import report, study
from configs.planner import gpt_11b
from parallel.base import plot
from parallel.plans.hardware import cluster_files, link_matrix
from parallel.plans.hardware.clusters import CLUSTERS
from parallel.plans.planner import subsets
from parallel.plans.planner.space import Configuration


@pytest.fixture(scope="module")
def config():
  return gpt_11b.get_config("test").to_dict()


@pytest.fixture(scope="module")
def result(config):
  return study.run(config)


def test_rows_are_the_sums_of_their_causes(result):
  for row in (*result["best"], *result["front"]):
    assert row["seconds"] == pytest.approx(sum(row["latency"].values()))
    assert row["bytes"] == pytest.approx(sum(row["memory"].values()))
    assert row["memory"][row["binding"]] == max(row["memory"].values())
  # Other orders of devices are only taken if they are faster, and no order is
  # faster than the seconds less the gap.
  for row in result["best"]:
    assert row["seconds"] < row["own_seconds"]
    assert 0 <= row["gap"] < 1
  assert sorted(row["seconds"] for row in result["best"]) == [
    row["seconds"] for row in result["best"]
  ]
  bytes_, seconds = zip(*sorted(
    (row["bytes"], row["own_seconds"]) for row in result["front"]
  ), strict=True)
  assert list(seconds) == sorted(seconds, reverse=True)  # none beats another
  assert len(set(bytes_)) == len(bytes_)


def test_plain_data_parallelism_takes_the_time_of_its_ring(config, result):
  (row,) = (
    row for row in result["best"]
    if row["configuration"].startswith("stage 1 x data 8 x tensor 1")
  )
  links = cluster_files.cluster(config["planner"]["cluster"])
  width, layers, ffn, vocabulary = 128, 4, 352, 256
  matrices = layers * (4 * width**2 + 3 * width * ffn)
  params = matrices + 2 * vocabulary * width + (2 * layers + 1) * width
  assert result["parameters"] == params

  def ring_s(order):
    """Two trips of all gradients in float32, over the slowest link."""
    pairs = list(zip(order, order[1:] + order[:1], strict=True))
    return 2 * 7 * max(links.latency_s[pair] for pair in pairs) + (
      2 * 7 / 8 * 4 * params / min(links.bandwidth[pair] for pair in pairs)
    )

  assert row["latency"]["data"] == pytest.approx(ring_s(row["order"]), 0.05)
  saved = ring_s(list(range(8))) - ring_s(row["order"])
  assert row["own_seconds"] - row["seconds"] == pytest.approx(saved, rel=0.05)
  slower = result["sensitivity"][0.5] - row["seconds"]
  assert slower == pytest.approx(row["latency"]["data"])


def test_plan_without_time_says_how_many_searches_were_skipped(config, result):
  section = config["planner"] | {"max_s": 1e-9}
  found = study.run(config | {"planner": section})
  assert found["skipped"]["orders"] >= section["top"]
  said = "max_s) {orders} searches of a device order and {clusters} of"
  assert said.format(**found["skipped"]) in str(report.report(found).parts)
  assert found["best"][0]["seconds"] > result["best"][0]["seconds"]
  assert result["skipped"] == {"orders": 0, "clusters": 0}
  assert "max_s" not in str(report.report(result).parts)


def test_bars_have_the_length_of_their_rows(result):
  figure = report.report(result).figure()
  for panel, key, unit in zip(
    figure.panels[-2:], ("seconds", "bytes"), (1, 1e9), strict=True
  ):
    bars = [mark for mark in panel.marks if isinstance(mark, plot.Bars)]
    assert bars
    lengths = np.sum([bar.lengths for bar in bars], axis=0)
    np.testing.assert_allclose(
      lengths, [row[key] / unit for row in result["best"]]
    )


def shown(made):
  """Returns the cells of each table by heading, and the texts."""
  return [
    [dict(zip(table.headings, row, strict=True)) for row in table.cells()]
    for table in made.tables
  ], [part for part in made.parts if isinstance(part, str)]


def test_report_shows_each_number_under_its_heading(result):
  rows = [
    row | {"gap": 0.125 * i, "pipette_s": 20.0 + i, "amp_s": 30.0 + i,
           "bytes": 4e9 * i}
    for i, row in enumerate(result["best"])
  ]
  (best, times, _, front, second), texts = shown(report.report(
    result | {"best": rows}
  ))
  for i, (row, cells) in enumerate(zip(rows, best, strict=True)):
    assert cells["configuration"] == f"{i + 1}. {row['configuration']}"
    for heading, number in (
      ("s / step", row["seconds"]), ("own order", row["own_seconds"]),
      ("gap", 12.5 * i), ("GB", 4 * i), ("Pipette's s", 20 + i),
      ("AMP's s", 30 + i),
    ):
      assert float(cells[heading].strip("%")) == pytest.approx(number, 1e-3)
    assert float(times[i]["data"]) == pytest.approx(
      row["latency"]["data"], rel=1e-2
    )
  assert [cells["most of it"] for cells in front] == [
    row["binding"] for row in result["front"]
  ]
  before = {}
  for row, cells in zip(result["second"]["rows"], second, strict=True):
    assert before.setdefault(row["of"], row["of_sent"]) == row["of_sent"]
    base = result["best"][row["of"] - 1]
    assert cells["of"] == str(row["of"])
    assert cells["changed"].endswith(row["learned"])
    assert float(cells["times as fast"]) == pytest.approx(
      base["seconds"] / row["seconds"], abs=0.006
    )
    sent, without = cells["data, GB sent"].rstrip(")").split(" (")
    for text, size in ((sent, row["sent"]), (without, row["of_sent"])):
      assert 1e9 * float(text) == pytest.approx(size["data"], rel=1e-2)
  for text in (
    f"with links 0.5 times as fast: {result['sensitivity'][0.5]:.4g} s",
    f"excluded by layers: {result['excluded']['layers'][0]}, as stages=8 x",
    "2. as a run's flags: " + report.flags(rows[1]["keys"]),
    "1) as a run: flags of 1. and a config with the section of diloco, then "
    "--config.parallel.data=1 --config.parallel.worker=8 ",
    "3) as a run: flags of 2. and a config with the section of diloco, then "
    "--config.parallel.data=1 --config.parallel.worker=4 ",
  ):
    assert any(line.startswith(text) for line in texts), text


def test_devices_that_are_not_used_are_named_with_the_rest():
  subset = subsets.Subset(None, None, (0, 1, 2, 4, 6, 7), (5, 3), 1.5)
  links = link_matrix.of_cluster(CLUSTERS["frontier"], 1)
  nodes = (0,) * 4 + (1,) * 4
  left = study._left_out(subset, dataclasses.replace(links, nodes=nodes))
  assert report._left_out(left) == [
    "not used, slow ones first: devices 5 (node 1), 3 (node 0) of 8; s of a "
    "step with all of them: 1.5. A run has the devices 0 to 2, 4, 6, 7 only"
  ]
  many = [{"device": i, "node": 0} for i in (30, *range(16))]
  (line,) = report._left_out(left | {"devices": many})
  assert line.startswith("not used, devices 0 to 15, 30 of 8;")
  assert report._left_out(left | {"devices": []}) == []


def test_flags_are_those_that_a_question_takes():
  c = Configuration(2, 2, 2, 4, "zb_h1", scheme="zero2", offload=True)
  found = report.flags(c.keys() | {"parallel.device_order": ()})
  assert "device_order" not in found
  asked = found.replace(" --config.sync.carry=off", "")
  assert study._parse_configuration(asked, Configuration(1, 8, 1, 1)) == c
  assert report.flags({"a.b": (1,), "a.c": (1, 2), "d": 0.5}) == (
    "--config.a.b=1, --config.a.c=1,2 --config.d=0.5"
  )


@pytest.mark.parametrize(("text", "message"), [
  ("train.accumulation=0", "accumulation='0' must be an integer from 1"),
  ("parallel.stage=1.5", "stage='1.5' must be an integer from 1"),
  ("zero.scheme=zero4", "'zero4' must be one of ddp, zero1"),
  ("pipeline.schedule=", "'' must be one of gpipe, 1f1b"),
  ("memory.moments=True", "'True' must be one of device, pinned_host"),
])
def test_configuration_that_does_not_exist_is_no_question(text, message):
  with pytest.raises(ValueError, match=f"config.planner.why_not=.*{message}"):
    study._parse_configuration(text, Configuration(2, 2, 2, 4))


@pytest.mark.parametrize("name", ["model", "data"])
def test_other_models_and_data_are_refused(name):
  """By the plan, and by the placement of the same run."""
  for chosen in tree.choices(name)[1:]:
    for made, run in (
      (gpt_11b.get_config("test"), study.run),
      (importlib.import_module("configs.memory.12b_32k").get_config(),
       placement.run),
    ):
      made[name] = tree.defaults(name, chosen)
      with pytest.raises(ValueError, match=rf"config\.{name}\.name='{chosen}'"):
        run(made.to_dict())
