"""User interface of a swarm: shared state, contributions and rounds.

  with Swarm(address, security, {"theta": theta}) as swarm:
    while swarm.revision < rounds:
      part = compute(swarm.state["theta"])
      swarm.give(part, combine)

where, for a mean of float32,

  def combine(exchange, state, part):
    return {"theta": state["theta"] - exchange.mean(part)}

`give` returns when a new contribution is due, usually with a newer state.
`counted` reports whether the contribution was counted: a peer that was
disconnected receives the newest state, and its contribution is dropped if it
may have been counted already, or if its samples were granted to other peers.

Example:
  >>> import tempfile, threading
  >>> import numpy as np
  >>> from parallel.peers.membership.journal import Journal
  >>> from parallel.peers.membership.service import CoordinatorService
  >>> from parallel.peers.swarm import Swarm
  >>> from parallel.peers.transport.handshake import Security
  >>> def combine(exchange, state, part):
  ...   return {"theta": state["theta"] - exchange.mean(part)}
  >>> security = Security(b"sixteen random bytes")
  >>> state = {"theta": np.ones(2, np.float32)}
  >>> part = np.full(2, 0.25, np.float32)
  >>> with (  # a swarm of one peer, with its coordinator in a thread
  ...   tempfile.TemporaryDirectory() as folder,
  ...   Journal(f"{folder}/journal") as journal,
  ...   CoordinatorService(
  ...     ("127.0.0.1", 0), security, journal, say=str
  ...   ) as service,
  ... ):
  ...   threading.Thread(target=service.serve, daemon=True).start()
  ...   with Swarm(service.address, security, state) as swarm:
  ...     print(swarm.give(part, combine)["theta"], swarm.revision)
  [0.75 0.75] 1
"""

from collections.abc import Callable
import logging
import math
from typing import Any

from parallel.peers import agent
from parallel.peers.agent import PeerSettings
from parallel.peers.exchange import Combine, PeerContribution
from parallel.peers.membership import ids
from parallel.peers.membership.leases import Spans
from parallel.peers.membership.messages import Digest, Id
from parallel.peers.membership.revision import Revision, with_initial_leases
from parallel.peers.membership.shared_state import State, Value
from parallel.peers.transport.handshake import Address, Security
from parallel.peers.transport.listener import Listener

LOG = logging.getLogger(__name__)
_SETTINGS = PeerSettings()


class Swarm:
  """Membership of this process in a swarm, for use by one thread."""

  def __init__(
    self, coordinator: Address, security: Security, state: State, *,
    revision: int = 0, settings: PeerSettings = _SETTINGS,
    say: Callable[[str], None] = LOG.warning,
  ) -> None:
    """Connects to a coordinator.

    Args:
      coordinator: (host, port) at which the coordinator listens.
      security: Token and TLS settings of all connections.
      state: Initial shared state: name -> C-contiguous array of booleans,
        integers or floats, or bytes. Arrays are not copied and become
        read-only. A peer that joins a running swarm may pass any state: that
        of the swarm replaces it.
      revision: Revision of the state, for a swarm that resumes from a
        checkpoint.
      settings: Settings of the peer.
      say: Callback that receives lines about the state of the run, in any
        thread. By default they are logged as warnings.

    Raises:
      ValueError: A value cannot be shared, or an address is invalid.
    """
    shared = with_initial_leases(state, settings.samples)
    # The id contains the port, which is known only once the listener exists.
    listener = Listener("", security, settings.listen)
    try:
      listener.me = ids.make(
        settings.advertise or listener.address, security.identity
      )
      # Starts the threads that connect to the coordinator.
      self._agent = agent.Agent(
        coordinator, security, shared, revision, listener, settings, say
      )
    except BaseException:
      listener.close()
      raise

  def __enter__(self) -> "Swarm":
    """Waits until the peer is a member and holds the newest state.

    Raises:
      PeerHalted: The peer cannot join.
      RunFinished: All rounds of the run are committed.
    """
    try:
      self._wait()
    except BaseException:
      self._agent.leave()
      raise
    return self

  def __exit__(self, *_: Any) -> None:
    self._agent.leave()

  @property
  def state(self) -> dict[str, Value]:
    """Newest committed state, without leases; its arrays are read-only."""
    return dict(self._agent.newest.state_without_leases)

  @property
  def newest(self) -> Revision:
    """Newest committed revision: number, digest, state, leases and manifest."""
    return self._agent.newest

  @property
  def checkpoint(self) -> tuple[int, State]:
    """(revision, state with its leases), from which a run can resume."""
    newest = self.newest
    return newest.number, newest.shared

  @property
  def revision(self) -> int:
    """Number of committed rounds."""
    return self._agent.newest.number

  @property
  def digest(self) -> Digest:
    """Digest of the state, equal on all peers with the same revision."""
    return self._agent.newest.digest

  @property
  def me(self) -> Id:
    """Id of this peer."""
    return self._agent.peer.id

  @property
  def members(self) -> tuple[Id, ...]:
    """Members of the newest epoch, in the order of their ranks."""
    return self._agent.members

  @property
  def epoch(self) -> int:
    """Number of the newest epoch."""
    return self._agent.peer.epoch

  @property
  def samples(self) -> Spans:
    """Samples of the next contribution, as [start, stop) spans."""
    return self._agent.drawn[1]

  @property
  def counted(self) -> bool:
    """Whether the last contribution is known to be in a committed round."""
    return self._agent.counted

  def give(
    self, part: Any, combine: Combine, weight: float = 1.0,
    loss: float | None = None,
  ) -> dict[str, Value]:
    """Submits a contribution to a round; returns when the next one is due.

    Args:
      part: Contribution, passed to `combine`; the caller must not modify it
        before this returns.
      combine: Function that computes the next state, see `exchange.Combine`.
        Its exceptions end the peer and are raised here, except `LinksLost`,
        after which the round is attempted again.
      weight: Weight of the contribution, e.g. its number of tokens. If all
        weights are 0, contributions are weighted equally.
      loss: Loss of the contribution, which the coordinator displays; None or
        a non-finite value for none.

    Returns:
      The newest committed state.

    Raises:
      ValueError: The weight is negative or not finite; or peers call different
        operations of the exchange, or pass arrays of different sizes, and this
        peer's call is not the most frequent one.
      PeerHalted: The coordinator has stopped the peer or cannot be reached.
    """
    if not 0 <= weight < math.inf:
      raise ValueError(f"weight={weight} must be finite and not negative")
    if loss is not None and not math.isfinite(loss):
      loss = None  # JSON has no NaN; the display shows a missing value
    # The samples were drawn when the contribution became due.
    begun, samples = self._agent.drawn
    self._agent.give(PeerContribution(
      part, combine, weight, begun, samples,
      None if loss is None else float(loss),
    ))
    self._wait()
    return self.state

  def _wait(self) -> None:
    """Waits until the next contribution is due or the peer has ended."""
    # The agent's thread sets `working` or `error` under this condition.
    changed = self._agent.changed
    with changed:
      changed.wait_for(lambda: self._agent.working or self._agent.error)
      if self._agent.error is not None:
        # Later calls raise it, too: a peer that has ended does not recover.
        raise self._agent.error
