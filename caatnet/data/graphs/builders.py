"""Graphs from a few numbers: R-MAT, and planted communities.

Both draw chunk by chunk, each chunk from a key of its own, so that a graph
depends on its numbers and seed only and is written in bounded memory.

**R-MAT** (Chakrabarti, Zhan and Faloutsos, SDM 2004) halves the matrix of edges
again and again and goes into a quarter with the probabilities a, b, c and d: a
few nodes have most of the edges, as in the web. Where a node is in the matrix
says how many it has, so ids are scrambled.

**Planted communities** have labels that are known to be learnable up to a
bound. Each node names neighbours on its own account: a Poisson number of them,
each of its own community with the probability ``inside``, else of another one.
Features are the mean of a node's community and normal noise. What a node's
neighbourhood tells of its community is then exactly what
`caatnet.data.graphs.bayes` computes.
"""

from collections.abc import Callable, Iterator
import os
from typing import Any

import numpy as np

from caatnet.data.graphs.csr import (
  CHUNK,
  Edges,
  Graph,
  Rows,
  chunks,
  write_graph,
)
from parallel.checks import at_least, fraction, not_negative

# The shares of nodes that are trained on, validated on, and tested on.
SHARES = (0.6, 0.2, 0.2)
_NODES = CHUNK >> 4  # of a chunk of rows, which have features
# What a stream of random numbers is for.
_EDGES, _DEGREES, _FEATURES, _MEANS = range(4)


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
  """Writes an R-MAT graph; features tell of labels, edges do not.

  Args:
    folder: Where to.
    scale: The graph has 2^scale nodes.
    num_edges: Edges, of which some are there twice.
    num_features: Features of a node.
    num_classes: Node v has the label ``v % num_classes``.
    seed: Decides everything.
    quarters: The probabilities a, b and c; d is the rest.
    signal: The norm of the mean of a label's features, in units of the noise.

  Source: Graph500's specification has these probabilities.
  """
  if not 1 <= scale <= 30:
    raise ValueError(f"scale={scale} must be 1 to 30")
  if len(quarters) != 3 or min(quarters) < 0 or sum(quarters) > 1:
    raise ValueError(
      f"quarters={quarters} must be three probabilities, 1 together at most"
    )
  a, b, c = quarters
  num_nodes = 1 << scale

  def edges() -> Iterator[Edges]:
    for number, (start, stop) in enumerate(chunks(num_edges)):
      rng = _rng(seed, _EDGES, number)
      nodes = np.zeros((2, stop - start), np.int64)
      for _ in range(scale):
        draw = rng.random(stop - start, dtype=np.float32)
        quarter = (draw >= a).view(np.uint8) + (draw >= a + b)
        quarter += draw >= a + b + c
        nodes <<= 1
        nodes[0] |= quarter >> 1  # c and d are the lower half
        nodes[1] |= quarter & 1  # b and d are the right one
      # An odd factor permutes the numbers below a power of two.
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
  """Writes planted communities, which are the labels.

  Args:
    folder: Where to.
    num_nodes: Nodes; node v is in community ``v % num_classes``.
    mean_degree: The mean of the Poisson number of neighbours.
    num_features: Features of a node.
    num_classes: Communities.
    inside: The probability that a neighbour is of the same community.
    signal: The norm of a community's mean, in units of the noise.
    seed: Decides everything.
  """
  at_least("num_classes", num_classes, 2)
  at_least("num_nodes", num_nodes, num_classes)
  fraction("inside", inside)
  not_negative("mean_degree", mean_degree)
  # Nodes v, v + K, v + 2K, ... of a community of K.
  sizes = (num_nodes - np.arange(num_classes) + num_classes - 1) // num_classes

  def edges() -> Iterator[Edges]:
    for number, (start, stop) in enumerate(chunks(num_nodes, _NODES)):
      rng = _rng(seed, _DEGREES, number)
      degrees = rng.poisson(mean_degree, stop - start)
      nodes = np.repeat(np.arange(start, stop), degrees)
      label = nodes % num_classes
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

  They are random directions of equal norm.

  Args:
    num_classes: K.
    num_features: F.
    signal: The norm, in units of the standard deviation of the noise.
    seed: That of the graph.
  """
  at_least("num_features", num_features)
  means = _rng(seed, _MEANS).normal(size=(num_classes, num_features))
  means *= signal / np.linalg.norm(means, axis=1, keepdims=True)
  return means.astype(np.float32)


def _write(
  folder: str | os.PathLike[str], num_nodes: int, means: np.ndarray,
  edges: Callable[[], Iterator[Edges]], made: dict[str, Any],
) -> Graph:
  """Writes a graph whose features are class means and noise.

  Node v of a graph of K classes has the label ``v % K``.
  """
  num_classes, num_features = means.shape

  def rows() -> Iterator[Rows]:
    for number, (start, stop) in enumerate(chunks(num_nodes, _NODES)):
      rng = _rng(made["seed"], _FEATURES, number)
      labels = np.arange(start, stop) % num_classes
      features = rng.standard_normal(
        (stop - start, num_features), dtype=np.float32
      )
      features += means[labels]
      split = np.searchsorted(
        np.cumsum(SHARES)[:-1], rng.random(stop - start), side="right"
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
  """Makes the stream of random numbers for one use, such as a chunk."""
  return np.random.Generator(np.random.SFC64([seed, *use]))
