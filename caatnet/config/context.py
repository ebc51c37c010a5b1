"""Parts of an experiment that the builders of models read."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from caatnet.data.protocol import Data
from caatnet.data.text import TextData
from parallel.axes import Axis


@dataclasses.dataclass(frozen=True)
class ModelContext:
  """Parts of an experiment on which a model depends.

  Attributes:
    platform: The platform of the devices: "cpu", "gpu" or "tpu".
    tensor: The tensor axis.
    kernels: Implementations of all kernels in order of preference.
    evidence_of: The device kind for which measurements decide whether norms use
      a kernel (`parallel.kernels.evidence`); None to use it in any case.
    data: The training data.
    sync: The section ``config.sync``; None if the config has none.
    stage: The stage axis if the vocabulary is sharded over stages, else None.
  """

  platform: str
  tensor: Axis
  kernels: tuple[str, ...]
  evidence_of: str | None
  data: Data
  sync: Mapping[str, Any] | None
  stage: Axis | None = None

  def check_single_rank(self, model: str, name: str, data: type) -> None:
    """Checks the config of a model that supports no tensor parallelism.

    Args:
      model: ``config.model.name``.
      name: The required ``config.data.name``.
      data: The required class of the data.

    Raises:
      ValueError: If there are several tensor ranks, a section ``config.sync``,
        or other data.
    """
    if self.tensor.size > 1:
      raise ValueError(
        f"config.parallel.tensor={self.tensor.size} must be 1 with "
        f"config.model.name={model!r}, which does not support tensor "
        "parallelism"
      )
    if self.sync is not None:
      raise ValueError(
        f"config.sync has no effect with config.model.name={model!r}, which "
        "has no row-parallel projections: remove the section"
      )
    if not isinstance(self.data, data):
      raise ValueError(
        f"config.data.name must be {name!r} with config.model.name={model!r}"
      )

  def check_language_model(self, model: str) -> None:
    """Checks the config of a language model that supports tensor parallelism.

    Args:
      model: ``config.model.name``.

    Raises:
      ValueError: If the data are not text, or ``config.sync`` is missing.
    """
    if not isinstance(self.data, TextData):
      raise ValueError(
        f"config.data.name must be 'text' with config.model.name={model!r}"
      )
    if self.sync is None:
      raise ValueError(
        f"config.sync is missing: config.model.name={model!r} needs it "
        "(caatnet/schema/sync.py)"
      )
