"""Reports of all studies in each format; a new study adds a row."""

import functools
import importlib
import json
import re

import numpy as np
import pytest

from caatnet.inspection import report as compilation
from caatnet.show import drawing, render
from caatnet.studies import registry
from parallel.base import plot
from tests.parallel.base.report_test import check

# Module of the config -> its argument, and keys that make it small.
CASES = {
  "collectives.multitree": ("test", {}),
  "collectives.schedule": ("test", {}),
  "collectives.spraying": ("test", {}),
  "datacentre.hundred_billion": ("test", {}),
  "federated.links": ("test", {}),
  "diloco.utilisation": ("", {}),
  "graphs.alignment": ("", {"num_ids": 1000, "largest": 200}),
  "inference.decode": ("", {"models": ("70b",), "every": (), "p": (1.0, 0.5)}),
  "memory.12b_32k": ("7b", {}),
  "pipeline.schedules": ("test", {}),
  "planner.gpt_11b": ("test", {}),
  "planner.published": ("test", {"choosers": ("rule", "amp", "pipette")}),
  "serving.vllm_log": ("test", {}),
  "zero.frontier": ("", {"accumulations": (1,)}),
}


@functools.cache
def reported(name):
  """Returns the report of the study of a config."""
  argument, changes = CASES[name]
  module = importlib.import_module(f"configs.{name}")
  config = module.get_config(*filter(None, [argument])).to_dict() | changes
  study = registry.find(config)
  result = study.run(config)
  json.dumps(result, allow_nan=False)  # plain data
  return study.report(result)


# Factors of columns and the units in their headings.
UNITS = {
  1e-6: "us", 1e-3: "ms", 1.25e5: "Mbit", 1e6: "MB", 1e9: "GB", 1e12: "10^12",
}


def check_units(made):
  """Checks that the factors of columns are units, those of their headings."""
  for column in (c for table in made.tables for c in table.columns):
    if "bound" in column.heading:  # relative to a result
      continue
    assert column.unit in (1, 0.01, *UNITS), column
    words = set(re.findall(r"[\w^]+", column.heading))
    for unit, word in UNITS.items():
      if word in words and column.unit != 1:
        assert column.unit == unit, column


def check_keys(made):
  """Checks that no two columns of a table show the same key alike."""
  for table in made.tables:
    shown = [(c.key, str(c.form), c.unit) for c in table.columns if c.key]
    assert len(set(shown)) == len(shown), (table.title, shown)


def test_every_study_has_a_case():
  found = {
    importlib.import_module(f"configs.{name}").get_config().study
    for name in CASES
  }
  assert found == set(registry.STUDY_NAMES)


@pytest.mark.parametrize("name", CASES)
def test_formats_show_the_same_cells(name):
  report = reported(name)
  assert report.tables
  assert all(table.rows for table in report.tables)
  check(report)
  check_units(report)
  check_keys(report)


@pytest.mark.parametrize("name", CASES)
def test_figures_show_finite_numbers(name):
  figure = reported(name).figure()
  assert figure.panels
  for panel in figure.panels:
    assert panel.marks, panel.title
    for mark in panel.marks:
      for x, y in coordinates(mark):
        assert len(x) == len(y)
        assert all(v is None or np.isfinite(v) for v in (*x, *y)), mark
  pytest.importorskip("matplotlib")
  assert drawing.render_figure(figure).startswith(b"\x89PNG")


def coordinates(mark):
  match mark:
    case plot.Line():
      yield mark.x, mark.y
    case plot.Band():
      yield mark.low, mark.high
      yield mark.x, mark.low
    case plot.Bars():
      yield mark.places, mark.lengths
      yield mark.lengths, mark.lengths if mark.starts is None else mark.starts


