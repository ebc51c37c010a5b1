"""Recorded results of TPU programs compared with the current programs."""

import pytest

pytest.importorskip("libtpu", reason="the tpu extra is not installed")

from caatnet.benchmarks.programs import programs
from configs.benchmark import programs as programs_config
from tests import recorded


def test_recorded_programs_match_the_current_ones():
  config = programs_config.get_config()
  stale = []
  for row in recorded.read("programs.json", "tpu")["rows"]:
    program = {key: row[key] for key in programs.PROGRAM_KEYS}
    now = programs.identity(*programs.build(config, program))
    if programs.find_row([row], now) is None:
      stale.append(" ".join(program.values()))
  assert not stale, "launch.benchmark --config=configs/benchmark/programs.py"


def test_recorded_roofline_is_reproduced():
  """Compiles the cheapest program and compares its row of the results."""
  config = programs_config.get_config()
  (row,) = (
    row for row in recorded.read("programs.json", "tpu")["rows"]
    if [row[key] for key in programs.PROGRAM_KEYS]
    == ["tpu:v5e:8x8", "model.num_layers=4 sync.p=0.5", "reference"]
  )
  program = {key: row[key] for key in programs.PROGRAM_KEYS}
  now = programs.analyse_program(*programs.build(config, program))
  assert now["roofline"] == pytest.approx(row["roofline"], rel=1e-3), (
    "launch.benchmark --config=configs/benchmark/programs.py"
  )


def test_recorded_kernels_match_the_current_ones():
  recorded.check_kernels("kernels_bytes_v5p.json", "tpu")
