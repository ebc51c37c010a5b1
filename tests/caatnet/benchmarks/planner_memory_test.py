"""Benchmark of memory estimates: a file whose programs are all compiled."""

import pathlib

from caatnet.benchmarks.planner import planner_memory
from configs.benchmark import planner_memory as config_of

RESULTS = pathlib.Path(__file__).parents[3] / "results/planner_memory_h200.json"


def test_complete_file_is_judged_without_compiling(tmp_path, capsys):
  config = config_of.get_config()
  path = tmp_path / "rows.json"
  path.write_text(RESULTS.read_text())
  config.benchmark.update({
    "target": "gpu:h200:1x8", "results": str(path), "limit_s": 0.0,
  })
  found = planner_memory.run(config)
  assert path.read_text() == RESULTS.read_text()
  numbers = [row["number"] for row in found["rows"]]
  assert numbers == sorted(planner_memory.kept(RESULTS))
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
