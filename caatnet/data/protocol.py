"""What training and evaluation know of data, whatever they are made of."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
  """Data that has been read.

  Attributes:
    name: What people call the data that were read.
    sha256: The hex digest of all that was read.
    batches: An endless iterator over training batches, trees of arrays
      ``[batch_size, ...]``. Its ``get_state()`` returns plain data, from which
      ``set_state()`` goes on.
    validation: What every evaluation reads, a tree of arrays ``[N, ...]``.
    baselines: A function that returns what simple models reach on
      ``validation``: the measures of `Data.measures` by the model's name.
  """

  name: str
  sha256: str
  batches: Any
  validation: Any
  baselines: Callable[[], Mapping[str, Mapping[str, float]]]


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

  def measures(self, means: Mapping[str, float]) -> dict[str, float]:
    """Computes the measures of these data from the means of a model's scores.

    Args:
      means: The mean of each score that `caatnet.models.protocol.Model.scores`
        returns.

    Returns:
      Numbers by key, of which "loss" is the first.
    """
    ...
