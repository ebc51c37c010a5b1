"""What builders of models may look at beside their own section."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from caatnet.data.protocol import Data
from parallel.axes import Axis


@dataclasses.dataclass(frozen=True)
class Context:
  """The rest of an experiment, as far as a model depends on it.

  Attributes:
    platform: "cpu", "gpu" or "tpu": the devices that will run it.
    tensor: The tensor axis.
    kernels: Implementations of norms in order of preference.
    data: What is trained on.
    sync: ``config.sync``; None where the config has no such section.
  """

  platform: str
  tensor: Axis
  kernels: tuple[str, ...]
  data: Data
  sync: Mapping[str, Any] | None