def compiled(factor, known=True):
  """Returns the result of a program with collectives and a schedule.

  Args:
    factor: Factor of all bytes and seconds.
    known: Whether the number of its all-reduces is known.
  """
  entry = {"kind": "all_reduce", "dtype": "float32", "bytes": factor * 2e6,
           "count": 3 if known else 0, "unknown_bytes": 0 if known else 5e6}
  bounds = {key: factor * 1e-3 * i for i, key in enumerate(
    compilation._BOUNDS, 1
  )}
  return {
    "target": "chip",
    "memory": {"state": factor * 1e9, "total": factor * 1.5e9,
               "peak": factor * 1e9, "capacity": 3e9},
    "ledger": [{"axes": [], "phase": "forward", "differs": not known,
                "lowered": [entry], "compiled": [entry]}],
    "collectives": [{
      "where": "", "phase": "forward", "axes": ["data"], "kind": "all_reduce",
      "dtype": "float32", "count": 3 if known else None, "bytes": 1e6,
      "wire_bytes_ring": 2e6, "rematted": True,
    }],
    "transfers": [{
      "where": "", "phase": "forward", "axes": ["data"], "bytes": 1e6,
      "count": 3 if known else None, "asynchronous": known, "hidden": 0.5,
      "wire_seconds": 1e-5, "beside_seconds": 2e-5, "beside": ["dot"],
    }],
    "host_copies": [{
      "where": "", "to_host": True, "count": 3, "bytes": 1e6,
      "overlapped_seconds": 1e-3 if known else None,
      "hiding_rate": 1e9 if known else None,
    }],
    "overlap": [{
      "axes": ["data"], "bytes": factor * 2e6, "asynchronous": 1e6,
      "hidden": 1e6, "unknown": 1 - known, "unknown_bytes": 0 if known else 5e6,
    }],
    "roofline": bounds | {"unknown_transfers": 1 - known},
    "with_latency": [bounds, {k: 2 * v for k, v in bounds.items()}],
    "constants": {"peak": ["1", "the source"]},
    "inference": {
      "phase": "decode", "sequences": 3, "tokens": 1, "context": 64,
      "gathers_pages": known, "kernels": ["paged"], "formula": [{
        "kind": "all_reduce", "dtype": "float32", "formula": 1e6,
        "lowered": 1e6, "compiled": 1e6,
      }],
    },
  }


