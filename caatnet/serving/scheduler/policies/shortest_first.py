"""Shortest job first, by the tokens that a request may read and draw."""

import operator

from caatnet.serving.scheduler.policies.base import Policy


class ShortestFirst(Policy):
  """Policy: shortest request first; `max_tokens` stands for the output length.

  The value is `Request.longest`, which does not change while a request runs.
  The running request with the largest value is preempted first.
  """

  value = operator.attrgetter("longest")
