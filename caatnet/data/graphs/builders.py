"""Generators of synthetic graphs: R-MAT, and planted communities.

Both draw chunk by chunk with a separate random key per chunk, so that a graph
depends on its parameters and seed only, and is written in bounded memory.

**R-MAT** (Chakrabarti, Zhan and Faloutsos, SDM 2004) chooses each edge by
recursive bisection of the adjacency matrix: a quadrant has the probability a,
b, c or d. A few nodes have most of the edges, as in web graphs. Since a node's
degree depends on its position in the matrix, ids are a permutation of these
positions.

**Planted communities** have labels with a known bound on accuracy. Each node
independently draws a Poisson number of neighbours, each one of its own
community with the probability ``inside``, else of another community. Features
are the mean of the node's community plus normal noise.
`caatnet.data.graphs.bayes` computes the accuracy of Bayes' rule.
"""

from collections.abc import Callable, Iterator
import os
from typing import Any

import numpy as np

from caatnet.data.graphs.csr import (
  CHUNK,
  Edges,
  Graph,
  NodeRows,
  chunks,
  write_graph,
)
from parallel.base.checks import at_least, fraction, not_negative

# Fractions of the nodes in the training, validation and test splits.
SPLIT_FRACTIONS = (0.6, 0.2, 0.2)
_NODES = CHUNK >> 4  # nodes per chunk: fewer than edges, as they have features
# Numbers of independent random streams, by purpose.
_EDGE_STREAM, _DEGREE_STREAM, _FEATURE_STREAM, _MEAN_STREAM = range(4)


def rmat(
  folder: str | os.PathLike[str],
  *,
  scale: int,
  num_edges: int,
  num_features: int,
  num_classes: int,
  seed: int,
  quarters: tuple[float, float, float],
  signal: float,
) -> Graph:
  """Writes an R-MAT graph, in which labels correlate with features only.

  Args:
    folder: Folder of the graph.
    scale: The graph has 2^scale nodes.
    num_edges: Number of edges, with possible duplicates.
    num_features: Features of a node.
    num_classes: Node v has the label ``v % num_classes``.
    seed: Seed of all random numbers.
    quarters: The probabilities a, b and c; d is the rest.
    signal: The norm of a label's mean features, in units of the noise's
      standard deviation.

  Returns:
    The opened graph.

  Raises:
    ValueError: If a parameter is out of range.

  Source: the Graph500 specification uses R-MAT with such probabilities.
  """
  if not 1 <= scale <= 30:
    raise ValueError(f"scale={scale} must be 1 to 30")
  if len(quarters) != 3 or min(quarters) < 0 or sum(quarters) > 1:
    raise ValueError(
      f"quarters={quarters} must be three probabilities whose sum is at most 1"
    )
  a, b, c = quarters
  num_nodes = 1 << scale

  def edges() -> Iterator[Edges]:
    for number, (start, stop) in enumerate(chunks(num_edges)):
      rng = _rng(seed, _EDGE_STREAM, number)
      nodes = np.zeros((2, stop - start), np.int64)
      for _ in range(scale):  # one bit of both node ids per bisection
        draw = rng.random(stop - start, dtype=np.float32)
        quarter = (draw >= a).view(np.uint8) + (draw >= a + b)
        quarter += draw >= a + b + c
        nodes <<= 1
        nodes[0] |= quarter >> 1  # c and d are the lower half
        nodes[1] |= quarter & 1  # b and d are the right half
      # Multiplication by an odd factor permutes ids modulo a power of two.
      yield tuple(nodes * 0x9E3779B1 & (num_nodes - 1))

  made = {"name": "rmat", "scale": scale, "num_edges": num_edges,
          "quarters": list(quarters), "signal": signal, "seed": seed}
  means = class_means(num_classes, num_features, signal, seed)
  return _write(folder, num_nodes, means, edges, made)


