"""Benchmark of partitioned steps: a complete run with XLA's partitioning."""

import pytest

from caatnet.benchmarks.training import zero
from configs.benchmark import zero as config_of


def test_steps_are_compared_with_the_first_one(capsys):
  config = config_of.get_config("test")
  config.model.num_layers = config.benchmark.rounds = 1
  config.benchmark.variants = (
    ("automatic", ""), ("zero3", "zero.scheme=zero3")
  )
  found = zero.run(config)
  assert found["environment"]["devices"].startswith("8 x ")
  first, second = found["rows"]
  assert (first["variant"], second["variant"]) == ("automatic", "zero3")
  assert min(first["median_s"], second["median_s"]) > 0
  assert first["relative"] == 1
  assert second["relative"] == pytest.approx(
    second["median_s"] / first["median_s"]
  )
  printed = " ".join(capsys.readouterr().out.split())
  assert f"{16 * 16} tokens, 8 devices" in printed
  assert f"│ zero3 │ {second['median_s']:.3f} │" in printed
