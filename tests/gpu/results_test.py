"""Recorded results of GPU programs compared with the current programs."""

import json
import pathlib

import jax
import pytest

pytest.importorskip(
  "jax_cuda12_plugin", reason="the cuda extra is not installed"
)

from caatnet.benchmarks.programs import kernels
from configs.benchmark import kernels as kernels_config
from parallel.xla import fingerprint

RESULTS = pathlib.Path(__file__).parents[2] / "results"


def test_recorded_kernels_match_the_current_ones():
  result = json.loads((RESULTS / "kernels_bytes_h200.json").read_text())
  if not result["versions"].items() >= fingerprint.versions("gpu").items():
    pytest.skip(f"the result was made by {result['versions']}")
  # Cached lowerings of earlier tests would keep their source locations.
  jax.clear_caches()
  config = kernels_config.get_config()
  config.benchmark.target = result["target"]
  now = kernels.fingerprints(config.benchmark)
  stale = [
    f"{row['op']}, {row['case']}" for row in result["rows"]
    if now.pop((row["op"], row["case"]), None) != row["fingerprint"]
  ]
  assert not stale + list(now), result["command"]
