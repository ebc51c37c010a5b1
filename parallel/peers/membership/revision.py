"""Revision of the shared state: arrays, sample leases, and their digest."""

from typing import NamedTuple

from parallel.peers.membership import leases
from parallel.peers.membership import shared_state as states
from parallel.peers.membership.leases import SampleLeases
from parallel.peers.membership.messages import Digest
from parallel.peers.membership.shared_state import State

LEASES_KEY = "elastic/leases"  # key of the encoded leases in the shared state


class Revision(NamedTuple):
  """Committed version of the shared state.

  Attributes:
    number: Number of committed rounds.
    digest: Digest of `shared`.
    shared: Content: name -> array or bytes. Includes the sample leases, if any.
    entries: Manifest of `shared`.
  """

  number: int
  digest: Digest
  shared: State
  entries: states.Manifest

  @property
  def state_without_leases(self) -> State:
    """Content of the revision without the sample leases."""
    return {k: v for k, v in self.shared.items() if k != LEASES_KEY}

  @property
  def leases(self) -> SampleLeases:
    """Assignment of samples to peers."""
    return leases.decode(self.shared[LEASES_KEY])


def make(number: int, shared: State) -> Revision:
  """Hashes a state and returns it as a revision."""
  entries = states.manifest(shared)  # hashes all arrays
  return Revision(number, states.digest(entries), shared, entries)


def with_initial_leases(state: State, samples: int) -> State:
  """Adds the initial sample leases to a state that has none.

  Args:
    state: Shared state.
    samples: Samples per contribution; 0 for a run without leases.
  """
  if LEASES_KEY in state or not samples:  # resumed, or leases are disabled
    return dict(state)
  return {**state, LEASES_KEY: leases.encode(SampleLeases())}
