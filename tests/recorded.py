"""Recorded results of compiled programs, compared with today's programs."""

import json
import pathlib
from typing import Any

import jax
import pytest

from caatnet.benchmarks.programs import kernels
from configs.benchmark import kernels as kernels_config
from parallel.ledger import fingerprint

RESULTS = pathlib.Path(__file__).parents[1] / "results"


def read(name: str, platform: str) -> dict[str, Any]:
  """Returns a result file; skips the test if other versions produced it."""
  result = json.loads((RESULTS / name).read_text())
  made_by = result["rows"][0].get("versions") or result["versions"]
  if not made_by.items() >= fingerprint.versions(platform).items():
    pytest.skip(f"results/{name} was made by {made_by}")
  # Cached lowerings of earlier tests would keep their source locations.
  jax.clear_caches()
  return result


def check_kernels(name: str, platform: str) -> None:
  """Checks that a result's kernels have the programs of today's."""
  result = read(name, platform)
  config = kernels_config.get_config()
  config.benchmark.target = result["target"]
  now = kernels.fingerprints(config.benchmark)
  stale = [
    f"{row['op']}, {row['case']}" for row in result["rows"]
    if now.pop((row["op"], row["case"]), None) != row["fingerprint"]
  ]
  assert not stale + list(now), result["command"]
