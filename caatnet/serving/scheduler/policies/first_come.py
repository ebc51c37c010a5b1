"""First come, first served."""

from caatnet.serving.scheduler.policies.base import Policy


class FirstCome(Policy):
  """The order of arrival; who came last gives way."""
