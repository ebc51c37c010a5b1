"""A revision of what peers share: its content, with leases, and its digest."""

from typing import NamedTuple

from parallel.elastic.membership import leases
from parallel.elastic.membership import shared_state as states
from parallel.elastic.membership.leases import Leases
from parallel.elastic.membership.messages import Digest
from parallel.elastic.membership.shared_state import State

LEASES = "elastic/leases"  # the name of the leases in the shared state


class Revision(NamedTuple):
  """A revision.

  Attributes:
    number: How many rounds have been committed.
    digest: Of its content.
    shared: Its content, with the leases if there are any.
    entries: The content's manifest.
  """

  number: int
  digest: Digest
  shared: State
  entries: states.Manifest

  @property
  def visible(self) -> State:
    """What the user shares, without the leases."""
    return {k: v for k, v in self.shared.items() if k != LEASES}

  @property
  def leases(self) -> Leases:
    """Who draws which samples."""
    return leases.decode(self.shared[LEASES])


def make(number: int, shared: State) -> Revision:
  """Hashes a content."""
  entries = states.manifest(shared)
  return Revision(number, states.digest(entries), shared, entries)


def first(state: State, samples: int) -> State:
  """Returns a content with the leases of a run's beginning, if it has none."""
  if LEASES in state or not samples:
    return dict(state)
  return {**state, LEASES: leases.encode(Leases())}
