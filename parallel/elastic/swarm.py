"""What a training program sees of a swarm: the state, the part, the rounds.

  with Swarm(address, security, {"theta": theta}) as swarm:
    while swarm.revision < rounds:
      part = compute(swarm.state["theta"])
      swarm.give(part, combine)

where, for a mean of float32,

  def combine(exchange, state, part):
    return {"theta": state["theta"] - exchange.mean(part)}

`give` returns when there is a newer state from which the next part is to be
computed. That the part was counted is told by `counted`: a peer that was away
for a while gets the newest state, and its part is dropped if it may have been
counted, or if its samples have gone to others.
"""

from collections.abc import Callable
import logging
import math
from typing import Any

from parallel.elastic import agent
from parallel.elastic.agent import Settings
from parallel.elastic.exchange import Combine, Part
from parallel.elastic.membership import ids
from parallel.elastic.membership.leases import Spans
from parallel.elastic.membership.messages import Digest, Id
from parallel.elastic.membership.revision import Revision, first
from parallel.elastic.membership.shared_state import State, Value
from parallel.elastic.transport.handshake import Address, Security
from parallel.elastic.transport.listener import Listener

LOG = logging.getLogger(__name__)
_SETTINGS = Settings()


class Swarm:
  """A peer's place in a swarm, for one thread of the user's."""

  def __init__(
    self, coordinator: Address, security: Security, state: State, *,
    revision: int = 0, settings: Settings = _SETTINGS,
    say: Callable[[str], None] = LOG.info,
  ) -> None:
    """Connects to a coordinator.

    Args:
      coordinator: Where it listens.
      security: What all connections are protected by.
      state: What peers share: name -> contiguous array of booleans, integers or
        floats, or bytes. It is not copied, and cannot be written any more. A
        peer that joins later may have another one, and gets the others'.
      revision: Its revision, of a swarm that goes on from a checkpoint.
      settings: How the peer takes part.
      say: Takes lines about what is waited for; any thread calls it.

    Raises:
      ValueError: A value cannot be shared, or an address is not right.
    """
    shared = first(state, settings.samples)
    listener = Listener("", security, settings.listen)
    try:
      listener.me = ids.make(settings.advertise or listener.address)
      self._agent = agent.Agent(
        coordinator, security, shared, revision, listener, settings, say
      )
    except BaseException:
      listener.close()
      raise

  def __enter__(self) -> "Swarm":
    """Waits until the peer is a member and has the newest state."""
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
    """The newest committed state; its arrays cannot be written."""
    return dict(self._agent.newest.visible)

  @property
  def newest(self) -> Revision:
    """The newest committed revision, whole: number, digest, state, leases."""
    return self._agent.newest

  @property
  def checkpoint(self) -> tuple[int, State]:
    """The revision and the state with its leases, to go on from later."""
    newest = self.newest
    return newest.number, newest.shared

  @property
  def revision(self) -> int:
    """How many rounds have been committed."""
    return self._agent.newest.number

  @property
  def digest(self) -> Digest:
    """The hash of the state, the same on all who have its revision."""
    return self._agent.newest.digest

  @property
  def me(self) -> Id:
    """This peer's id."""
    return self._agent.peer.id

  @property
  def members(self) -> tuple[Id, ...]:
    """Who belongs to the newest epoch, in the order of their ranks."""
    return self._agent.members

  @property
  def epoch(self) -> int:
    """The newest epoch."""
    return self._agent.peer.epoch

  @property
  def samples(self) -> Spans:
    """The samples of the part that is to be computed."""
    return self._agent.drawn[1]

  @property
  def counted(self) -> bool:
    """Whether the last part is known to be in a committed round."""
    return self._agent.counted

  def give(
    self, part: Any, combine: Combine, weight: float = 1.0,
    loss: float | None = None,
  ) -> dict[str, Value]:
    """Gives a part to a round, and waits until a part is asked for again.

    Args:
      part: What `combine` is given; it must not change before this returns.
      combine: Makes the next state, as `exchange.Combine` says. An error of it
        ends the peer and is raised here; only connections may fail.
      weight: What the part weighs, e.g. the tokens that it has seen. If those
        of all parts are 0, they weigh the same.
      loss: Of the part, which the coordinator shows; finite, or None.

    Returns:
      The newest committed state.

    Raises:
      ValueError: The weight is negative or not finite.
      Halted: There is no coordinator any more. All that there is is kept.
    """
    if not 0 <= weight < math.inf:
      raise ValueError(f"weight={weight} must be finite and not negative")
    if loss is not None and not math.isfinite(loss):
      loss = None  # who looks on sees that there is none
    begun, samples = self._agent.drawn
    self._agent.give(Part(
      part, combine, weight, begun, samples,
      None if loss is None else float(loss),
    ))
    self._wait()
    return self.state

  def _wait(self) -> None:
    """Waits until a part is to be computed."""
    changed = self._agent.changed
    with changed:
      changed.wait_for(lambda: self._agent.working or self._agent.error)
      if self._agent.error is not None:
        raise self._agent.error
