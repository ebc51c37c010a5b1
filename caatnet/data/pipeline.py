"""Training batches and validation windows over a corpus.

Tokens are bytes or those of a tokenizer. A window has seq_len + 1 consecutive
tokens: the inputs are its first seq_len tokens, the targets its last seq_len.
Batches are global: every process draws the same batches, independent of the
number of devices, and transfers the part of its devices.
"""

from __future__ import annotations

from typing import Any

from etils import epy
import numpy as np

from caatnet.data import sources
from parallel.base.checks import at_least

with epy.lazy_imports():  # inference needs no batches
  import grain


class _Windows:
  """Random-access source of windows whose starts are seq_len apart.

  Each token after the first is a target of at most one window. At the end, up
  to seq_len - 1 tokens are not targets.
  """

  def __init__(self, text: np.ndarray, seq_len: int):
    self._text = text
    self._seq_len = seq_len

  def __len__(self) -> int:
    return (len(self._text) - 1) // self._seq_len

  def __getitem__(self, index: int) -> np.ndarray:
    start = index * self._seq_len
    return self._text[start : start + self._seq_len + 1].astype(np.int32)


def train_batches(
  corpus: sources.Corpus, *, seq_len: int, batch_size: int, seed: int
) -> grain.DatasetIterator[np.ndarray]:
  """Returns an endless iterator over shuffled training batches.

  Each epoch has every window once, in a new order. A batch may have the last
  windows of one epoch and the first windows of the next.

  Args:
    corpus: The text.
    seq_len: Tokens per sequence.
    batch_size: Sequences per batch, over all workers and data-parallel ranks.
    seed: Determines the order, together with the length of the text.

  Returns:
    An iterator of int32 ``[batch_size, seq_len + 1]``. Its get_state() is
    JSON-serialisable and is the position after the last returned batch;
    set_state() continues there.

  Raises:
    ValueError: If a size is not positive, the seed is out of range, or the text
      is too short for one batch.
  """
  at_least("config.data.seq_len", seq_len)
  at_least("config.data.batch_size", batch_size)
  needed = batch_size * seq_len + 1
  if len(corpus.train) < needed:
    raise ValueError(
      f"config.data.path: {corpus.name} has {len(corpus.train)} training "
      f"{corpus.unit}, but config.data.batch_size={batch_size} and "
      f"config.data.seq_len={seq_len} need {needed} for one batch"
    )
  return shuffled_batches(_Windows(corpus.train, seq_len), batch_size, seed)


def train_examples(
  corpus: sources.Corpus, seq_len: int, seed: int
) -> grain.MapDataset:
  """Returns examples in the order of `train_batches`; see `shuffled_examples`.

  Args:
    corpus: The text.
    seq_len: Tokens per sequence.
    seed: Determines the order, together with the length of the text.
  """
  return shuffled_examples(_Windows(corpus.train, seq_len), seed)


def shuffled_examples(source: Any, seed: int) -> grain.MapDataset:
  """Returns a source's examples in the order of training.

  Args:
    source: A sequence of examples, which are trees of arrays.
    seed: Determines the order; from 0 to 2^32 - 1.

  Returns:
    An endless sequence whose n-th element is the n-th example of a run.

  Raises:
    ValueError: If the seed is out of range.

  Example:
    >>> examples = shuffled_examples(["a", "b", "c"], seed=0)
    >>> sorted(examples[i] for i in range(3))  # one epoch
    ['a', 'b', 'c']
  """
  if not 0 <= seed < 2**32:
    raise ValueError(f"config.seed={seed} must be from 0 to {2**32 - 1}")
  # grain shuffles epoch e with seed + e. Without the hash, the first epoch of a
  # run with seed 1 would be the second epoch of a run with seed 0.
  shuffle_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
  # Practically endless. The length of an endless dataset, sys.maxsize, is
  # rounded up by batches of one example, and then exceeds the largest length.
  epochs = max(1, 2**52 // max(1, len(source)))
  return grain.MapDataset.source(source).shuffle(shuffle_seed).repeat(epochs)


def shuffled_batches(
  source: Any, batch_size: int, seed: int
) -> grain.DatasetIterator:
  """Returns an endless iterator over shuffled batches of a source's examples.

  Args:
    source: A sequence of examples, which are trees of arrays.
    batch_size: Examples per batch.
    seed: Determines the order; from 0 to 2^32 - 1.

  Returns:
    An iterator of trees ``[batch_size, ...]`` with get_state() and set_state().

  Raises:
    ValueError: If the seed is out of range.
  """
  dataset = (
    shuffled_examples(source, seed)
    .batch(batch_size)
    # Without threads: copying a few examples is faster than a thread switch.
    .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
  )
  return iter(dataset)


def validation_windows(
  corpus: sources.Corpus, *, seq_len: int, num_windows: int
) -> np.ndarray:
  """Returns windows at even distances in the validation text.

  Args:
    corpus: The text.
    seq_len: Tokens per sequence.
    num_windows: The number of windows; 0, or a number larger than the number of
      windows of the text, for all.

  Returns:
    int32 ``[N, seq_len + 1]``, in the order of the text; targets are disjoint.

  Raises:
    ValueError: If a size is negative, or the text is too short for one window.
  """
  at_least("config.data.seq_len", seq_len)
  if num_windows < 0:
    raise ValueError(
      f"config.data.validation_windows={num_windows} must be positive, or 0 "
      "for all windows"
    )
  windows = _Windows(corpus.validation, seq_len)
  num_tokens, num_found = len(corpus.validation), len(windows)
  if num_found < 1:
    raise ValueError(
      f"config.data.path: {corpus.name} has {num_tokens} validation "
      f"{corpus.unit}, but config.data.seq_len={seq_len} needs {seq_len + 1} "
      "for one window; config.data.validation_percent sets their share"
    )
  if num_windows == 0 or num_windows >= num_found:
    return np.stack([windows[i] for i in range(num_found)])
  # From the first token to the last, at least seq_len apart, since there are
  # fewer windows than fit.
  last_start = num_tokens - (seq_len + 1)
  starts = np.arange(num_windows) * last_start // max(num_windows - 1, 1)
  indices = starts[:, None] + np.arange(seq_len + 1)
  return corpus.validation[indices].astype(np.int32)
