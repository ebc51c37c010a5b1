"""State machine of a peer.

A peer keeps its contribution to a round until the round is known to be
committed, and never commits a round by itself: without a connection to the
coordinator for `PeerSettings.alone_s` seconds it halts and keeps its state.

A peer that voted may lose its connection before it receives the outcome. The
coordinator's next message shows the outcome, since it names the epoch in which
the newest revision was committed. If further rounds have been committed
meanwhile, the peer fetches the newest revision and drops its contribution: the
contribution may have been counted, and must not be counted twice.

The protocol is the pure function `step`, without clock, socket or disk.

Example:
  >>> from parallel.peers.membership import messages as m, peer
  >>> state = peer.PeerState("a")
  >>> prepare = m.Prepare(1, ("a",), 0, 0, "", ("a",), verify=False)
  >>> state, effects = peer.step(state, prepare)
  >>> effects
  [Connect(epoch=1, members=('a',))]
  >>> state, effects = peer.step(state, m.Connected(1))
  >>> effects
  [Send(to=None, message=Prepared(epoch=1))]
"""

import enum
from typing import Any, NamedTuple

from parallel.peers.membership import messages as m
from parallel.peers.membership.messages import Digest, Id, Send

Effects = list[Any]


class Phase(enum.IntEnum):
  """Phase of a peer.

  JOINING: not a member yet. PREPARING: connecting to the members of an epoch
  and fetching the newest revision. OPEN: may request a round. RUNNING: a round
  is in progress. VOTED: waiting for the outcome. HALTED: ended.
  """

  JOINING = 0
  PREPARING = 1
  OPEN = 2
  RUNNING = 3
  VOTED = 4
  HALTED = 5


class Progress(enum.IntEnum):
  """Progress of a peer's contribution to the next round."""

  NONE = 0
  COMPUTING = 1
  THERE = 2


class PeerState(NamedTuple):
  """State of a peer.

  Attributes:
    id: Id of the peer.
    revision: Number of the revision (version of the shared state) that the peer
      holds.
    digest: Digest of that revision.
    phase: Phase of the protocol.
    epoch: Newest epoch (numbered list of members) that the peer has received; 0
      for none.
    connected: Whether all members of that epoch are connected.
    fetching: (revision, digest) that is being downloaded; None for none.
    part: Progress of the next contribution.
    voted: Vote on a round whose outcome the peer has not received.
  """

  id: Id
  revision: int = 0
  digest: Digest = ""
  phase: Phase = Phase.JOINING
  epoch: int = 0
  connected: bool = False
  fetching: tuple[int, Digest] | None = None
  part: Progress = Progress.NONE
  voted: m.Vote | None = None

  @property
  def hello(self) -> m.Hello:
    """First message on a new connection to the coordinator."""
    return m.Hello(self.epoch, self.revision, self.digest, self.voted)


def step(state: PeerState, message: Any) -> tuple[PeerState, Effects]:
  """Processes one message from the coordinator or from the host.

  Returns:
    (new state, effects). The host executes the effects in this order.
  """
  if state.phase is Phase.HALTED:
    return state, []
  match message:
    case m.Reconnected():
      # The coordinator responds with all messages that may have been lost.
      return state, [Send(None, state.hello)]
    case m.Alone():
      return state._replace(phase=Phase.HALTED), [m.Halt()]
    case m.Prepare():
      return _handle_prepare(state, message)
    case m.Connected():
      return _handle_connected(state, message)
    case m.Fetched():
      return _handle_fetched(state, message)
    case m.Go():
      return _handle_go(state, message)
    case m.Worked():
      return _send_or_work(state._replace(part=Progress.THERE))
    case m.Voided():
      return _send_or_work(state._replace(part=Progress.NONE))
    case m.Start():
      return _handle_start(state, message)
    case m.Reduced():
      return _handle_reduced(state, message)
  raise AssertionError(message)


def _send_or_work(state: PeerState) -> tuple[PeerState, Effects]:
  """Sends `Prepared` or `Ready` if due, or starts the next contribution."""
  # A contribution must be computed from the newest revision.
  if state.fetching is not None:
    return state, []
  if state.phase is Phase.PREPARING and state.connected:
    return state, [Send(None, m.Prepared(state.epoch))]
  if state.phase is Phase.OPEN and state.part is Progress.THERE:
    return state, [Send(None, m.Ready(state.epoch, state.revision))]
  if state.phase is Phase.OPEN and state.part is Progress.NONE:
    return state._replace(part=Progress.COMPUTING), [m.Work()]
  return state, []


