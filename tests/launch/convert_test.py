"""Conversion of a published model into a run."""

import json
import pathlib

import pytest

FAMILIES = pathlib.Path(__file__).parents[1] / "fixtures" / "families"


@pytest.mark.parametrize("context", [16, 1024])
def test_context_is_at_most_the_published_one(context, tmp_path, launch):
  """The published model has 64 positions; longer contexts are untrained."""
  published = json.loads((FAMILIES / "llama_3" / "config.json").read_text())
  most = published["max_position_embeddings"]
  ended = launch(
    "convert", f"--from={FAMILIES / 'llama_3'}", f"--to={tmp_path / 'run'}",
    f"--config.inference.context={context}", f"--config.data.seq_len={context}",
  )
  assert ended.returncode == 0, ended.stderr
  config = json.loads((tmp_path / "run" / "config.json").read_text())
  lengths = config["inference"]["context"], config["data"]["seq_len"]
  assert lengths == (min(context, most), min(context, most))
  assert config["model"]["max_positions"] == most
  longer = [
    f"--workdir={tmp_path / 'run'}", f"--config.inference.context={most + 1}",
    "--prompt=a", "--max_tokens=1",
  ]
  ended = launch("generate", *longer)
  assert ended.returncode == 2
  assert ended.stderr.splitlines()[-1].startswith(
    f"error: config.inference.context={most + 1} must be at most config.model."
    f"max_positions={most}"
  )
  ended = launch("generate", *longer, "--config.model.max_positions=0")
  assert ended.returncode == 0, ended.stderr
