"""Revision of the shared state: its content, with leases, and its digest."""

from typing import NamedTuple

from parallel.peers.membership import leases
from parallel.peers.membership import shared_state as states
from parallel.peers.membership.leases import Leases
from parallel.peers.membership.messages import Digest
from parallel.peers.membership.shared_state import State

LEASES = "elastic/leases"  # key of the encoded leases in the shared state


class Revision(NamedTuple):
  """Committed version of the shared state.

  Attributes:
    number: Number of committed rounds.
    digest: Digest of `shared`.
    shared: Content: name -> array or bytes, including the leases if any.
    entries: Manifest of `shared`.
  """

  number: int
  digest: Digest
  shared: State
  entries: states.Manifest

  @property
  def visible(self) -> State:
    """Content without the leases."""
    return {k: v for k, v in self.shared.items() if k != LEASES}

  @property
  def leases(self) -> Leases:
    """Assignment of samples to peers."""
    return leases.decode(self.shared[LEASES])


def make(number: int, shared: State) -> Revision:
  """Hashes a state and returns it as a revision."""
  entries = states.manifest(shared)  # hashes all arrays
  return Revision(number, states.digest(entries), shared, entries)


def first(state: State, samples: int) -> State:
  """Returns a state with the initial leases, if it has none.

  Args:
    state: Shared state.
    samples: Samples per contribution; 0 for a run without leases.
  """
  if LEASES in state or not samples:  # resumed, or leases are disabled
    return dict(state)
  return {**state, LEASES: leases.encode(Leases())}
