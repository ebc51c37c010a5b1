"""What training and evaluation know of data, whatever they are made of."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, Protocol

from caatnet.data.tokenizers import Tokenizer
from parallel.memory.features import Table


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
  """Data that has been read.

  Attributes:
    name: What people call the data that were read.
    sha256: The hex digest of all that was read.
    batches: An endless iterator over training batches, trees of arrays
      ``[batch_size, ...]``, or of a `parallel.memory.features.Lookup` in place
      of an array that the devices fetch. Its ``get_state()`` returns plain
      data, from which ``set_state()`` goes on.
    validation: What every evaluation reads, a tree of such ``[N, ...]``.
    measures: A function that computes the measures of ``validation`` from the
      mean of each score that `caatnet.models.protocol.Model.scores` returns:
      numbers by key, of which "loss" is the first.
    baselines: A function that returns what simple models reach on
      ``validation``: these measures by the model's name.
    tokenizer: What made tokens of the data; None if they are no text.
    examples: The single examples in the order of ``batches``, by their number
      from 0, without end; None if they cannot be had one by one.
    ahead: How many batches the host makes while the present step runs.
    table: The rows that stand behind the batches' `Lookup`s; None for none.
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


class Data(Protocol):
  """Data that a config describes; nothing is read before `load`.

  Attributes:
    batch_size: Examples per step, over all workers and data-parallel ranks.
    example: One example of a batch, a tree of ``jax.ShapeDtypeStruct``.
    unit: What throughput counts, in the plural, such as "tokens" or "images".
    units_per_example: How many of these an example has.
    labels: What tables call the measures, by key.
  """

  batch_size: int
  example: Any
  unit: str
  units_per_example: int
  labels: Mapping[str, str]

  def load(self, seed: int) -> Dataset:
    """Reads the data.

    Args:
      seed: Decides the order of training batches.

    Raises:
      ValueError: The data cannot be read, or are too few; the message names the
        config key.
    """
    ...
