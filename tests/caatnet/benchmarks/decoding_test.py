"""Benchmark of decoding: a complete run, and its comparison with PyTorch."""

import sys

import pytest

from caatnet.benchmarks.serving import decoding
from configs.benchmark import decoding as decoding_config


def test_parts_of_a_step_add_up_to_it():
  config = decoding_config.get_config("test")
  (row,) = decoding.run(config)["rows"]
  (times,) = row["ms"]
  parts = dict(row["parts_ms"])
  assert parts.pop("step") == times["step"]
  assert sum(parts.values()) == pytest.approx(times["step"])
  assert row["programs"] == 2  # with a chunk of the prompt, and without
  assert len(row["tokens_per_second"]) == config.benchmark.rounds


def test_rival_without_torch_is_an_error(tmp_path):
  config = decoding_config.get_config("test")
  config.benchmark.rival = str(tmp_path / "python")
  with pytest.raises(ValueError, match="cannot be run"):
    decoding.run(config)
  script = tmp_path / "python"
  script.write_text(f"#!{sys.executable}\n")  # exits immediately
  script.chmod(0o755)
  with pytest.raises(ValueError, match="needs torch"):
    decoding.run(config)
