"""The study of partitions: plain data, its tables and its picture."""

import re

import pytest

from caatnet.config.override import override
from caatnet.show import render
from caatnet.studies import registry
from caatnet.studies.partitions import report
from configs.zero import frontier


def run(overrides=""):
  config = override(frontier.get_config(), overrides).to_dict()
  return registry.find(config).run(config)


@pytest.fixture(scope="module")
def result():
  return run()


def test_result_has_all_partitions(result):
  assert len(result["candidates"]) == 622
  assert len(result["schemes"]) == 11
  for row in (*result["schemes"].values(), *result["candidates"]):
    parts = dict(row["memory"])
    assert parts.pop("total") == sum(parts.values())
    assert set(row["received"]["reuse"]) == {"node", "gpu", "gcd"}
    assert row["fits"] == (row["memory"]["total"] <= 64e9)
  for answers in (answer["answers"] for answer in result["best"]):
    assert all(row["fits"] for row in answers.values())


def test_memory_differs_from_the_paper_only_by_gradient_bytes(result):
  """2 + 2 + 12 bytes against 2 + 4 + 12, over pair, node and all."""
  other = run("gradient_bytes=2 accumulations=(1,)")
  for found, gradient in ((result, 4), (other, 2)):
    memory = found["schemes"]["frontier3"]["memory"]
    exact = 20 * (2 / 2 + gradient / 8 + 12 / 384)
    assert memory["total"] / 1e9 == pytest.approx(exact, rel=1e-5)


def test_tables_show_the_numbers_of_the_result(result):
  """GB that are received by level, memory, and the largest model."""
  tables = {
    table.title: [
      dict(zip(table.headings, cells, strict=True)) for cells in table.cells()
    ] for table in report.report(result).tables
  }
  received = next(rows for title, rows in tables.items() if "receives" in title)
  ways = [
    (scheme, way) for scheme in result["schemes"].values()
    for way in ("reuse", "no reuse")
  ]
  for shown, (scheme, way) in zip(received, ways, strict=True):
    exact = scheme["received"][way] | {"into a node": scheme["node"][way]}
    for name, size in exact.items():
      number = float(shown[name].replace(",", ""))
      assert number == pytest.approx(size / 1e9, abs=0.006)
  for key, rows in result["fronts"].items():
    for shown, row in zip(tables[key], rows, strict=True):
      gigabytes = row["memory"]["total"] / 1e9
      assert float(shown["GB"]) == pytest.approx(gigabytes, abs=0.006)
      assert shown["fits"] == ("no" if gigabytes > 64 else "yes")
      assert float(shown["up to"].replace(",", "")) == pytest.approx(
        row["largest_model"] / 1e9, abs=0.06
      )


def test_seconds_are_those_of_the_bytes_of_each_way(result):
  """Nothing overlaps; reuse moves bytes from the nodes' links to others."""
  assumed, spared = result["assumptions"], 0
  assert not assumed["overlap"]
  rates = {level["name"]: level["bandwidth"] for level in assumed["levels"]}
  for row in (*result["schemes"].values(), *result["candidates"]):
    for way in ("reuse", "no reuse"):
      received = row["received"][way]
      assert row["seconds"][way] == pytest.approx(
        assumed["compute_seconds"] + sum(
          size / rates[name] for name, size in received.items()
        )
      )
      # Eight ranks of a node have its links.
      assert row["node"][way] == pytest.approx(8 * received["node"])
    assert row["node"]["reuse"] <= row["node"]["no reuse"]
    spared += row["node"]["reuse"] < row["node"]["no reuse"]
  assert spared > 100


def test_tables_name_assumptions_and_unreproduced_figures(result, capsys):
  render.show(report.report(result))
  printed = capsys.readouterr().out
  for words in ("Predicted, nothing is measured", "reaches 40% of 191.5",
                "4 a gradient", "64 GB each",
                "12.5 GB/s into each device (published",
                "50 GB/s into each device (range", "as recalled"):
    assert words in printed, words
  assert re.search(r"1.71 │ +0.88 │ +1.52 │ +no ", printed)


@pytest.mark.parametrize(
  "overrides",
  ["parameters=7e9 weight_codecs=('none',)",
   "cluster=h100 zero.levels=gpu:8 parallel.data=8"],
)
def test_other_settings_are_not_compared_with_the_paper(overrides, capsys):
  found = run(f"{overrides} accumulations=(1,)")
  assert found["published"] is None
  render.show(report.report(found))
  assert "2501.04266" not in capsys.readouterr().out


def test_bandwidth_of_the_config_overrides_the_link():
  found = run("bandwidths=gpu:100 accumulations=(1,)")
  (level,) = (
    e for e in found["assumptions"]["levels"] if e["name"] == "gpu"
  )
  assert (level["bandwidth"], level["overridden"]) == (100e9, True)


@pytest.mark.parametrize(
  ("overrides", "message"),
  [
    ("cluster=fronteir", "did you mean frontier"),
    ("zero.levels=node:96,gpu:4",
     "config.zero.levels='node:96,gpu:4': 96 x 4 ranks do not fit"),
    ("zero.levels=node:48", "have 48 ranks, not the 384"),
    ("bandwidths=rack:100", "'rack:100' must be level:GB/s"),
    ("bandwidths=gpu:fast", "'gpu:fast' must be level:GB/s"),
    ("bandwidths=gpu:inf", "'gpu:inf' must be level:GB/s"),
    ("gradient_bytes=3", "config.gradient_bytes=3 must be 2 or 4"),
    ("weight_codecs=('int3',)", "config.weight_codecs: 'int3' must be one of"),
    ("gradient_codecs=('int4',)", "must contain 'none'"),
    ("memory_gb=1e-6", "config.memory_gb=1e-06 with config.num_layers=50: "
     "one parameter per layer exceeds 1000 bytes"),
    ("num_layers=2147483647", "config.num_layers=2147483647: one parameter"),
  ],
)
def test_invalid_number_is_named(overrides, message):
  with pytest.raises(ValueError) as error:
    run(overrides)
  assert message in str(error.value)