PROGRAMS = {
  "one": {"base": compiled(1)}, "unknown": {"base": compiled(1, known=False)},
  "two": {"base": compiled(1), "p=0.5": compiled(4)},
  "three": {"a": compiled(1), "b": compiled(2), "c": compiled(0)},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_formats_show_the_same_cells_for_programs(name):
  report = compilation.report(PROGRAMS[name])
  check(report)
  check_units(report)
  check_keys(report)
  assert len(report.figure().panels) == 3


def test_two_programs_are_compared_by_ratio_and_memory():
  """The first leaves memory of 3 GB free, the second needs more."""
  tables = {
    table.title: [dict(zip(table.headings, row, strict=True))
                  for row in table.cells()]
    for table in compilation.report(PROGRAMS["two"]).tables
  }
  state, total, peak, _, verdict = tables["memory per device, GB (chip)"]
  assert state["ratio"] == total["ratio"] == peak["ratio"] == "4.000"
  assert verdict["base"] == "fits, 2.000 free"
  assert verdict["p=0.5"] == "1.000 too much"
  bounds = next(rows for title, rows in tables.items() if "bounds" in title)
  rows = {row[""]: row for row in bounds}
  wire = rows["ms on the links, one axis after another"]
  assert (wire["base"], wire["p=0.5"]) == ("9.000", "36.000")
  latency = rows["ms of collectives, with latency"]
  assert latency["base"] == "9.000 to 18.000"
  assert latency["ratio"] == "4.000"
  memory, sent, hidden = compilation.report(PROGRAMS["two"]).figure().panels
  assert (memory.x, sent.x) == (
    "GB per device", "operand GB per device and step"
  )
  bars, capacity = memory.marks
  assert (bars.label, [*bars.lengths], capacity.at) == ("state", [1, 4], 3)
  assert [[*x.lengths] for x in sent.marks] == [pytest.approx([0.002, 0.008])]
  assert [[*x.lengths] for x in hidden.marks] == [
    pytest.approx([0.001, 0.001]), pytest.approx([0.001, 0.007])
  ]


def test_cells_of_programs_whose_numbers_all_differ():
  """Sides, counts and kinds of bytes cannot be exchanged or left out."""

  def sent(kind, size, count):
    return {"kind": kind, "dtype": "int8", "bytes": size, "count": count,
            "unknown_bytes": 0}

  def result(scale, compiled_bytes):
    return compiled(1) | {
      "memory": {"state": 5e7 * scale, "of these on the host": 1e9,
                 "total": 2e9 * scale, "peak": 1.5e9 * scale, "capacity": 3e9},
      "ledger": [{
        "axes": ["data", "tensor"], "phase": "update", "differs": True,
        "lowered": [sent("all_gather", 1e6 * scale, 1),
                    sent("all_reduce", 2e6 * scale, 4)],
        "compiled": [sent("permute", compiled_bytes, 2)],
      }],
      "transfers": [compiled(1)["transfers"][0] | {"beside": ["dot", "add"]}],
      "overlap": [{
        "axes": ["data"], "bytes": 8e6, "asynchronous": 4e6 * scale,
        "hidden": 1e6 * scale, "unknown": 0, "unknown_bytes": 0,
      }],
      "nanobatches": [{"kind": "all_reduce", "count": 3, "bytes": 8e6,
                       "asynchronous": 6e6, "overlapped": 4e6, "hidden": 2e6}],
      "inference": compiled(1)["inference"] | {
        "widened": ["u", "v", "w", "x", "y"],
        "formula": [{"kind": "all_reduce", "dtype": "int8", "formula": 1e6,
                     "lowered": 2e6, "compiled": 3e6}],
      },
      "interval": {"low": 1e-3, "median": 2e-3 * scale, "high": 5e-3},
      "constants": compiled(1)["constants"] | {"links": ["c", "c"]},
    }

  results = {"a": result(1, 5e6), "b": result(2, 2.5e6)}
  del results["b"]["constants"]["links"]
  results["a"]["collectives"][0]["rematted"] = False
  made = compilation.report(results)
  tables = {t.title: t.cells() for t in made.tables}

  def of(words):
    return next(cells for title, cells in tables.items() if words in title)

  assert tables["operand MB per device and step"] == [
    ["data,tensor", "update", "lowered", "3.000", "6.000", "2.000"],
    ["data,tensor", "update", "compiled", "5.000", "2.500", "0.500"],
  ]
  memory = of("memory per device")
  assert memory[0] == ["state", "0.050000", "0.100", "2.000"]
  assert memory[-1] == ["", "fits, 1.500 free", "fits, 0.000000 free", ""]
  (row,) = of("collectives of a: operand MB")
  assert row[2:4] == [
    "1 x all_gather int8  1.000 MB\n4 x all_reduce int8  2.000 MB",
    "2 x permute int8  5.000 MB",
  ]
  places = [of(f"collectives of {x}, compiled")[0] for x in "ab"]
  assert [row[1] for row in places] == ["forward", "forward, again"]
  assert [row[-2:] for row in places] == [["1.000", "6.000"]] * 2
  assert of("schedule of b")[0][-1] == "dot"
  assert [row[2:] for row in of("overlap: operand")] == [
    ["8.00", "50.0%", "12.5%", "7.00"], ["8.00", "100.0%", "25.0%", "6.00"],
  ]
  assert of("nano-batches of a")[0][2:] == ["8.00", "75.0%", "50.0%", "25.0%"]
  assert of("decode of a")[0][2:] == ["1.000000", "2.000000", "3.000000"]
  steps = of("predicted with the rates of the cluster")
  for number, row in enumerate(steps[:len(compilation._BOUNDS)], 1):
    assert "ms" not in row[0] or row[1] == f"{number}.000", row
  assert ["2.000 (1.000 to 5.000)", "4.000 (1.000 to 5.000)"] in [
    row[1:3] for row in steps
  ]
  assert sum(
    "place: u; v; w; and 2 more" in str(part) for part in made.parts
  ) == 2
  memory, moved, hidden = made.figure().panels
  assert [m.label for m in memory.marks] == ["state", "capacity"]
  assert [[*m.lengths] for m in moved.marks] == [pytest.approx([5e-3, 2.5e-3])]
  assert [[*m.lengths] for m in hidden.marks] == [
    pytest.approx([1e-3, 2e-3]), pytest.approx([7e-3, 6e-3])
  ]


def test_collectives_of_unknown_count_are_named():
  """Their bytes are in no sum, as titles state."""
  titles = [t.title for t in compilation.report(PROGRAMS["unknown"]).tables]
  assert any("without transfers of unknown count" in t for t in titles)
  cells = json.dumps([
    t.cells() for t in compilation.report(PROGRAMS["unknown"]).tables
  ])
  assert "1, 5.00 MB each time" in cells
  assert "? x all_reduce float32  5.000 MB each" in cells


def test_programs_that_gather_pages_have_no_bounds():
  result = compiled(1)
  del result["roofline"]
  report = compilation.report({"base": result})
  assert any(
    isinstance(part, str) and part.startswith("No bounds")
    for part in report.parts
  )
  assert "bounds" not in "".join(table.title for table in report.tables)
  assert "No bounds" in render.markdown(report)
