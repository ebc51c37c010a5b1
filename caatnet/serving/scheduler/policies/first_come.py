"""First come, first served."""

from caatnet.serving.scheduler.policies.base import Policy


class FirstCome(Policy):
  """Policy: order of arrival; the last request to arrive is preempted first."""
