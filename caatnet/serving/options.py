"""Options of ``config.serving``, with a check of the policy's name."""

import dataclasses

from caatnet.schema.inference import Serving
from caatnet.serving.scheduler.policies.registry import POLICIES
from parallel.base.checks import known


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingOptions(Serving):
  """Options of a server: ``config.serving``.

  Raises:
    ValueError: The policy is not in `POLICIES`.
  """

  def __post_init__(self) -> None:
    known("policy=", self.policy, tuple(POLICIES))


DEFAULTS = ServingOptions()
