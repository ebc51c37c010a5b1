"""What training and evaluation know of data, whatever it is made of."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
  """Data that has been read.

  Attributes:
    name: What was read, for people.
    sha256: Hex digest of all of it.
    batches: Endless iterator over training batches, trees of arrays
      ``[batch_size, ...]``; its ``get_state()`` is plain data, from which
      ``set_state()`` goes on.
    validation: Tree of arrays ``[N, ...]``, what every evaluation reads.
    baselines: Returns what simple models reach on ``validation``: name of the
      model -> the measures that `Data.measures` has.
  """

  name: str
  sha256: str
  batches: Any
  validation: Any
  baselines: Callable[[], Mapping[str, Mapping[str, float]]]


class Data(Protocol):
  """Data that a config describes; nothing is read before ``load``.

  Attributes:
    batch_size: Examples per step, over all workers and data-parallel ranks.
    example: Tree of ``jax.ShapeDtypeStruct``: one example of a batch.
    unit: What throughput counts, in the plural: "tokens", "images".
    units_per_example: How many of them an example has.
    labels: Keys of the measures -> what tables call them.
  """

  batch_size: int
  example: Any
  unit: str
  units_per_example: int
  labels: Mapping[str, str]

  def load(self, seed: int) -> Dataset:
    """Reads the data; the seed decides the order of training batches.

    Raises:
      ValueError: The data cannot be read or are too few; names the config key.
    """
    ...

  def measures(self, means: Mapping[str, float]) -> dict[str, float]:
    """What the means of a model's scores say about these data.

    Args:
      means: By name, as `caatnet.models.protocol.Model.scores` has them.

    Returns:
      Numbers by key; "loss" comes first.
    """
    ...