def communities(
  folder: str | os.PathLike[str],
  *,
  num_nodes: int,
  mean_degree: float,
  num_features: int,
  num_classes: int,
  inside: float,
  signal: float,
  seed: int,
) -> Graph:
  """Writes a graph of planted communities, whose labels are the communities.

  Args:
    folder: Folder of the graph.
    num_nodes: Nodes; node v is in community ``v % num_classes``.
    mean_degree: The mean of the Poisson number of neighbours.
    num_features: Features of a node.
    num_classes: Number of communities.
    inside: The probability that a neighbour is of the same community.
    signal: The norm of a community's mean features, in units of the noise's
      standard deviation.
    seed: Seed of all random numbers.

  Returns:
    The opened graph.

  Raises:
    ValueError: If a parameter is out of range.
  """
  at_least("num_classes", num_classes, 2)
  at_least("num_nodes", num_nodes, num_classes)
  fraction("inside", inside)
  not_negative("mean_degree", mean_degree)
  # Community k of K has the nodes k, k + K, k + 2K, ...
  sizes = (num_nodes - np.arange(num_classes) + num_classes - 1) // num_classes

  def edges() -> Iterator[Edges]:
    for number, (start, stop) in enumerate(chunks(num_nodes, _NODES)):
      rng = _rng(seed, _DEGREE_STREAM, number)
      degrees = rng.poisson(mean_degree, stop - start)
      nodes = np.repeat(np.arange(start, stop), degrees)
      label = nodes % num_classes
      # An offset of 1 to K - 1 is uniform over the other communities.
      other = (label + rng.integers(1, num_classes, len(nodes))) % num_classes
      chosen = np.where(rng.random(len(nodes)) < inside, label, other)
      place = rng.random(len(nodes)) * sizes[chosen]
      yield nodes, place.astype(np.int64) * num_classes + chosen

  made = {"name": "communities", "mean_degree": mean_degree, "inside": inside,
          "signal": signal, "seed": seed}
  means = class_means(num_classes, num_features, signal, seed)
  return _write(folder, num_nodes, means, edges, made)


def class_means(
  num_classes: int, num_features: int, signal: float, seed: int
) -> np.ndarray:
  """Returns the mean features of each class, float32 ``[K, F]``.

  The means are random directions of equal norm.

  Args:
    num_classes: K.
    num_features: F.
    signal: The norm, in units of the noise's standard deviation.
    seed: The seed of the graph.
  """
  at_least("num_features", num_features)
  means = _rng(seed, _MEAN_STREAM).normal(size=(num_classes, num_features))
  means *= signal / np.linalg.norm(means, axis=1, keepdims=True)
  return means.astype(np.float32)


def _write(
  folder: str | os.PathLike[str], num_nodes: int, means: np.ndarray,
  edges: Callable[[], Iterator[Edges]], made: dict[str, Any],
) -> Graph:
  """Writes a graph whose features are class means plus noise.

  Node v of a graph of K classes has the label ``v % K``. ``means`` are ``[K,
  F]``, ``made`` the metadata of the generator.
  """
  num_classes, num_features = means.shape

  def rows() -> Iterator[NodeRows]:
    for number, (start, stop) in enumerate(chunks(num_nodes, _NODES)):
      rng = _rng(made["seed"], _FEATURE_STREAM, number)
      labels = np.arange(start, stop) % num_classes
      features = rng.standard_normal(
        (stop - start, num_features), dtype=np.float32
      )
      features += means[labels]
      # Index into csr.SPLITS: train, validation or test.
      split = np.searchsorted(
        np.cumsum(SPLIT_FRACTIONS)[:-1], rng.random(stop - start), side="right"
      )
      yield features, labels, split

  return write_graph(
    folder, num_nodes=num_nodes, num_features=num_features, edges=edges,
    rows=rows(), meta={
      "name": f"{made['name']} of {num_nodes:,} nodes",
      "num_classes": num_classes, "generator": made,
    },
  )


def _rng(seed: int, *use: int) -> np.random.Generator:
  """Returns a random generator that depends on a seed, and on its ``use``.

  The use is the purpose of the numbers and the index of the chunk.
  """
  return np.random.Generator(np.random.SFC64([seed, *use]))
