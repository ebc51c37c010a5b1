"""Laws of text as examples: a model has a row for every token."""

import json

import pytest

from caatnet.build import experiments
from caatnet.build.override import override
from caatnet.train import loop
from configs.caatnet import tiny


def build(folder, vocab_size, percent):
  """A run on ASCII up to "z", 122, of which one document alone is made.

  Its place among the hashes is 0.35: up to 35% in validation it is trained on.
  """
  texts = [f"{i} " * 400 for i in range(8)] + ["z"]
  file = folder / "letters.jsonl"
  file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
  config = override(
    tiny.get_config("test"),
    f"model.vocab_size={vocab_size} data.path={file} "
    f"data.validation_percent={percent}",
  )
  return experiments.build(config)


@pytest.mark.parametrize(("percent", "side"), [(30, "train"), (40, "held out")])
def test_a_vocabulary_has_the_largest_token_of_the_data(
  percent, side, tmp_path
):
  windows = build(tmp_path, 123, percent).data.load(0).validation
  assert (windows.max() == 122) == (side == "held out")
  with pytest.raises(ValueError) as error:
    loop.train(build(tmp_path, 122, percent), tmp_path / "run", quiet=True)
  assert str(error.value) == (
    "config.model.vocab_size=122 must be above 122, the largest token of "
    "letters.jsonl"
  )
  assert not (tmp_path / "run").exists()
