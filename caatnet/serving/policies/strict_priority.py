"""Strict priority: the lowest number first, and it takes pages from others."""

from caatnet.serving.policies.base import Policy
from caatnet.serving.requests import Request


class StrictPriority(Policy):
  """The lowest priority number first, and among equals who came first."""

  def key(self, request: Request) -> tuple[float, int]:
    """Returns priority, then arrival."""
    return request.priority, request.number

  def displaces(self, waiting: Request, running: Request) -> bool:
    """A running request gives way to one of a lower number."""
    return waiting.priority < running.priority
