"""Training batches and validation windows over a corpus.

A token is a byte, or what a tokenizer makes of several. A window has
seq_len + 1 consecutive tokens: the inputs are its first seq_len tokens, the
targets its last seq_len. Batches are global. Every process draws the
same ones, whatever the numbers of devices and lanes, and keeps its share.
"""

from typing import Any

import grain
import numpy as np

from caatnet.data import sources
from parallel.checks import at_least


class _Windows:
  """Random access to windows that start seq_len apart.

  Each token after the first is the target of at most one window; fewer than
  seq_len tokens at the end are the target of none.
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
  """Iterates over shuffled training batches without end.

  Each epoch holds every window once, in an order of its own. A batch may hold
  the last windows of one epoch and the first ones of the next.

  Args:
    corpus: The text.
    seq_len: Tokens per sequence.
    batch_size: Sequences per batch, over all workers and data-parallel ranks.
    seed: Decides the order, together with the length of the text only.

  Returns:
    An iterator of int32 ``[batch_size, seq_len + 1]``. Its get_state() is
    JSON-serializable and counts exactly the batches that were returned;
    set_state() continues after them.

  Raises:
    ValueError: A size is not positive, the seed is out of range, or the text is
      too short for one batch.
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
  return shuffled(_Windows(corpus.train, seq_len), batch_size, seed)


def train_examples(
  corpus: sources.Corpus, seq_len: int, seed: int
) -> grain.MapDataset:
  """Returns the examples of `train_batches`, in the same order, as `ordered`.

  Args:
    corpus: The text.
    seq_len: Tokens per sequence.
    seed: Decides the order, together with the length of the text only.
  """
  return ordered(_Windows(corpus.train, seq_len), seed)


def ordered(source: Any, seed: int) -> grain.MapDataset:
  """Puts a source's examples into the order in which they are trained on.

  Args:
    source: A sequence of examples, which are trees of arrays.
    seed: Decides the order; from 0 to 2^32 - 1.

  Returns:
    An endless sequence: example n is the n-th one that a run reads.

  Raises:
    ValueError: The seed is out of range.
  """
  if not 0 <= seed < 2**32:
    raise ValueError(f"config.seed={seed} must be from 0 to {2**32 - 1}")
  # grain shuffles epoch e with the seed plus e. Without the hash, a run with
  # seed 1 would begin with the second epoch of the run with seed 0.
  shuffle_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
  return grain.MapDataset.source(source).shuffle(shuffle_seed).repeat()


def shuffled(source: Any, batch_size: int, seed: int) -> grain.DatasetIterator:
  """Iterates over shuffled batches of a source's examples without end.

  Args:
    source: A sequence of examples, which are trees of arrays.
    batch_size: Examples per batch.
    seed: Decides the order; from 0 to 2^32 - 1.

  Returns:
    An iterator of trees ``[batch_size, ...]`` with get_state() and set_state().

  Raises:
    ValueError: The seed is out of range.
  """
  dataset = (
    ordered(source, seed)
    .batch(batch_size)
    # Without threads: copying a few examples is cheaper than handing them over.
    .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
  )
  return iter(dataset)


def validation_windows(
  corpus: sources.Corpus, *, seq_len: int, num_windows: int
) -> np.ndarray:
  """Takes windows at even distances from the validation text.

  Args:
    corpus: The text.
    seq_len: Tokens per sequence.
    num_windows: The number of windows; 0 takes all, as does a number that is
      larger than there are.

  Returns:
    int32 ``[N, seq_len + 1]``, in the order of the text. No token is a target
    twice.

  Raises:
    ValueError: A size is negative, or the text is too short for one window.
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
  # From the first token to the last, at least seq_len apart: fewer than fit.
  last_start = num_tokens - (seq_len + 1)
  starts = np.arange(num_windows) * last_start // max(num_windows - 1, 1)
  indices = starts[:, None] + np.arange(seq_len + 1)
  return corpus.validation[indices].astype(np.int32)
