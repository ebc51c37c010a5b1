"""Data protocol: the interface between datasets and training or evaluation."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, Protocol

from caatnet.data.tokenizers import Tokenizer
from parallel.memory.features import Table


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
  """Loaded data.

  Attributes:
    name: Name of the data for users.
    sha256: The hex digest of all files that were read.
    batches: An endless iterator over training batches, trees of arrays
      ``[batch_size, ...]``; leaves may be a `parallel.memory.features.Lookup`,
      which devices replace by an array. Its ``get_state()`` returns plain data;
      ``set_state()`` continues from it.
    validation: The validation examples, a tree of such leaves ``[N, ...]``.
    measures: A function that returns the reported measures, numbers by key with
      "loss" first. Its argument is the mean over ``validation`` of each score
      that `caatnet.models.protocol.Model.scores` returns.
    baselines: A function that returns the measures of simple models on
      ``validation``, by the model's name.
    tokenizer: The tokenizer of the data; None if they are not text.
    examples: Endless sequence of single examples in the order of ``batches``;
      None without random access.
    ahead: Number of batches that the host prefetches.
    table: The feature rows to which the `Lookup`s refer; None without lookups.
    train: The training examples, a tree of arrays ``[N, ...]``; None if they
      are not in memory as examples.
  """

  name: str
  sha256: str
  batches: Any
  validation: Any
  measures: Callable[[Mapping[str, float]], dict[str, float]]
  baselines: Callable[[], Mapping[str, Mapping[str, float]]]
  tokenizer: Tokenizer | None = None
  examples: Any = None
  ahead: int = 0
  table: Table | None = None
  train: Any = None


class Data(Protocol):
  """Data as described by a config; files are read by `load` only.

  Attributes:
    batch_size: Examples per step, over all workers and data-parallel ranks.
    example: One example of a batch, a tree of ``jax.ShapeDtypeStruct``.
    unit: Unit of throughput, in the plural, such as "tokens" or "images".
    units_per_example: Number of units per example.
    labels: Headings of the measures in tables, by key.
  """

  batch_size: int
  example: Any
  unit: str
  units_per_example: int
  labels: Mapping[str, str]

  def load(self, seed: int) -> Dataset:
    """Reads the data.

    Args:
      seed: Determines the order of training batches.

    Raises:
      ValueError: If the data cannot be read or are too few; the message names
        the config key.
    """
    ...
