"""Properties of text as examples: vocabulary, bytes and measures."""

import itertools
import json
import math

import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.data import baselines, sources
from caatnet.data.text import TextData
from caatnet.train import loop
from configs.caatnet import tiny
from tests import pairwise
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


TABLE = pairwise.rows({
  "tokenizer": ("", "bpe"), "seq_len": (1, 16, 61), "batch_size": (1, 7),
  "percent": (40.0, 80.0), "own_file": (False, True), "windows": (0, 3),
  "before": (0, 5), "seed": (0, 2**32 - 1),
})


@pytest.mark.parametrize("row", TABLE, ids=pairwise.label)
def test_options_together_read_each_token_once(row, folder, tmp_path):
  """Windows of an epoch are the training text, those held out the rest."""
  texts, own = {path.read_bytes() for path in folder.glob("*.txt")}, ""
  if row["own_file"]:  # also has a training document, which is removed there
    held_out = {min(texts), b"the rat and the mat: a last text\n" * 30}
    own = tmp_path / "own.jsonl"
    own.write_text("\n".join(
      json.dumps({"text": text.decode()}) for text in held_out
    ))
  tokenizer = row["tokenizer"] and write(tmp_path / "bpe", bpe_files())
  data = text_data(
    folder, tokenizer, seq_len=row["seq_len"], batch_size=row["batch_size"],
    validation_percent=row["percent"], validation_path=str(own),
    validation_windows=row["windows"],
  )
  found = data.load(row["seed"])
  parts = sources.load_documents(data.path, row["percent"], str(own))
  train, validation = set(parts.train), set(parts.validation)
  if row["own_file"]:
    assert (train, validation) == (texts - held_out, held_out)
  else:
    assert train | validation == texts
    assert not train & validation
  t, end = row["seq_len"], found.tokenizer.separator

  def windows(documents):
    """Returns the joined documents and their windows, one every t tokens."""
    tokens = [end]
    for document in documents:
      tokens += [*found.tokenizer.encode(document.decode()), end]
    tokens = tokens[1:-1]
    return tokens, [
      tuple(tokens[i : i + t + 1]) for i in range(0, len(tokens) - t, t)
    ]

  _, expected = windows(parts.train)
  rows = [
    tuple(x.tolist()) for batch in itertools.islice(
      found.batches, -(-2 * len(expected) // row["batch_size"])
    ) for x in batch
  ]
  first, second = rows[: len(expected)], rows[len(expected) :][: len(expected)]
  assert sorted(first) == sorted(second) == sorted(expected)
  assert first != second
  again = data.load(row["seed"]).batches
  for _ in range(row["before"]):
    next(again)
  resumed = data.load(row["seed"]).batches
  resumed.set_state(json.loads(json.dumps(again.get_state())))
  np.testing.assert_array_equal(next(resumed), next(again))
  tokens, whole = windows(parts.validation)
  starts = range(0, len(tokens) - t, t)
  if row["windows"]:
    starts = [i * (len(tokens) - t - 1) // 2 for i in range(3)]
    whole = [tuple(tokens[i : i + t + 1]) for i in starts]
  assert [tuple(x.tolist()) for x in found.validation] == whole
  size = sum(
    1 if token == end else len(found.tokenizer.decode([token]).encode())
    for window in whole for token in window[1:]
  )
  assert found.measures({"loss": 3.0})["bits_per_byte"] == pytest.approx(
    3 * len(whole) * t / math.log(2) / size
  )


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
