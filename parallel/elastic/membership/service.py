"""The coordination service: runs `coordinator.step` over sockets.

Peers connect and say `Hello`. Messages of all connections come to one thread,
through a queue with a limit: if they come faster than it works, peers have to
wait. It does what the coordinator says in its order, so what must be in the
journal is there before a peer hears of it.

A peer is silent if nothing has come from it for t_h, or if it has had no
connection for a shorter time: a connection that is made again before costs
nothing. If this process itself has slept, nobody is blamed for it.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import queue
import socket
import threading
import time
from typing import Any, NamedTuple

from parallel.elastic.membership import coordinator, history, ids
from parallel.elastic.membership import messages as m
from parallel.elastic.membership.coordinator import Coordinator, Phase, Rules
from parallel.elastic.membership.journal import Journal
from parallel.elastic.membership.messages import Id
from parallel.elastic.transport import frames
from parallel.elastic.transport.channel import Channel
from parallel.elastic.transport.handshake import (
  Address,
  Purpose,
  Request,
  Security,
)
from parallel.elastic.transport.listener import Limits, Listener, Offer

NAME = "coordinator"  # whom peers dial
_MOST_EVENTS = 4096
_PATIENCE_S = 2.0  # after which is said what is waited for
_AGAIN_S = 10.0  # after which it is said again to those who wait
_MOST_CHARS = 400


@dataclasses.dataclass(frozen=True)
class Timing:
  """How long is waited, in seconds.

  Attributes:
    silence_s: t_h: without a sign of life for so long, a peer is dropped.
    reconnect_s: Without a connection for so long, a peer is dropped.
    grace_s: For parts that are late, once there are as many as the quorum.
    recover_s: For the members to come back, after the coordinator did.
    handshake_s: For a stranger to prove that it is none.
  """

  silence_s: float = 10.0
  reconnect_s: float = 2.0
  grace_s: float = 10.0
  recover_s: float = 30.0
  handshake_s: float = 5.0

  def __post_init__(self) -> None:
    for name, value in dataclasses.asdict(self).items():
      if not value > 0:
        raise ValueError(f"{name}={value:g} must be positive")


_RULES, _TIMING = Rules(), Timing()


class _Gone(NamedTuple):
  """A connection has ended.

  Attributes:
    wrong: Whether the peer has sent what is not right.
  """

  wrong: bool


class Seen(NamedTuple):
  """A peer as people see it who look on.

  Attributes:
    peer: Its id.
    what: What it is at, in words.
    heard_s: Seconds since it was last heard of; None without a connection.
    report: Its last one; None if there was none.
  """

  peer: Id
  what: str
  heard_s: float | None
  report: m.Report | None


class Service:
  """A coordinator and its connections.

  Attributes:
    address: Where it listens.
    state: The coordinator's state.
    rules: What is fixed for the run.
  """

  def __init__(
    self, address: Address, security: Security, journal: Journal, *,
    rules: Rules = _RULES, timing: Timing = _TIMING,
    log: history.Log | None = None, most_peers: int = 256,
    say: Callable[[str], None] = print,
  ) -> None:
    """Begins to listen.

    Args:
      address: Where; port 0 for any that is free.
      security: What connections are protected by.
      journal: What the coordinator must not forget.
      rules: What is fixed for a run.
      timing: How long is waited.
      log: Where messages and effects are written.
      most_peers: How many peers there may be at once.
      say: Takes lines for the terminal.
    """
    if not 1 <= rules.least <= most_peers <= frames.MOST_ITEMS:
      raise ValueError(
        f"least={rules.least} must be from 1 to most_peers={most_peers}, which "
        f"must be at most {frames.MOST_ITEMS}"
      )
    self._journal, self.rules, self._timing = journal, rules, timing
    self._log, self._say = log or history.Log(None), say
    self._most_peers = most_peers
    self._events: queue.Queue[tuple[Channel, Id, Any]] = queue.Queue(
      _MOST_EVENTS
    )
    self._channels: dict[Id, Channel] = {}
    self._watched: dict[Id, float] = {}  # since when, or without connection
    self._reports: dict[Id, m.Report] = {}
    self._timers: list[tuple[float, Any]] = []
    self._said, self._since, self._is_said = "", 0.0, False
    self._told: dict[Id, float] = {}  # when who waits was told
    self._closed = threading.Event()
    self.state = Coordinator()
    limits = Limits(2 * most_peers, handshake_s=timing.handshake_s)
    try:
      self._listener = Listener(NAME, security, address, limits)
    except OSError as error:
      raise ValueError(
        f"cannot listen at {address[0]}:{address[1]}: {error}"
      ) from error
    self.address = self._listener.address

  def serve(self) -> None:
    """Runs until it is closed, or the process ends."""
    self.state, effects = coordinator.started(self._journal.record)
    self._log.started(self._journal.record, self.rules, effects)
    self._do(effects)
    self._listener.serve(Purpose.CONTROL, Offer(0, None, self._meet))
    tick = min(0.25, self._timing.silence_s / 8, self._timing.reconnect_s / 4)
    awake = time.monotonic()
    while not self._closed.is_set():
      with contextlib.suppress(queue.Empty):
        self._take(*self._events.get(timeout=tick))
      now = time.monotonic()
      if now - awake > max(4 * tick, self._timing.silence_s / 2):
        for channel in self._channels.values():
          channel.heard = now
        self._watched = dict.fromkeys(self._watched, now)
      awake = now
      self._look_at_clocks(now)
      self._speak(now)

  def close(self) -> None:
    """Ends all connections; the journal has what is needed to go on."""
    self._closed.set()
    self._listener.close()

  def __enter__(self) -> "Service":
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def seen(self) -> list[Seen]:
    """Returns all peers as they are now; may be called from any thread."""
    state, now = self.state, time.monotonic()
    channels, reports = dict(self._channels), dict(self._reports)
    found = []
    for peer in (*state.record.members, *(p for p, _ in state.pending)):
      channel = channels.get(peer)
      found.append(Seen(
        peer, _doing(state, peer),
        None if channel is None else now - channel.heard, reports.get(peer),
      ))
    return found

  def _meet(self, sock: socket.socket, request: Request) -> None:
    """A connection's thread, as the listener runs it."""
    peer, wrong = request.sender, False
    ids.address(peer)
    channel = Channel(sock, frames.FROM_PEER, self._timing.silence_s)
    channel.send(m.Welcome(float(self._timing.silence_s)))
    try:
      channel.run(lambda message: self._events.put((channel, peer, message)))
    except (OSError, ValueError) as error:
      channel.reason = channel.reason or str(error) or type(error).__name__
      wrong = isinstance(error, ValueError)
    finally:
      self._events.put((channel, peer, _Gone(wrong)))

  def _take(self, channel: Channel, peer: Id, message: Any) -> None:
    """Takes what has come over a connection."""
    current = self._channels.get(peer)
    if isinstance(message, m.Hello) and channel is not current:
      if current is not None:
        current.close("has connected again")
      elif len(self._channels) >= self._most_peers:
        self._line(f"{peer} refused: {self._most_peers} peers are there")
        channel.close("too many peers")
        return
      self._channels[peer] = current = channel
    if channel is not current:
      # Of a connection that has been replaced, or before its Hello.
      if isinstance(message, _Gone) and message.wrong:
        self._line(f"{peer} refused: {channel.reason}")
      return
    if isinstance(message, _Gone):
      del self._channels[peer]
      if peer in self._watched:
        self._watched[peer] = time.monotonic()
      self._line(f"{peer} has no connection: {channel.reason}")
      return
    if isinstance(message, m.Report):
      self._reports[peer] = message
      return
    self._step(peer, message)

  def _step(self, sender: Id | None, message: Any) -> None:
    """Gives the coordinator a message, and does what it says."""
    before = self.state.record
    self.state, effects = coordinator.step(
      self.state, sender, message, self.rules
    )
    self._log.stepped(sender, message, effects, self.state)
    for effect in effects:
      if isinstance(effect, m.Close) and not isinstance(message, m.Silent):
        self._line(f"{effect.peer} dropped: {_reason(sender, message)}")
    self._do(effects)
    now = self.state.record
    if now.epoch != before.epoch:
      self._line(_epoch_line(before.members, now))

  def _do(self, effects: list[Any]) -> None:
    for effect in effects:
      match effect:
        case m.Record():
          self._journal.append(effect)
        case m.Send():
          # To one without a connection it is said when it comes again.
          if effect.to in self._channels:
            self._channels[effect.to].send(effect.message)
        case m.Watch():
          self._watched[effect.peer] = time.monotonic()
        case m.Close():
          self._watched.pop(effect.peer, None)
          self._reports.pop(effect.peer, None)
          if effect.peer in self._channels:
            self._channels.pop(effect.peer).close("dropped")
        case m.Arm():
          wait_s = (
            self._timing.grace_s if isinstance(effect.message, m.Grace)
            else self._timing.recover_s
          )
          self._timers.append((time.monotonic() + wait_s, effect.message))
        case _:
          raise AssertionError(effect)

  def _look_at_clocks(self, now: float) -> None:
    """Says what is due: silent peers, and times that are over."""
    for peer, since in list(self._watched.items()):
      if peer not in self._watched:  # it went with one before it
        continue
      channel = self._channels.get(peer)
      if channel is not None:
        since, limit_s = channel.heard, self._timing.silence_s
      else:
        limit_s = self._timing.reconnect_s
      if now - since >= limit_s:
        self._watched.pop(peer)
        what = "silent" if channel else "without a connection"
        self._line(f"{peer} dropped: {what} for {limit_s:g} s")
        self._step(None, m.Silent(peer))
    due = [message for end, message in self._timers if end <= now]
    self._timers = [timer for timer in self._timers if timer[0] > now]
    for message in due:
      self._step(None, message)

  def _speak(self, now: float) -> None:
    """Says what is waited for, once that has been so for a while."""
    state, text = self.state, waits(self.state, self.rules)
    if text != self._said:
      self._said, self._since, self._is_said = text, now, False
    if now - self._since <= _PATIENCE_S:
      return
    if not self._is_said:
      self._is_said = True
      self._line(text)
    there = {peer for peer, _ in state.pending}
    self._told = {p: when for p, when in self._told.items() if p in there}
    lost = state.phase is Phase.ASSEMBLING and state.late
    waiting = m.Waiting(state.record.revision, lost, text[:_MOST_CHARS])
    for peer in there & self._channels.keys():
      if self._told.get(peer, 0.0) < max(self._since, now - _AGAIN_S):
        self._told[peer] = now
        self._channels[peer].send(waiting)

  def _line(self, text: str) -> None:
    self._say(f"{time.strftime('%H:%M:%S')} {text}")


