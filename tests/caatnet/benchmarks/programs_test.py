"""Benchmark of compiled programs: rows are reused until a program changes."""

import json

import pytest

from caatnet.benchmarks.programs import programs
from configs.benchmark import programs as programs_config
from tests.caatnet.benchmarks.printed import rows_of


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
    program = {key: row[key] for key in programs.PROGRAM_KEYS}
    program["overrides"] = overrides
    return programs.identity(*programs.build(config, program))

  same = now(row["overrides"])
  assert programs.find_row([row], same) == row
  assert programs.find_row([same], same) == same
  assert programs.find_row([row], now("sync.p=0.25")) is None
  # Many targets share one lowered program.
  assert programs.find_row([row | {"target": "another"}], same) is None
  assert programs.find_row([row | {"versions": {}}], same) is None


@pytest.mark.parametrize("text", ['{"rows": [{}]}', '{"rows": {}}', "[]"])
def test_damaged_file_of_results_is_named(tmp_path, text):
  config, path = programs_config.get_config("test"), tmp_path / "a.json"
  config.benchmark.results, config.benchmark.keep = str(path), True
  path.write_text(text)
  with pytest.raises(ValueError, match=r"a\.json (is damaged|has a row)"):
    programs.run(config)


def test_table_has_bytes_and_bounds_of_compiled_rows(capsys):
  row = {"target": "tpu:v5e:2x2", "overrides": "sync.p=0.5", "kernels": "auto"}
  programs._print([row, row | {"kernels": "reference", "roofline": {
    "memory_bytes": 12.34e9, "step_if_all_overlaps": 0.25,
    "step_as_scheduled": 0.5, "step_if_none_overlaps": 0.75,
  }}])
  assert rows_of(capsys.readouterr().out) == [[
    "tpu:v5e:2x2 sync.p=0.5", "reference", "12.3", "0.250", "0.500", "0.750"
  ]]
