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