def _doing(state: Coordinator, peer: Id) -> str:
  """Returns what a peer is at, in words."""
  if peer not in state.record.members:
    return "waits to join"
  match state.phase:
    case Phase.ASSEMBLING:
      return "is waited for"
    case Phase.FORMING:
      return "is prepared" if peer in state.said else "connects, fetches"
    case Phase.RUNNING if peer in state.contributors:
      return "has voted" if peer in dict(state.votes) else "exchanges"
  return "has its part" if peer in state.said else "computes"


def _reason(sender: Id | None, message: Any) -> str:
  """Returns why a message has a peer dropped."""
  match message:
    case m.Vote():
      return (
        f"its digest of round {message.round} is not that of most, or not the "
        "least one of as many"
      )
    case m.Unreachable():
      return f"{sender} cannot reach {', '.join(message.peers)}"
    case m.Leave():
      return "it leaves"
  return "nobody is left who has the newest revision"


def _epoch_line(before: tuple[Id, ...], now: m.Record) -> str:
  joined = sorted({*now.members} - {*before})
  left = sorted({*before} - {*now.members})
  return (
    f"epoch {now.epoch}, revision {now.revision}: {len(now.members)} members"
    + (f"; new: {', '.join(joined)}" if joined else "")
    + (f"; gone: {', '.join(left)}" if left else "")
  )


def waits(state: Coordinator, rules: Rules) -> str:
  """Returns what a coordinator waits for, in words."""
  record, there = state.record, {peer for peer, _ in state.pending}
  if state.phase is Phase.ASSEMBLING:
    if not record.members:
      more = rules.least - len(there)
      return (
        f"waits for {more} more peer{'s' * (more != 1)}: {len(there)} of "
        f"{rules.least} there"
      )
    missing = [p for p in record.members if p not in there]
    if state.late:
      return (
        f"waits for a peer that has revision {record.revision}: one of "
        f"{', '.join(record.members)}"
      )
    return f"waits for members to come back: {', '.join(missing)}"
  if state.phase is Phase.RUNNING:
    asked, said = state.contributors, {peer for peer, _ in state.votes}
    what = f"votes on round {record.revision}"
  else:
    asked, said = record.members, state.said
    what = (
      f"members to connect and to have revision {record.revision}"
      if state.phase is Phase.FORMING
      else f"parts of round {record.revision}"
    )
  missing = [p for p in asked if p not in said]
  return (
    f"waits for {what}: {len(asked) - len(missing)} of {len(asked)} there, "
    f"missing {', '.join(missing)}"
  )
