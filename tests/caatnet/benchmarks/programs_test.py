"""Benchmark of compiled programs: rows are reused until a program changes."""

import json

from caatnet.benchmarks.programs import programs
from configs.benchmark import programs as programs_config


def test_row_is_reused_until_its_program_changes(tmp_path):
  config = programs_config.get_config("test")
  config.benchmark.kernels = ("reference",)
  path = tmp_path / "rows.json"
  config.benchmark.results = str(path)
  (row,) = programs.run(config)["rows"]
  kept = json.loads(path.read_text())
  assert kept["rows"] == [row]
  assert {"command", "date", "versions"} <= kept.keys()

  def now(overrides):
    program = {key: row[key] for key in programs.KEYS}
    program["overrides"] = overrides
    return programs.identity(*programs.build(config, program))

  same = now(row["overrides"])
  assert programs.known([row], same) == row
  assert programs.known([row], now("sync.p=0.25")) is None
  # Many targets share one lowered program.
  assert programs.known([row | {"target": "another"}], same) is None
  assert programs.known([row | {"versions": {}}], same) is None
