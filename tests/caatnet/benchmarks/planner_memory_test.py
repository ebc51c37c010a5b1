"""Benchmark of memory estimates: drawn programs, fits and their errors."""

import json
import pathlib

import numpy as np
import pytest

from caatnet.benchmarks.planner import planner_memory
from configs.benchmark import planner_memory as config_of
from parallel.hardware import devices
from parallel.planner import memory, space
from parallel.planner.memory import Fit
from parallel.planner.space import Configuration

RESULTS = pathlib.Path(__file__).parents[3] / "results"
H200 = RESULTS / "planner_memory_h200.json"
CAPACITY = 95 * 2**30


def test_complete_file_is_judged_without_compiling(tmp_path, capsys):
  config = config_of.get_config()
  path = tmp_path / "rows.json"
  path.write_text(H200.read_text())
  config.benchmark.update({
    "target": "gpu:h200:1x8", "results": str(path), "limit_s": 0.0,
  })
  found = planner_memory.run(config)
  assert path.read_text() == H200.read_text()
  numbers = [row["number"] for row in found["rows"]]
  assert numbers == sorted(planner_memory.kept(H200))
  halves = found["fitted"], found["held out"]
  assert sum(half["programs"] for half in halves) == len(numbers)
  rows = [
    [cell.strip() for cell in line.split("│")[1:-1]]
    for line in capsys.readouterr().out.splitlines() if line.startswith("│")
  ]
  for name, half in zip(("fitted", "held out"), halves, strict=True):
    (row,) = (r for r in rows if r[0] == f"{half['programs']} {name}")
    assert row[1:4] == [f"{half[k]:.1%}" for k in ("median", "p95", "worst")]
    assert row[4:6] == [str(half["taken"]), str(half["wrong"])]
    assert row[7] == f"{half['lost']} of {half['fit']}"
    assert row[8:] == [
      f"{half['bound_median']:.2f}", f"{half['bound_most']:.2f}",
      str(half["exceeded"]),
    ]
  factors = [found["fit"][name]["factors"] for name in found["fit"]]
  printed = [r for r in rows if len(r) == 2]
  assert printed == [
    [cause, f"{x:.2f}"] for of in factors for cause, x in of.items()
  ]


def test_fit_is_judged_on_the_held_out_half():
  """The simulated compiler deviates for half of the held-out programs."""
  rng, rows = np.random.default_rng(5), []
  for number in range(24):
    drawn = planner_memory.draw(rng, False, CAPACITY)
    found = memory.terms(drawn[1], drawn[0])
    total = Fit({}, 1.0).estimate(found)
    total *= 2 if number % 4 == 3 else 1
    rows.append({
      "number": number, "total": total, "fits": total <= CAPACITY,
    } | planner_memory.kept_keys(*drawn))
  found = planner_memory.judge(rows, CAPACITY)
  assert found["fitted"]["worst"] < 1e-3
  assert found["fitted"]["exceeded"] == 0
  assert found["held out"]["exceeded"] == sum(
    r["number"] % 4 == 3 for r in rows
  )
  assert found["held out"]["bound_most"] == pytest.approx(1.02, abs=1e-3)
  assert not found["fitted"]["wrong"]
  assert found["held out"]["worst"] == pytest.approx(0.5, abs=1e-2)
  wrong = [
    r for r in rows if r["number"] % 4 == 3 and not r["fits"]
    and r["total"] / 2 * 1.02 <= CAPACITY
  ]
  assert found["held out"]["wrong"] == len(wrong) > 0


@pytest.mark.parametrize(("error", "bytes_"), [
  ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 120.50G of "
   "95.74G hbm.", 120.5 * 2**30),
  ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required "
   "for HLO temporaries (512.00M) exceeds available HBM", 2**29 + 7),
])
def test_out_of_memory_error_is_parsed_to_bytes(error, bytes_):
  assert planner_memory.refused(error, 7) == bytes_
  with pytest.raises(ValueError, match="something else"):
    planner_memory.refused("INTERNAL: something else", 7)


def test_fits_of_pipelines_are_separate():
  """The simulated compiler keeps four times as many residuals in pipelines.
  """
  rng, rows = np.random.default_rng(6), []
  for number in range(60):
    step, c = planner_memory.draw(rng, False, CAPACITY)
    terms = memory.terms(c, step)
    compiler = Fit({"layers": 2.0 if c.stages > 1 else 0.5}, 1.0)
    rows.append({
      "number": number, "total": compiler.estimate(terms)
    } | planner_memory.kept_keys(step, c))
  found = planner_memory.fits(rows)
  assert found.stages.upper < 1.05
  assert found.alone.upper > 1.3
  assert found.of(Configuration(2, 1, 1, 2)) is found.stages
  assert found.of(Configuration(1, 2, 1, 2)) is found.alone


def test_programs_that_exceed_twice_the_capacity_have_no_effect():
  rng, rows = np.random.default_rng(7), []
  for number in range(20):
    step, c = planner_memory.draw(rng, False, CAPACITY)
    rows.append({
      "number": number, "fits": True,
      "total": memory.PLAIN.estimate(memory.terms(c, step)),
    } | planner_memory.kept_keys(step, c))
  found = planner_memory.judge(rows, CAPACITY)
  huge = [row | {"number": 20, "total": 2.01 * CAPACITY} for row in rows]
  assert planner_memory.judge([*rows, huge[0]], CAPACITY) == found
  assert planner_memory.judge(rows, CAPACITY, huge) == found


def test_answers_are_configurations_of_the_planner_that_fit_by_its_bound():
  """The problems are those of the file of compiled answers."""
  rows = planner_memory.kept(RESULTS / "planner_memory_answers_h200.json")
  for number in (3, 5):
    rng = np.random.default_rng([0, number])
    step, c = planner_memory.answer(rng, devices.H200)
    drawn = planner_memory.kept_keys(step, c)
    for key in ("model", "batch", "configuration"):
      assert drawn[key] == rows[number][key]
    assert step.model.head_width == 128
    assert c.grid.size == 8
    assert space.refusal(c, step, space.Choices()) is None


def test_programs_that_failed_are_compiled_again(tmp_path):
  path = tmp_path / "rows.json"
  assert planner_memory.kept(path) == {}
  rows = [{"number": 3, "total": 1.0}, {"number": 5, "error": "no memory"}]
  path.write_text(json.dumps({"rows": rows}))
  assert planner_memory.kept(path) == {3: rows[0]}


def test_draws_are_those_of_the_recorded_programs():
  """Every second pair of numbers is near the capacity."""
  rows = planner_memory.kept(H200)
  numbers = sorted(rows)[:8]
  assert numbers == list(range(8))
  for number in numbers:
    drawn = planner_memory.draw(
      np.random.default_rng([0, number]), number % 4 > 1,
      devices.H200.memory_bytes,
    )
    found = planner_memory.kept_keys(*drawn)
    for key in ("model", "batch"):
      assert found[key] == rows[number][key], number
    # Keys that are newer than the file have their defaults.
    assert rows[number]["configuration"].items() <= (
      found["configuration"].items()
    ), number
