"""What a model's builder may read beside its own section."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from caatnet.data.protocol import Data
from caatnet.data.text import TextData
from parallel.axes import Axis


@dataclasses.dataclass(frozen=True)
class Context:
  """The parts of an experiment on which a model depends.

  Attributes:
    platform: The kind of devices that will run it: "cpu", "gpu" or "tpu".
    tensor: The tensor axis.
    kernels: Implementations of all kernels in order of preference.
    evidence_of: The kind of device whose evidence decides where norms take
      their kernel; None to take it everywhere.
    data: The data that the model is trained on.
    sync: The section ``config.sync``; None if the config has none.
    stage: The stages that cut the vocabulary; None if none do.
  """

  platform: str
  tensor: Axis
  kernels: tuple[str, ...]
  evidence_of: str | None
  data: Data
  sync: Mapping[str, Any] | None
  stage: Axis | None = None

  def check_unshared(self, model: str, name: str, data: type) -> None:
    """Refuses what a model that tensor ranks do not share cannot have.

    Args:
      model: ``config.model.name``.
      name: ``config.data.name`` of the data that it reads.
      data: Their class.

    Raises:
      ValueError: There are tensor ranks, something to synchronise over them, or
        other data.
    """
    if self.tensor.size > 1:
      raise ValueError(
        f"config.parallel.tensor={self.tensor.size} must be 1 with "
        f"config.model.name={model!r}, which tensor ranks do not share"
      )
    if self.sync is not None:
      raise ValueError(
        f"config.sync has no effect with config.model.name={model!r}, which "
        "has no doors to synchronise: take the section out"
      )
    if not isinstance(self.data, data):
      raise ValueError(
        f"config.data.name must be {name!r} with config.model.name={model!r}"
      )

  def check_language(self, model: str) -> None:
    """Refuses what a language model that tensor ranks share cannot have.

    Args:
      model: ``config.model.name``.

    Raises:
      ValueError: The data are no text, or ``config.sync`` is missing.
    """
    if not isinstance(self.data, TextData):
      raise ValueError(
        f"config.data.name must be 'text' with config.model.name={model!r}"
      )
    if self.sync is None:
      raise ValueError(
        f"config.sync is missing: config.model.name={model!r} needs it "
        "(caatnet/config/schema/sync.py)"
      )
