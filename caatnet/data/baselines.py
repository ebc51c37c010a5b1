"""Losses of simple models on what a model is evaluated on: of text, of labels.

The unigram and bigram models count bytes in the training text, with one added
to every count (Laplace smoothing), so that no byte has probability 0. xz sees
the validation bytes alone, and its header counts.

Where tokens are not bytes, the unigram model counts tokens. There is no bigram
model: a text has so few of all pairs of tokens that the smoothing would decide.
"""

import dataclasses
import lzma
import math

import numpy as np

_NUM_BYTES = 256
_CHUNK_SIZE = 1 << 22  # bytes at a time, since pairs are counted in int64


@dataclasses.dataclass(frozen=True)
class Baselines:
  """Losses on the same targets, in nats per byte; bits are nats / ln 2.

  Attributes:
    unigram: The cross-entropy of byte frequencies.
    bigram: The cross-entropy of byte frequencies given the byte before.
    xz: The compressed size.
  """

  unigram: float
  bigram: float
  xz: float


def text_baselines(train: np.ndarray, windows: np.ndarray) -> Baselines:
  """Computes all baselines.

  Args:
    train: The text to count in, uint8 ``[num_train_bytes]``.
    windows: The windows to evaluate on, int ``[N, seq_len + 1]``, of which
      ``[:, 1:]`` are the targets.

  Returns:
    The losses, in nats per byte.
  """
  return Baselines(
    unigram=unigram_loss(train, windows),
    bigram=bigram_loss(train, windows),
    xz=xz_bits_per_byte(windows) * math.log(2),
  )


def unigram_loss(
  train: np.ndarray, windows: np.ndarray, num_tokens: int = _NUM_BYTES
) -> float:
  """Computes the cross-entropy of add-one smoothed frequencies of tokens.

  Args:
    train: The text to count in, unsigned ``[num_train_tokens]``.
    windows: The windows to evaluate on, int ``[N, seq_len + 1]``.
    num_tokens: How many tokens there are; those that are bytes are 256.

  Returns:
    The mean over the targets, in nats per token.
  """
  counts = np.bincount(train, minlength=num_tokens) + 1
  log_probs = np.log(counts / counts.sum())
  return -float(np.mean(log_probs[windows[:, 1:]]))


def bigram_loss(train: np.ndarray, windows: np.ndarray) -> float:
  """Computes the cross-entropy of smoothed frequencies given the byte before.

  Args:
    train: The text to count in, uint8 ``[num_train_bytes]``.
    windows: The windows to evaluate on, int ``[N, seq_len + 1]``.

  Returns:
    The mean over the targets, in nats per byte.
  """
  counts = np.ones(_NUM_BYTES * _NUM_BYTES, np.int64)
  for start in range(0, len(train) - 1, _CHUNK_SIZE):
    # One more byte than a chunk has: its last pair ends in the next one.
    chunk = train[start : start + _CHUNK_SIZE + 1].astype(np.int64)
    pairs = chunk[:-1] * _NUM_BYTES + chunk[1:]
    counts += np.bincount(pairs, minlength=counts.size)
  counts = counts.reshape(_NUM_BYTES, _NUM_BYTES)
  log_probs = np.log(counts / counts.sum(axis=1, keepdims=True))
  return -float(np.mean(log_probs[windows[:, :-1], windows[:, 1:]]))


def xz_bits_per_byte(windows: np.ndarray) -> float:
  """Compresses the targets, one window after the other, by xz -9e.

  Args:
    windows: The windows to evaluate on, int ``[N, seq_len + 1]``.

  Returns:
    Compressed bits per byte.
  """
  return compressed_bits_per_byte(windows[:, 1:].astype(np.uint8).tobytes())


def compressed_bits_per_byte(text: bytes) -> float:
  """Compresses a text by xz -9e; returns compressed bits per byte."""
  compressed = lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
  return 8 * len(compressed) / len(text)


def label_frequencies(
  train: np.ndarray, truth: np.ndarray, num_classes: int
) -> dict[str, float]:
  """Computes cross-entropy and accuracy of the labels' frequencies.

  One is added to every count, so that no label has probability 0.

  Args:
    train: Labels to count, from 0 to num_classes - 1.
    truth: Labels to guess.
    num_classes: The number of classes.
  """
  counts = np.bincount(train, minlength=num_classes) + 1
  log_probs = np.log(counts / counts.sum())
  return {
    "loss": -float(log_probs[truth].mean()),
    "accuracy": float((truth == counts.argmax()).mean()),
  }
