"""Properties of the baselines, against entropies in closed form."""

import lzma
import math

import numpy as np
import pytest

from caatnet.data import baselines, pipeline, sources


def _as_windows(text: np.ndarray, seq_len: int) -> np.ndarray:
  num_windows = (len(text) - 1) // seq_len
  starts = seq_len * np.arange(num_windows)
  return text[starts[:, None] + np.arange(seq_len + 1)].astype(np.int32)


def _markov_chain(stay: float, length: int, seed: int) -> np.ndarray:
  """Returns a cycle 10, 11, 12, 13, 10, ... with steps skipped at random."""
  rng = np.random.default_rng(seed)
  moves = rng.random(length) >= stay
  return (10 + np.cumsum(moves) % 4).astype(np.uint8)


@pytest.mark.parametrize("stay", [0.25, 0.6, 0.95])
def test_markov_chain_losses_equal_the_entropies(stay):
  train = _markov_chain(stay, 400_000, seed=0)
  windows = _as_windows(_markov_chain(stay, 400_000, seed=1), 100)
  rate = -stay * math.log(stay) - (1 - stay) * math.log(1 - stay)
  assert baselines.bigram_loss(train, windows) == pytest.approx(rate, abs=0.01)
  assert baselines.unigram_loss(train, windows) == pytest.approx(
    math.log(4), abs=0.01
  )


def test_bigram_counts_cross_chunks(monkeypatch):
  train = _markov_chain(0.8, 1_000, seed=0)
  windows = _as_windows(_markov_chain(0.8, 1_000, seed=1), 10)
  whole = baselines.bigram_loss(train, windows)
  for chunk_size in (1, 7, 999, 1_000):
    monkeypatch.setattr(baselines, "_CHUNK_SIZE", chunk_size)
    assert baselines.bigram_loss(train, windows) == whole


def test_add_one_smoothing_equals_the_value_by_hand():
  train = np.array([1, 1, 1, 2], np.uint8)
  windows = np.array([[1, 2, 3]], np.int32)
  # Targets 2 and 3: counts 1 + 1 and 0 + 1 of 4 + 256.
  unigram = -(math.log(2 / 260) + math.log(1 / 260)) / 2
  # 1 is followed by 1, 1, 2; 2 is followed by no byte.
  bigram = -(math.log(2 / 259) + math.log(1 / 256)) / 2
  assert baselines.unigram_loss(train, windows) == pytest.approx(unigram)
  assert baselines.bigram_loss(train, windows) == pytest.approx(bigram)


def test_without_counts_all_bytes_are_equally_likely():
  nothing = np.zeros(0, np.uint8)
  windows = _as_windows(np.arange(256, dtype=np.uint8), 5)
  losses = baselines.text_baselines(nothing, windows)
  assert losses.unigram == pytest.approx(math.log(256))
  assert losses.bigram == pytest.approx(math.log(256))


def test_xz_is_the_compressed_size_of_the_targets_in_order():
  text = _markov_chain(0.9, 20_001, seed=0)
  windows = _as_windows(text, 100)
  size = len(lzma.compress(
    text[1:].tobytes(), preset=9 | lzma.PRESET_EXTREME
  ))
  assert baselines.xz_bits_per_byte(windows) == 8 * size / 20_000
  losses = baselines.text_baselines(text, windows)
  assert losses.xz == pytest.approx(8 * size / 20_000 * math.log(2))


def test_noise_does_not_compress():
  noise = np.random.default_rng(0).integers(0, 256, 20_001, dtype=np.uint8)
  assert 8 <= baselines.xz_bits_per_byte(_as_windows(noise, 100)) < 8.1


@pytest.mark.quick
def test_baselines_are_ordered_on_the_standard_library():
  corpus = sources.join_documents(sources.load_documents("", 5.0))
  windows = pipeline.validation_windows(corpus, seq_len=256, num_windows=512)
  losses = baselines.text_baselines(corpus.train, windows)
  assert losses.xz < losses.bigram < losses.unigram < math.log(256)
