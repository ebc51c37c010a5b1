"""Examples of federated clients: parts of a data set, or data of their own.

Splits depend on the arrays and the seed only. ``numpy.random.RandomState``
generates the same numbers in all versions of numpy.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from caatnet.data import pipeline, sources
from caatnet.data.images import ImageData
from caatnet.data.protocol import Data, Dataset
from caatnet.data.text import TextData

SPLITS = ("even", "dirichlet", "packages", "own")


class Examples(NamedTuple):
  """Examples of one client.

  Attributes:
    name: Name of the examples in reports.
    train: Tree of arrays ``[n, ...]``; n may be 0.
    validation: Tree of arrays ``[m, ...]``; m may be 0.
  """

  name: str
  train: Any
  validation: Any

  @property
  def num(self) -> int:
    """Number of training examples."""
    return len(jax.tree.leaves(self.train)[0])


def client_examples(
  data: Data, split: str, client: int, num: int, alpha: float, seed: int
) -> Examples:
  """Returns the examples of a client.

  Args:
    data: ``config.data``.
    split: One of `SPLITS`.
    client: Id of the client.
    num: Number of clients.
    alpha: Concentration of "dirichlet".
    seed: Seed of the split.

  Raises:
    ValueError: The data cannot be split in this way.
  """
  if split == "packages":
    return _package_examples(data, client, num)
  dataset = data.load(seed)
  if dataset.train is None:
    raise ValueError(
      f"split={split!r} needs images; use split='packages' for text"
    )
  if split == "own":
    return Examples(dataset.name, dataset.train, dataset.validation)
  if split == "dirichlet" and not isinstance(data, ImageData):
    raise ValueError("split='dirichlet' needs images, since it needs labels")
  train, validation = split_indices(dataset, split, num, alpha, seed)
  return Examples(
    f"{dataset.name}, part {client} of {num}",
    _rows(dataset.train, train[client]),
    _rows(dataset.validation, validation[client]),
  )


def split_indices(
  dataset: Dataset, split: str, num: int, alpha: float, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Returns the indices of each client's training and validation examples.

  Each example has one client. With "dirichlet", the examples of each class are
  distributed over clients by shares drawn from a symmetric Dirichlet
  distribution with concentration ``alpha`` (Hsu et al., arXiv 1909.06335, draw
  classes per client instead); the shares of training and validation are equal.
  """
  draw = np.random.RandomState(seed)
  labels = [dataset.train["label"], dataset.validation["label"]]
  if split == "even":
    return tuple(
      np.array_split(draw.permutation(len(found)), num) for found in labels
    )
  found: list[list[list[np.ndarray]]] = [[[] for _ in range(num)] for _ in "tv"]
  for kind in np.unique(np.concatenate(labels)):
    ends = np.cumsum(draw.dirichlet(np.full(num, alpha)))[:-1]
    for side, some in zip(found, labels, strict=True):
      places = draw.permutation(np.flatnonzero(some == kind))
      cut = np.split(places, np.round(ends * len(places)).astype(int))
      for client, mine in zip(side, cut, strict=True):
        client.append(mine)
  return tuple([np.concatenate(mine) for mine in side] for side in found)


def _rows(tree: Any, places: np.ndarray) -> Any:
  return jax.tree.map(lambda x: x[places], tree)


def _package_examples(data: Data, client: int, num: int) -> Examples:
  """Returns text of the standard library's client-th largest package."""
  if not isinstance(data, TextData) or data.path or data.tokenizer:
    raise ValueError(
      "split='packages' needs config.data.name='text' with path='' and "
      "tokenizer='': the bytes of Python's standard library"
    )
  packages = sources.load_stdlib_packages(data.validation_percent)
  if num > len(packages):
    raise ValueError(
      f"clients={num} must be at most {len(packages)}, the number of packages "
      "of Python's standard library"
    )
  documents = packages[client]
  corpus = sources.join_documents(documents)

  def windows(tokens: np.ndarray) -> np.ndarray:
    if len(tokens) <= data.seq_len:
      return np.zeros((0, data.seq_len + 1), np.int32)
    return pipeline.validation_windows(
      dataclasses.replace(corpus, validation=tokens), seq_len=data.seq_len,
      num_windows=0,
    )

  return Examples(
    documents.name, windows(corpus.train), windows(corpus.validation)
  )
