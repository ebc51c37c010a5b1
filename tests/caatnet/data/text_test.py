"""Properties of text as examples: vocabulary, bytes and measures."""

import json
import math

import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.data import baselines
from caatnet.data.text import TextData
from caatnet.train import loop
from configs.caatnet import tiny
from tests.caatnet.data.small_tokenizers import bpe_files, subject, write


def build(folder, vocab_size, percent):
  """Returns a run on ASCII text; only the document "z" has byte 122.

  The hash of that document is at 0.35: up to 35% validation it is trained on.
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
def test_vocabulary_includes_the_largest_token_of_the_data(
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


def text_data(folder, tokenizer, **changes):
  values = dict(
    path=str(folder), tokenizer=tokenizer, seq_len=16, batch_size=2,
    validation_percent=40.0, validation_path="", validation_windows=0,
  )
  return TextData(**(values | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Returns a folder of ASCII documents, in which a byte is a character."""
  folder = tmp_path_factory.mktemp("texts")
  for number in range(12):
    text = f"the cat {number} and the hat {number * 7}: that is that\n" * 20
    (folder / f"{number}.txt").write_text(text)
  return folder


def test_byte_tokens_measure_as_bytes_do(folder, tmp_path):
  """A tokenizer without merges: one token per byte, a separator for byte 0."""
  tokenizer = write(tmp_path / "smallest", bpe_files(257))
  found = text_data(folder, tokenizer, vocab_size=257).load(0)
  plain = text_data(folder, "", vocab_size=256).load(0)
  assert found.sha256 == plain.sha256
  byte_of = np.zeros(257, int)
  for byte in range(128):
    byte_of[found.tokenizer.encode(chr(byte))[0]] = byte
  byte_of[found.tokenizer.separator] = 0
  for mine, bytes_ in (
    (found.validation, plain.validation),
    (next(found.batches), next(plain.batches)),
  ):
    assert mine.dtype == np.int32
    np.testing.assert_array_equal(byte_of[mine], bytes_)
  assert found.measures({"loss": 2.0}) == plain.measures({"loss": 2.0})
  mine, bytes_ = found.baselines(), plain.baselines()
  assert mine["xz (this text alone)"] == bytes_["xz (this text alone)"]
  assert mine["unigram"]["loss"] == pytest.approx(
    bytes_["unigram"]["loss"], abs=0.01
  )


@pytest.mark.parametrize("windows", [0, 5])
def test_bits_are_per_byte_of_the_evaluated_text(
  windows, folder, tmp_path
):
  """Counts the bytes of the decoded targets, and one byte per separator."""
  tokenizer = write(tmp_path / "bpe", bpe_files())
  data = text_data(folder, tokenizer, validation_windows=windows)
  found = data.load(0)
  targets = found.validation[:, 1:].reshape(-1)
  text = b"".join(
    b"\0" if token == found.tokenizer.separator
    else found.tokenizer.decode([token]).encode() for token in targets
  )
  assert len(text) > 1.5 * targets.size
  bits = 2.0 * targets.size / math.log(2) / len(text)
  measured = found.measures({"loss": 2.0})
  assert measured == pytest.approx({"loss": 2.0, "bits_per_byte": bits})
  assert data.labels == {
    "loss": "nats per token", "bits_per_byte": "bits per byte"
  }
  simple = found.baselines()
  assert simple["xz (this text alone)"]["bits_per_byte"] == pytest.approx(
    baselines.compressed_bits_per_byte(text)
  )
  assert simple["unigram"]["loss"] < math.log(300)


def test_example_is_a_window_in_the_order_of_training(folder):
  data = text_data(folder, "")
  assert data.labels["loss"] == "nats per byte"
  assert data.units_per_example == 16
  found = data.load(5)
  for number in range(3):
    for i, row in enumerate(next(found.batches)):
      one = found.examples[2 * number + i]
      assert (one.shape, one.dtype) == (data.example.shape, data.example.dtype)
      np.testing.assert_array_equal(one, row)


def test_kept_tokenizer_replaces_the_path(folder):
  kept = subject("bpe")
  found = text_data(folder, "/gone", kept=kept)
  assert found.labels["loss"] == "nats per token"
  assert found.load(0).tokenizer is kept
  kept = subject("bytes")
  found = text_data(folder, "/gone", kept=kept)
  assert found.labels["loss"] == "nats per byte"
  assert found.load(0).tokenizer is kept


def test_vocabulary_includes_the_largest_token_of_the_tokenizer(
  folder, tmp_path
):
  """Applies also if the text does not contain that token."""
  tokenizer = write(tmp_path / "mine", bpe_files())
  with pytest.raises(ValueError) as error:
    text_data(folder, tokenizer, vocab_size=299).load(0)
  assert str(error.value) == (
    "config.model.vocab_size=299 must be above 299, the largest token of mine"
  )
  with pytest.raises(ValueError, match=r"mine: |has \d+ training tokens, but"):
    text_data(folder, tokenizer, batch_size=9999).load(0)
  with pytest.raises(ValueError, match=r"has \d+ validation tokens, but"):
    text_data(folder, tokenizer, seq_len=1999).load(0)
