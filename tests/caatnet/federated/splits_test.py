"""Splits of data over clients."""

import numpy as np
import pytest

from caatnet.data.images import ImageData, enlarged
from caatnet.data.text import TextData
from caatnet.federated import splits

IMAGES = ImageData()


@pytest.mark.parametrize("split", ["even", "dirichlet"])
def test_each_example_has_one_client(split):
  dataset = IMAGES.load(0)
  sides = splits.split_indices(dataset, split, 5, 0.3, seed=1)
  again = splits.split_indices(dataset, split, 5, 0.3, seed=1)
  other = splits.split_indices(dataset, split, 5, 0.3, seed=2)
  for examples, side, same, different in zip(
    (dataset.train, dataset.validation), sides, again, other, strict=True
  ):
    together = np.sort(np.concatenate(side))
    np.testing.assert_array_equal(together, np.arange(len(examples["label"])))
    assert all(np.array_equal(x, y) for x, y in zip(side, same, strict=True))
    assert not np.array_equal(side[0], different[0])
    if split == "even":
      assert np.ptp([len(x) for x in side]) <= 1


@pytest.mark.parametrize("split", ["even", "dirichlet"])
def test_client_has_the_examples_of_its_part(split):
  dataset = IMAGES.load(4)
  train, validation = splits.split_indices(dataset, split, 3, 0.5, seed=4)
  one = splits.client_examples(IMAGES, split, 1, 3, 0.5, seed=4)
  assert one.name == f"{dataset.name}, part 1 of 3"
  for found, whole, places in (
    (one.train, dataset.train, train[1]),
    (one.validation, dataset.validation, validation[1]),
  ):
    for key, x in whole.items():
      np.testing.assert_array_equal(found[key], x[places])


def test_small_alpha_is_uneven():
  dataset = IMAGES.load(0)

  def largest_shares(alpha):
    train, _ = splits.split_indices(dataset, "dirichlet", 5, alpha, seed=1)
    labels = dataset.train["label"]
    counts = np.array([
      np.bincount(labels[mine], minlength=10) for mine in train
    ])
    return (counts.max(axis=0) / counts.sum(axis=0)).mean()

  uneven, even = largest_shares(0.1), largest_shares(100.0)
  assert uneven > 0.7
  assert even < 0.3


def test_packages_are_the_largest_and_disjoint():
  data = TextData(seq_len=64)
  found = [
    splits.client_examples(
      data, "packages", k, 3, 0.5, seed=0
    ) for k in range(3)
  ]
  assert len({x.name for x in found}) == 3
  assert found[0].num > found[2].num > 10
  for one in found:
    assert one.train.shape[1:] == (65,)
    # The last token of a window is the first one of the next.
    np.testing.assert_array_equal(one.train[:-1, -1], one.train[1:, 0])
  with pytest.raises(ValueError, match="clients=900 must be at most"):
    splits.client_examples(data, "packages", 0, 900, 0.5, seed=0)
  with pytest.raises(ValueError, match="needs images"):
    splits.client_examples(data, "even", 0, 2, 0.5, seed=0)


def test_own_file_is_a_client(tmp_path):
  path = tmp_path / "mine.npz"
  draw = np.random.RandomState(0)
  np.savez(
    path, images=draw.randint(256, size=(40, 8, 8)).astype(np.uint8),
    labels=draw.randint(10, size=40),
  )
  data = ImageData(path=str(path), batch_size=4)
  one = splits.client_examples(data, "own", 3, 5, 0.5, seed=0)
  assert one.num + len(one.validation["label"]) == 40
  assert one.train["image"].shape[1:] == (8, 8, 1)


def test_digits_are_enlarged():
  data = ImageData(shape=(32, 32, 3), enlarge=True)
  small, large = IMAGES.load(0).train, data.load(0).train
  assert large["image"].shape[1:] == (32, 32, 3)
  # The split is one of contents, so that the examples differ.
  np.testing.assert_array_equal(
    enlarged(small["image"], (32, 32, 3))[:, ::4, ::4, 1:2], small["image"]
  )
  with pytest.raises(ValueError, match="shape"):
    ImageData(shape=(30, 32, 3), enlarge=True).load(0)