def _applied(state: PeerState) -> tuple[PeerState, Effects]:
  """Applies the round on which the peer has voted: its result was committed."""
  assert state.voted is not None
  state = state._replace(
    revision=state.revision + 1, digest=state.voted.digest, voted=None,
    part=Progress.NONE,
  )
  return state, [m.Apply()]


def _handle_prepare(state: PeerState, message: m.Prepare) -> tuple[
  PeerState, Effects
]:
  # A `Prepare` that was received before, or of an earlier epoch.
  if message.epoch <= state.epoch:
    if (message.epoch, Phase.PREPARING) != (state.epoch, state.phase):
      return state, []
    if state.connected:
      return _send_or_work(state)
    # On a repeated `Prepare`, report again: an `Unreachable` may be lost.
    return state, [m.Connect(message.epoch, message.members)]
  effects: Effects = []
  if state.phase is Phase.RUNNING:
    effects.append(m.Cancel())
  # If the outcome of a vote is unknown, either it made the newest revision ...
  if state.voted is not None:
    vote = state.voted
    # The epoch is compared, too: a later attempt of the round may have made the
    # same digest with other contributions.
    if (message.committed, message.revision, message.digest) == (
      vote.epoch, vote.round + 1, vote.digest
    ):
      state, effects = _applied(state)
    else:
      # ... or it remains unknown. If rounds have been committed since the vote,
      # this round may be among them, and the contribution may be counted.
      keep = message.revision == state.revision  # no round was committed
      effects.append(m.Discard(keep))
      state = state._replace(
        voted=None, part=Progress.THERE if keep else Progress.NONE
      )
  state = state._replace(
    phase=Phase.PREPARING, epoch=message.epoch, connected=False
  )
  state, fetch = _fetch_if_outdated(state, message)
  connect = m.Connect(message.epoch, message.members)
  return state, [*effects, *fetch, connect]


def _fetch_if_outdated(
  state: PeerState, message: m.Prepare | m.Go
) -> tuple[PeerState, Effects]:
  """Starts a download of the newest revision unless the peer holds it."""
  # The digest is compared, too: a peer may have joined with another state.
  newest = message.revision, message.digest
  if newest == (state.revision, state.digest):
    return state._replace(fetching=None), []
  fetch = m.Fetch(*newest, message.holders)
  return state._replace(fetching=newest), [fetch]


def _handle_connected(
  state: PeerState, message: m.Connected
) -> tuple[PeerState, Effects]:
  if (message.epoch, Phase.PREPARING) != (state.epoch, state.phase):
    return state, []
  if message.unreachable or message.absent:
    # The coordinator decides which peer to drop.
    return state, [Send(None, m.Unreachable(*message))]
  return _send_or_work(state._replace(connected=True))


def _handle_fetched(state: PeerState, message: m.Fetched) -> tuple[
  PeerState, Effects
]:
  if state.fetching != message:  # superseded by the fetch of a newer revision
    return state, []
  return _send_or_work(
    state._replace(
      revision=message.revision, digest=message.digest, fetching=None
    )
  )


def _handle_go(state: PeerState, message: m.Go) -> tuple[PeerState, Effects]:
  if message.epoch != state.epoch:
    return state, []
  effects: Effects = []
  if state.phase is Phase.VOTED:
    if message.revision <= state.revision:
      return state, []  # this `Go` was sent before the round started
    # A newer revision in the same epoch shows that the round was committed.
    state, effects = _applied(state)
  elif state.phase is Phase.PREPARING:
    if state.fetching is not None or not state.connected:
      return state, []
  elif state.phase is not Phase.OPEN or message.revision < (
    state.fetching[0] if state.fetching else state.revision
  ):
    return state, []
  state, fetch = _fetch_if_outdated(state._replace(phase=Phase.OPEN), message)
  state, more = _send_or_work(state)
  return state, [*effects, *fetch, *more]


def _handle_start(state: PeerState, message: m.Start) -> tuple[
  PeerState, Effects
]:
  if (message.epoch, message.round) != (state.epoch, state.revision):
    return state, []
  if state.phase is Phase.VOTED:  # `Start` was repeated: the vote may be lost
    return state, [Send(None, state.voted)]
  if state.phase is not Phase.OPEN:
    return state, []
  return state._replace(phase=Phase.RUNNING), [m.Reduce(*message)]


def _handle_reduced(state: PeerState, message: m.Reduced) -> tuple[
  PeerState, Effects
]:
  if state.phase is not Phase.RUNNING or (message.epoch, message.round) != (
    state.epoch, state.revision
  ):
    return state, []
  # A failed round is voted on, too, with digest None.
  vote = m.Vote(*message)
  state = state._replace(phase=Phase.VOTED, voted=vote)
  return state, [Send(None, vote)]
