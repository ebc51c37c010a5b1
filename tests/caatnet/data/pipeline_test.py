"""Properties of batches: coverage, order, position and errors."""

import itertools
import json

import numpy as np
import pytest

from caatnet.data import pipeline, sources

_SEQ_LEN = 7


def _corpus(num_train: int, num_validation: int = 100) -> sources.Corpus:
  rng = np.random.default_rng(0)
  return sources.Corpus(
    name="random",
    sha256="",
    train=rng.integers(0, 256, num_train, dtype=np.uint8),
    validation=rng.integers(0, 256, num_validation, dtype=np.uint8),
  )


def _iterate(num_windows: int = 20, batch_size: int = 3, seed: int = 0):
  corpus = _corpus(num_windows * _SEQ_LEN + 1)
  return corpus, pipeline.train_batches(
    corpus, seq_len=_SEQ_LEN, batch_size=batch_size, seed=seed
  )


def _take(iterator, num_batches: int) -> np.ndarray:
  return np.stack(list(itertools.islice(iterator, num_batches)))


def _epochs(seed: int, num_epochs: int) -> np.ndarray:
  """Returns window indices [num_epochs, 20] in training order."""
  corpus, iterator = _iterate(num_windows=20, batch_size=4, seed=seed)
  rows = _take(iterator, 5 * num_epochs).reshape(-1, _SEQ_LEN + 1)
  index = {
    corpus.train[i * _SEQ_LEN : (i + 1) * _SEQ_LEN + 1].tobytes(): i
    for i in range(20)
  }
  found = [index[row.astype(np.uint8).tobytes()] for row in rows]
  return np.array(found).reshape(num_epochs, 20)


def test_batches_are_int32_windows():
  _, iterator = _iterate(batch_size=3)
  batch = next(iterator)
  assert batch.shape == (3, _SEQ_LEN + 1)
  assert batch.dtype == np.int32


@pytest.mark.quick
def test_epoch_has_each_window_once():
  for epoch in _epochs(seed=0, num_epochs=3):
    assert sorted(epoch) == list(range(20))


def test_epoch_has_each_window_once_if_batches_do_not_divide_it():
  corpus, iterator = _iterate(num_windows=20, batch_size=3)
  rows = _take(iterator, 20).reshape(3, 20, _SEQ_LEN + 1)
  for epoch in rows:
    targets = np.sort(epoch[:, 1:].reshape(-1))
    np.testing.assert_array_equal(targets, np.sort(corpus.train[1:]))


@pytest.mark.quick
def test_each_epoch_and_each_seed_has_its_own_order():
  orders = [tuple(x) for seed in range(4) for x in _epochs(seed, 3)]
  assert len(set(orders)) == 12
  assert tuple(range(20)) not in orders


def test_equal_seeds_give_equal_batches():
  batches = [_take(_iterate(seed=3)[1], 15) for _ in range(2)]
  np.testing.assert_array_equal(*batches)


@pytest.mark.quick
@pytest.mark.parametrize("num_before", [0, 1, 6, 7, 13, 14, 40])
def test_resumed_iterator_equals_an_uninterrupted_one(num_before):
  _, uninterrupted = _iterate()  # 20/3 batches per epoch
  if num_before:
    _take(uninterrupted, num_before)
  state = json.loads(json.dumps(uninterrupted.get_state()))
  expected = _take(uninterrupted, 10)
  _, resumed = _iterate()
  resumed.set_state(state)
  np.testing.assert_array_equal(_take(resumed, 10), expected)
  uninterrupted.set_state(state)
  np.testing.assert_array_equal(_take(uninterrupted, 10), expected)


@pytest.mark.filterwarnings("error")  # a division by 0
@pytest.mark.parametrize("num_windows", [1, 2, 3, 5, 9, 13])
def test_validation_windows_are_even_and_disjoint(num_windows):
  corpus = _corpus(100, num_validation=100)  # 14 windows fit
  # An increasing text, so that a window shows its position.
  object.__setattr__(corpus, "validation", np.arange(100, dtype=np.uint8))
  windows = pipeline.validation_windows(
    corpus, seq_len=_SEQ_LEN, num_windows=num_windows
  )
  assert windows.shape == (num_windows, _SEQ_LEN + 1)
  assert windows.dtype == np.int32
  assert (np.diff(windows, axis=1) == 1).all()
  strides = np.diff(windows[:, 0])
  assert (strides >= _SEQ_LEN).all()
  if num_windows > 1:
    assert strides.max() - strides.min() <= 1
    assert windows[0, 0] == 0
    assert windows[-1, -1] == 99


@pytest.mark.parametrize("num_windows", [0, 14, 15, 1000])
def test_all_validation_windows_cover_the_text(num_windows):
  corpus = _corpus(100, num_validation=100)
  windows = pipeline.validation_windows(
    corpus, seq_len=_SEQ_LEN, num_windows=num_windows
  )
  assert windows.shape == (14, _SEQ_LEN + 1)
  assert windows.dtype == np.int32
  np.testing.assert_array_equal(
    windows[:, 1:].reshape(-1), corpus.validation[1 : 1 + 14 * _SEQ_LEN]
  )


def test_shortest_texts_are_enough():
  corpus = _corpus(num_train=3 * _SEQ_LEN + 1, num_validation=_SEQ_LEN + 1)
  iterator = pipeline.train_batches(
    corpus, seq_len=_SEQ_LEN, batch_size=3, seed=0
  )
  targets = np.sort(next(iterator)[:, 1:].reshape(-1))
  np.testing.assert_array_equal(targets, np.sort(corpus.train[1:]))
  windows = pipeline.validation_windows(
    corpus, seq_len=_SEQ_LEN, num_windows=0
  )
  np.testing.assert_array_equal(windows, corpus.validation[None])


@pytest.mark.parametrize(("arguments", "message"), [
  (
    {"batch_size": 4},
    "random has 28 training bytes, but .*batch_size=4 and .*seq_len=7 need 29",
  ),
  ({"batch_size": 0}, "config.data.batch_size=0 must be at least 1"),
  ({"seq_len": 0}, "config.data.seq_len=0 must be at least 1"),
  ({"seed": -1}, "config.seed=-1 must be from 0 to 4294967295"),
  ({"seed": 2**32}, "config.seed=4294967296 must be from 0 to 4294967295"),
])
def test_invalid_training_option_is_named(arguments, message):
  arguments = {"seq_len": _SEQ_LEN, "batch_size": 2, "seed": 0} | arguments
  with pytest.raises(ValueError, match=message) as info:
    pipeline.train_batches(_corpus(4 * _SEQ_LEN), **arguments)
  assert str(info.value).startswith("config.")


@pytest.mark.parametrize(("arguments", "message"), [
  (
    {"seq_len": 8},
    "random has 8 validation bytes, but config.data.seq_len=8 needs 9",
  ),
  ({"num_windows": -1}, "config.data.validation_windows=-1 must be positive"),
  ({"seq_len": -1}, "config.data.seq_len=-1 must be at least 1"),
])
def test_invalid_validation_option_is_named(arguments, message):
  arguments = {"seq_len": _SEQ_LEN, "num_windows": 1} | arguments
  with pytest.raises(ValueError, match=message) as info:
    pipeline.validation_windows(_corpus(100, num_validation=8), **arguments)
  assert str(info.value).startswith("config.")
