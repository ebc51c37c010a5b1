"""Recorded results of TPU programs compared with the current programs."""

import json
import pathlib

import jax
import pytest

pytest.importorskip("libtpu", reason="the tpu extra is not installed")

from caatnet.benchmarks.programs import kernels, programs
from configs.benchmark import kernels as kernels_config
from configs.benchmark import programs as programs_config
from parallel.xla import fingerprint

RESULTS = pathlib.Path(__file__).parents[2] / "results"


def read(name):
  """Returns a result file; skips it if other versions of jax produced it."""
  result = json.loads((RESULTS / name).read_text())
  made_by = result["rows"][0].get("versions") or result["versions"]
  if not made_by.items() >= fingerprint.versions("tpu").items():
    pytest.skip(f"results/{name} was made by {made_by}")
  # Cached lowerings of earlier tests would keep their source locations.
  jax.clear_caches()
  return result


def test_recorded_programs_match_the_current_ones():
  config = programs_config.get_config()
  stale = []
  for row in read("programs.json")["rows"]:
    program = {key: row[key] for key in programs.KEYS}
    now = programs.identity(*programs.build(config, program))
    if programs.known([row], now) is None:
      stale.append(" ".join(program.values()))
  assert not stale, "launch.benchmark --config=configs/benchmark/programs.py"


def test_recorded_roofline_is_reproduced():
  """Compiles the cheapest program and compares its row of the results."""
  config = programs_config.get_config()
  (row,) = (
    row for row in read("programs.json")["rows"]
    if [row[key] for key in programs.KEYS]
    == ["tpu:v5e:8x8", "model.num_layers=4 sync.p=0.5", "reference"]
  )
  program = {key: row[key] for key in programs.KEYS}
  now = programs.read(*programs.build(config, program))
  assert now["roofline"] == pytest.approx(row["roofline"], rel=1e-3), (
    "launch.benchmark --config=configs/benchmark/programs.py"
  )


def test_recorded_kernels_match_the_current_ones():
  config = kernels_config.get_config()
  result = read("kernels_bytes_v5p.json")
  config.benchmark.target = result["target"]
  now = kernels.fingerprints(config.benchmark)
  stale = [
    f"{row['op']}, {row['case']}" for row in result["rows"]
    if now.pop((row["op"], row["case"]), None) != row["fingerprint"]
  ]
  assert not stale + list(now), result["command"]
