"""What a model's builder may read beside its own section."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from caatnet.data.protocol import Data
from parallel.axes import Axis


@dataclasses.dataclass(frozen=True)
class Context:
  """The parts of an experiment on which a model depends.

  Attributes:
    platform: The kind of devices that will run it: "cpu", "gpu" or "tpu".
    tensor: The tensor axis.
    kernels: Implementations of norms in order of preference.
    data: The data that the model is trained on.
    sync: The section ``config.sync``; None if the config has none.
  """

  platform: str
  tensor: Axis
  kernels: tuple[str, ...]
  data: Data
  sync: Mapping[str, Any] | None
