"""Shortest job first, by the tokens that a request may still read and draw."""

import operator

from caatnet.serving.scheduler.policies.base import Policy


class ShortestFirst(Policy):
  """Least work first; ``max_tokens`` is used as the unknown output length.

  A queued request has the work that was left when it joined the queue. Running
  requests are compared by the same number, so that the one with the most work
  is preempted first.
  """

  value = operator.attrgetter("longest")
