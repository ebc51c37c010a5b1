"""Graph data: examples are labelled nodes; ``config.data`` named "graphs"."""

from collections.abc import Mapping
import dataclasses
import functools
import math
import tempfile
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from caatnet.data.baselines import label_frequency_measures
from caatnet.data.graphs import bayes, builders
from caatnet.data.graphs.csr import CHUNK, Graph, chunks, open_graph
from caatnet.data.graphs.sampling import (
  SAMPLERS,
  Sampler,
  check_fanouts,
  num_tree_positions,
)
from caatnet.data.protocol import Dataset
from caatnet.schema.data import Graphs
from parallel.base.checks import known
from parallel.base.naming import prefix_error_keys
from parallel.memory.features import ACCESSES, Lookup, Table
from parallel.plans.placement import caches

# The graph of ``config.data.path=""``. Bayes-optimal accuracy is 39% from a
# node's features only, and 85% with fanouts (10, 5).
DEFAULT_GRAPH = {
  "num_nodes": 65_536, "mean_degree": 15.0, "num_features": 16,
  "num_classes": 8, "inside": 0.6, "signal": 1.0, "seed": 0,
}
CACHE_POLICIES = ("degree", "presampling")
# Positions of a batch are int32 in compiled programs.
_MAX_BATCH_POSITIONS = 2**31 - 1
# Batches that are sampled to estimate the access frequency of rows.
_NUM_PRESAMPLED = 50
# First example indices of validation and presampling. They are above those of
# training, so that the random numbers of the trees are different.
_FIRST_VALIDATION, _FIRST_PRESAMPLING = 2**32, 2**33


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphData(Graphs):
  """Data of a node classifier: nodes with sampled neighbourhoods.

  Attributes:
    kernels: Implementations of kernels in order of preference.
  """

  unit: ClassVar[str] = "nodes"
  units_per_example: ClassVar[int] = 1
  labels: ClassVar[Mapping[str, str]] = {
    "loss": "cross-entropy, nats", "accuracy": "accuracy",
    "bound": "Bayes' bound on accuracy",
  }
  kernels: tuple[str, ...] = ("reference",)

  def __post_init__(self) -> None:
    known("cache=", self.cache, CACHE_POLICIES)
    known("access=", self.access, ACCESSES)
    known("sampler=", self.sampler, SAMPLERS)
    check_fanouts(self.fanouts)
    places = num_tree_positions(self.fanouts) * self.batch_size
    if places > _MAX_BATCH_POSITIONS:
      raise ValueError(
        f"fanouts={self.fanouts} with config.data.batch_size={self.batch_size} "
        f"need {places:,} places for nodes; at most {_MAX_BATCH_POSITIONS:,} "
        "are allowed"
      )

  @property
  def example(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Features float32 ``[T, F]``, degrees int32 ``[T]``, and int32 label."""
    places = num_tree_positions(self.fanouts)
    return {
      "features": jax.ShapeDtypeStruct(
        (places, self.num_features), jnp.float32
      ),
      "degree": jax.ShapeDtypeStruct((places,), jnp.int32),
      "label": jax.ShapeDtypeStruct((), jnp.int32),
    }

  def load(self, seed: int) -> Dataset:
    with prefix_error_keys(
      "config.data", [f.name for f in dataclasses.fields(self)]
    ):
      return self._load(seed)

  def _load(self, seed: int) -> Dataset:
    graph, train = self._open()
    if self.cache_rows > graph.num_nodes:
      raise ValueError(
        f"cache_rows={self.cache_rows} must be at most {graph.num_nodes}, the "
        "number of nodes of the graph"
      )
    sampler = functools.partial(
      Sampler, graph, self.fanouts, threads=self.threads,
      implementation=self.sampler,
    )
    trees = Trees(sampler(seed=seed), train, self.batch_size, seed)
    table = Table(
      graph.features, self.access, self._select_cached_rows(graph, trees),
      self.kernels
    )
    held_out = graph.nodes("validation")[: self.validation_nodes or None]
    # Seed 0: validation trees are independent of the run's seed.
    ids, degrees = sampler(seed=0).sample(held_out, _FIRST_VALIDATION)
    truth = graph.labels[held_out]

    @functools.cache
    def bound(depth: int | None = None) -> float:
      return bayes.accuracy(
        graph.features, ids, degrees, truth, self.fanouts, graph.meta, depth
      )

    batches = Batches(trees, table, graph.labels)
    known = graph.meta.get("generator", {}).get("name") == "communities"
    return Dataset(
      name=graph.meta.get("name", graph.folder.name),
      sha256=graph.meta["sha256"],
      batches=batches,
      examples=batches,
      validation={
        "features": Lookup(table, ids), "degree": degrees, "label": truth
      },
      measures=lambda means: {
        "loss": means["loss"], "accuracy": means["accuracy"]
      } | ({"bound": bound()} if known else {}),
      baselines=lambda: {
        "label frequencies": label_frequency_measures(
          graph.labels[train], truth, self.num_classes
        )
      } | ({
        "a node's own features, Bayes": _only_accuracy(bound(0)),
        "Bayes": _only_accuracy(bound()),
      } if known else {}),
      ahead=self.ahead,
      table=table,
    )

  def _open(self) -> tuple[Graph, np.ndarray]:
    """Returns the graph, checked against the config, and its training nodes."""
    if self.path:
      try:
        graph = open_graph(self.path)
      except ValueError as error:
        raise ValueError(f"config.data.path={self.path!r}: {error}") from error
    else:
      # The arrays remain mapped after the files have been deleted.
      with tempfile.TemporaryDirectory() as folder:
        graph = builders.communities(folder, **DEFAULT_GRAPH)
    if graph.features.shape[1] != self.num_features:
      raise ValueError(
        f"config.data.num_features={self.num_features}, but nodes have "
        f"{graph.features.shape[1]}"
      )
    if graph.labels.max(initial=-1) >= self.num_classes:
      raise ValueError(
        f"config.data.num_classes={self.num_classes}, but there is the label "
        f"{graph.labels.max()}"
      )
    train = graph.nodes("train")
    for split, count, least in (
      ("train", len(train), self.batch_size),
      ("validation", len(graph.nodes("validation")), 1),
    ):
      if count < least:
        raise ValueError(
          f"config.data.path={self.path!r} has {count} labelled nodes to "
          f"{split.replace('validation', 'validate')} on, but must have "
          f"{least}" + (", config.data.batch_size" if least > 1 else "")
        )
    return graph, train

  def _select_cached_rows(self, graph: Graph, trees: "Trees") -> np.ndarray:
    """Returns the nodes whose feature rows are cached on every device."""
    if not self.cache_rows:
      return np.zeros(0, np.int64)
    if self.cache == "degree":
      # A row is read once for each edge to its node.
      counts = np.zeros(graph.num_nodes, np.int64)
      for start, stop in chunks(graph.num_edges, 8 * CHUNK):
        counts += np.bincount(
          graph.indices[start:stop], minlength=graph.num_nodes
        )
    else:
      first = _FIRST_PRESAMPLING
      counts = caches.count(
        (
          np.unique(trees.at(first + number * self.batch_size)[1])
          for number in range(_NUM_PRESAMPLED)
        ),
        graph.num_nodes,
      )
    return caches.most_frequent(counts, self.cache_rows)


class Trees:
  """Endless sequence of a run's examples: nodes with sampled trees.

  An epoch has all training nodes once, in random order.
  """

  def __init__(
    self, sampler: Sampler, nodes: np.ndarray, batch_size: int, seed: int
  ) -> None:
    """Creates the examples of a run.

    Args:
      sampler: Samples trees by the index of the example.
      nodes: The training nodes, int32.
      batch_size: Examples per batch.
      seed: Determines the order, together with the number of nodes.
    """
    self.sampler, self.nodes, self.batch_size = sampler, nodes, batch_size
    # The order of an epoch. Two are cached, as a batch may span two epochs.
    self._order = functools.lru_cache(2)(
      lambda epoch: np.random.Generator(
        np.random.SFC64([seed, epoch])
      ).permutation(nodes)
    )

  def at(
    self, first: int, count: int | None = None
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns roots ``[B]``, and ids and degrees ``[B, T]``, of a batch.

    Args:
      first: The index of the first example.
      count: B; None for ``batch_size``.
    """
    # Example n is node n % N of epoch n // N.
    numbers = np.arange(first, first + (count or self.batch_size))
    epochs, places = np.divmod(numbers, len(self.nodes))
    roots = np.concatenate([
      self._order(int(epoch))[places[epochs == epoch]]
      for epoch in np.unique(epochs)
    ])
    return roots, *self.sampler.sample(roots, first)


class Batches:
  """Endless iterator over training batches; its state is an example index."""

  def __init__(self, trees: Trees, table: Table, labels: np.ndarray) -> None:
    """Creates an iterator that begins with the first example.

    Args:
      trees: The examples.
      table: The features of all nodes.
      labels: The labels of all nodes.
    """
    self._trees, self._table, self._labels = trees, table, labels
    self._next = 0

  def __iter__(self) -> "Batches":
    return self

  def __next__(self) -> dict[str, Any]:
    self._next += self._trees.batch_size
    return self._at(self._next - self._trees.batch_size)

  def __getitem__(self, number: int) -> dict[str, Any]:
    """Returns a single example, independent of the iterator's position."""
    batch = self._at(number, 1)
    return {
      "features": Lookup(self._table, batch["features"].ids[0]),
      "degree": batch["degree"][0],
      "label": batch["label"][0],
    }

  def _at(self, first: int, count: int | None = None) -> dict[str, Any]:
    roots, ids, degrees = self._trees.at(first, count)
    return {
      "features": Lookup(self._table, ids),
      "degree": degrees,
      "label": self._labels[roots],
    }

  def get_state(self) -> dict[str, int]:
    """Returns the number of examples that have been read."""
    return {"examples": self._next}

  def set_state(self, state: Mapping[str, int]) -> None:
    """Continues after the given number of examples."""
    self._next = state["examples"]


def _only_accuracy(value: float) -> dict[str, float]:
  """Returns the measures of a rule that gives no probabilities, so no loss."""
  return {"loss": math.nan, "accuracy": value}
