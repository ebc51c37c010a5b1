"""Shortest first, by the tokens that a request may still read and draw."""

import operator

from caatnet.serving.scheduler.policies.base import Policy


class ShortestFirst(Policy):
  """The least work first; ``max_tokens`` stands for what is not known.

  In line a request has the work that was left when it joined; what runs is
  compared by the same number, so that the last to be admitted gives way.
  """

  value = operator.attrgetter("longest")
