"""First come, first served."""

from caatnet.serving.scheduler.policies.base import Policy


class FirstCome(Policy):
  """Order of arrival; the request that arrived last is preempted first."""
