"""A peer: what it does at each word of its coordinator.

A peer keeps its part of a round until it knows that the round was committed,
and never goes on alone: without a coordinator for the time t_c it halts, with
everything kept. What it may not know is whether a round was committed that it
voted on. The coordinator's next word says it, if the peer is told of the epoch
in which the newest revision was committed. If other rounds have been committed
meanwhile, the peer gets the newest revision and drops its part, since nobody
may count a part twice.

Everything is in `step`, a function without clock, socket or disk.
"""

import enum
from typing import Any, NamedTuple

from parallel.elastic.membership import messages as m
from parallel.elastic.membership.messages import Digest, Id, Send

Effects = list[Any]


class Phase(enum.IntEnum):
  """Where a peer is.

  JOINING: it has not been a member yet. PREPARING: it connects to the members
  of an epoch, and gets the newest revision. OPEN: it may ask for a round.
  RUNNING: its round runs. VOTED: it waits for the outcome. HALTED: it has
  ended.
  """

  JOINING = 0
  PREPARING = 1
  OPEN = 2
  RUNNING = 3
  VOTED = 4
  HALTED = 5


class Part(enum.IntEnum):
  """How far a peer is with what it gives to the next round."""

  NONE = 0
  COMPUTING = 1
  THERE = 2


class Peer(NamedTuple):
  """A peer's state.

  Attributes:
    id: Its id.
    revision: Of what it has.
    digest: Of what it has.
    phase: Where it is.
    epoch: The newest one that it knows, 0 for none.
    connected: Whether it is connected to the members of its epoch.
    fetching: The revision and digest that it is getting; None for none.
    part: How far it is with its next part.
    voted: Its vote on a round whose outcome it does not know.
  """

  id: Id
  revision: int = 0
  digest: Digest = ""
  phase: Phase = Phase.JOINING
  epoch: int = 0
  connected: bool = False
  fetching: tuple[int, Digest] | None = None
  part: Part = Part.NONE
  voted: m.Vote | None = None

  @property
  def hello(self) -> m.Hello:
    """What it says first."""
    return m.Hello(self.epoch, self.revision, self.digest, self.voted)


def step(state: Peer, message: Any) -> tuple[Peer, Effects]:
  """Takes one message, of the coordinator or of the host.

  Returns:
    The state after, and what the host is to do, in this order.
  """
  if state.phase is Phase.HALTED:
    return state, []
  match message:
    case m.Reconnected():
      return state, [Send(None, state.hello)]
    case m.Alone():
      return state._replace(phase=Phase.HALTED), [m.Halt()]
    case m.Prepare():
      return _prepare(state, message)
    case m.Connected():
      return _connected(state, message)
    case m.Fetched():
      return _fetched(state, message)
    case m.Go():
      return _go(state, message)
    case m.Worked():
      return _said(state._replace(part=Part.THERE))
    case m.Voided():
      return _said(state._replace(part=Part.NONE))
    case m.Start():
      return _start(state, message)
    case m.Reduced():
      return _reduced(state, message)
  raise AssertionError(message)


def _said(state: Peer) -> tuple[Peer, Effects]:
  """Says what the coordinator waits for, if it is so; begins the next part."""
  if state.fetching is not None:
    return state, []
  if state.phase is Phase.PREPARING and state.connected:
    return state, [Send(None, m.Prepared(state.epoch))]
  if state.phase is Phase.OPEN and state.part is Part.THERE:
    return state, [Send(None, m.Ready(state.epoch, state.revision))]
  if state.phase is Phase.OPEN and state.part is Part.NONE:
    return state._replace(part=Part.COMPUTING), [m.Work()]
  return state, []


def _applied(state: Peer) -> tuple[Peer, Effects]:
  assert state.voted is not None
  state = state._replace(
    revision=state.revision + 1, digest=state.voted.digest, voted=None,
    part=Part.NONE,
  )
  return state, [m.Apply()]


def _prepare(state: Peer, message: m.Prepare) -> tuple[Peer, Effects]:
  if message.epoch <= state.epoch:
    if (message.epoch, Phase.PREPARING) != (state.epoch, state.phase):
      return state, []
    if state.connected:
      return _said(state)
    # That it could not connect may not have been heard.
    return state, [m.Connect(message.epoch, message.members)]
  effects: Effects = []
  if state.phase is Phase.RUNNING:
    effects.append(m.Cancel())
  if state.voted is not None:
    vote = state.voted
    if (message.committed, message.revision, message.digest) == (
      vote.epoch, vote.round + 1, vote.digest
    ):
      state, effects = _applied(state)
    else:
      # If there is a newer revision, the part may have been counted in it.
      keep = message.revision == state.revision
      effects.append(m.Discard(keep))
      state = state._replace(
        voted=None, part=Part.THERE if keep else Part.NONE
      )
  state = state._replace(
    phase=Phase.PREPARING, epoch=message.epoch, connected=False
  )
  state, fetch = _fetch(state, message)
  connect = m.Connect(message.epoch, message.members)
  return state, [*effects, *fetch, connect]


def _fetch(
  state: Peer, message: m.Prepare | m.Go
) -> tuple[Peer, Effects]:
  """Gets the newest revision, unless the peer has it."""
  newest = message.revision, message.digest
  if newest == (state.revision, state.digest):
    return state._replace(fetching=None), []
  fetch = m.Fetch(*newest, message.holders)
  return state._replace(fetching=newest), [fetch]


def _connected(state: Peer, message: m.Connected) -> tuple[Peer, Effects]:
  if (message.epoch, Phase.PREPARING) != (state.epoch, state.phase):
    return state, []
  if message.unreachable:
    unreachable = m.Unreachable(message.epoch, message.unreachable)
    return state, [Send(None, unreachable)]
  return _said(state._replace(connected=True))


def _fetched(state: Peer, message: m.Fetched) -> tuple[Peer, Effects]:
  if state.fetching != message:
    return state, []
  return _said(
    state._replace(
      revision=message.revision, digest=message.digest, fetching=None
    )
  )


def _go(state: Peer, message: m.Go) -> tuple[Peer, Effects]:
  if message.epoch != state.epoch:
    return state, []
  effects: Effects = []
  if state.phase is Phase.VOTED:
    if message.revision <= state.revision:
      return state, []  # it was said before this round
    state, effects = _applied(state)
  elif state.phase is Phase.PREPARING:
    if state.fetching is not None or not state.connected:
      return state, []
  elif state.phase is not Phase.OPEN or message.revision < (
    state.fetching[0] if state.fetching else state.revision
  ):
    return state, []
  state, fetch = _fetch(state._replace(phase=Phase.OPEN), message)
  state, said = _said(state)
  return state, [*effects, *fetch, *said]


def _start(state: Peer, message: m.Start) -> tuple[Peer, Effects]:
  if (message.epoch, message.round) != (state.epoch, state.revision):
    return state, []
  if state.phase is Phase.VOTED:  # it may have been lost
    return state, [Send(None, state.voted)]
  if state.phase is not Phase.OPEN:
    return state, []
  return state._replace(phase=Phase.RUNNING), [m.Reduce(*message)]


def _reduced(state: Peer, message: m.Reduced) -> tuple[Peer, Effects]:
  if state.phase is not Phase.RUNNING or (message.epoch, message.round) != (
    state.epoch, state.revision
  ):
    return state, []
  vote = m.Vote(*message)
  state = state._replace(phase=Phase.VOTED, voted=vote)
  return state, [Send(None, vote)]
