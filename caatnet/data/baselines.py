"""Baselines: losses of simple models on validation text or labels.

The unigram and bigram models count bytes in the training text, with one added
to every count (Laplace smoothing), so that no byte has probability 0. xz
compresses the validation bytes only; its header is included.

If tokens are not bytes, the unigram model counts tokens and there is no bigram
model: most pairs of tokens do not occur, so smoothing would dominate.
"""

import dataclasses
import lzma
import math

import numpy as np

_NUM_BYTE_VALUES = 256
_CHUNK_SIZE = 1 << 22  # bytes per chunk: pairs take 8 bytes each, as int64


@dataclasses.dataclass(frozen=True)
class Baselines:
  """Losses of simple models on the validation targets, in nats per byte.

  Attributes:
    unigram: Cross-entropy of byte frequencies.
    bigram: Cross-entropy of byte frequencies given the previous byte.
    xz: Size of the text after compression by xz.
  """

  unigram: float
  bigram: float
  xz: float


def text_baselines(train: np.ndarray, windows: np.ndarray) -> Baselines:
  """Returns the losses of all simple models on a text of bytes.

  Args:
    train: The training text, uint8 ``[num_train_bytes]``.
    windows: The validation windows, int ``[N, seq_len + 1]``, with targets
      ``[:, 1:]``.

  Returns:
    The losses, in nats per byte.
  """
  return Baselines(
    unigram=unigram_loss(train, windows),
    bigram=bigram_loss(train, windows),
    xz=xz_bits_per_byte(windows) * math.log(2),
  )


def unigram_loss(
  train: np.ndarray, windows: np.ndarray, num_tokens: int = _NUM_BYTE_VALUES
) -> float:
  """Returns the cross-entropy of add-one smoothed token frequencies.

  Args:
    train: The training text, unsigned ``[num_train_tokens]``.
    windows: The validation windows, int ``[N, seq_len + 1]``.
    num_tokens: Size of the vocabulary; 256 for bytes.

  Returns:
    The mean over the targets, in nats per token.

  Example:
    >>> train = np.array([0, 0, 1], np.uint8)  # smoothed: 3/6, 2/6, 1/6
    >>> windows = np.array([[0, 1, 2]])  # targets 1 and 2
    >>> round(unigram_loss(train, windows, num_tokens=3), 4)
    1.4452
  """
  counts = np.bincount(train, minlength=num_tokens) + 1
  log_probs = np.log(counts / counts.sum())
  return -float(np.mean(log_probs[windows[:, 1:]]))


def bigram_loss(train: np.ndarray, windows: np.ndarray) -> float:
  """Returns the cross-entropy of smoothed frequencies given the previous byte.

  Args:
    train: The training text, uint8 ``[num_train_bytes]``.
    windows: The validation windows, int ``[N, seq_len + 1]``.

  Returns:
    The mean over the targets, in nats per byte.
  """
  # add-one smoothing
  counts = np.ones(_NUM_BYTE_VALUES * _NUM_BYTE_VALUES, np.int64)
  for start in range(0, len(train) - 1, _CHUNK_SIZE):
    # One byte more than the chunk, since its last pair ends in the next chunk.
    chunk = train[start : start + _CHUNK_SIZE + 1].astype(np.int64)
    pairs = chunk[:-1] * _NUM_BYTE_VALUES + chunk[1:]
    counts += np.bincount(pairs, minlength=counts.size)
  counts = counts.reshape(_NUM_BYTE_VALUES, _NUM_BYTE_VALUES)
  # log P(byte | previous byte), [256, 256].
  log_probs = np.log(counts / counts.sum(axis=1, keepdims=True))
  return -float(np.mean(log_probs[windows[:, :-1], windows[:, 1:]]))


def xz_bits_per_byte(windows: np.ndarray) -> float:
  """Returns the compressed bits per byte of all targets in sequence, by xz -9e.

  Args:
    windows: The validation windows, int ``[N, seq_len + 1]``.

  Returns:
    Compressed bits per byte.
  """
  return compressed_bits_per_byte(windows[:, 1:].astype(np.uint8).tobytes())


def compressed_bits_per_byte(text: bytes) -> float:
  """Returns the compressed bits per byte of a text, by xz -9e."""
  compressed = lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
  return 8 * len(compressed) / len(text)


def label_frequency_measures(
  train: np.ndarray, truth: np.ndarray, num_classes: int
) -> dict[str, float]:
  """Returns loss and accuracy of a model that predicts label frequencies.

  One is added to every count, so that no label has probability 0.

  Args:
    train: Training labels, from 0 to num_classes - 1.
    truth: Validation labels.
    num_classes: The number of classes.

  Returns:
    "loss" in nats, and "accuracy" of the most frequent label.
  """
  counts = np.bincount(train, minlength=num_classes) + 1
  log_probs = np.log(counts / counts.sum())
  return {
    "loss": -float(log_probs[truth].mean()),
    "accuracy": float((truth == counts.argmax()).mean()),
  }
