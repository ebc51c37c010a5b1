"""Coordination service: runs `coordinator.step` over sockets.

Peers connect and send `Hello`. One thread processes the messages of all
connections, from a bounded queue that slows peers down when it is full. The
thread executes the effects of each step in order, so a record is in the journal
before a peer is notified of it.

A peer is silent if nothing was received from it for `Timing.silence_s`, or if
it has had no connection for `Timing.reconnect_s`; a peer that reconnects before
that stays a member. If this process itself was suspended, all timeouts
restart, so that no peer is dropped because of the suspension.

The `Hello` of a new peer is processed only after the peer and all members have
connected to each other (`parallel.peers.membership.reachability`). Until
then it is a candidate, and rounds continue without it.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import queue
import socket
import threading
import time
from typing import Any, NamedTuple

from parallel.peers.membership import coordinator, history, ids
from parallel.peers.membership import messages as m
from parallel.peers.membership.coordinator import CoordinatorState, Phase, Rules
from parallel.peers.membership.journal import Journal
from parallel.peers.membership.messages import Id
from parallel.peers.membership.reachability import AdmissionCandidates, reason
from parallel.peers.transport import frames
from parallel.peers.transport.channel import Channel
from parallel.peers.transport.handshake import (
  Address,
  DialRequest,
  Purpose,
  Security,
  SocketGroup,
  reachability_error,
)
from parallel.peers.transport.listener import AcceptRule, Limits, Listener

COORDINATOR_ID = "coordinator"  # the coordinator's id in handshakes
_MAX_EVENTS = 4096
_REPORT_AFTER_S = 2.0  # time that the coordinator waits before it reports that
_REPORT_INTERVAL_S = 10.0  # interval of repeated reports to peers that wait


@dataclasses.dataclass(frozen=True)
class Timing:
  """Timeouts of the service, in seconds.

  Attributes:
    silence_s: A connected peer that sends nothing for this long is dropped.
    reconnect_s: A peer without a connection for this long is dropped.
    grace_s: Time limit for late contributions after the quorum is reached.
    recover_s: Time limit for members to reconnect to a restarted coordinator.
    handshake_s: Time limit for an unauthenticated peer's handshake.
    check_s: Time limit for the connections between a new peer and other peers
      by which it is checked before its admission.
  """

  silence_s: float = 10.0
  reconnect_s: float = 2.0
  grace_s: float = 10.0
  recover_s: float = 30.0
  handshake_s: float = 5.0
  check_s: float = 5.0

  def __post_init__(self) -> None:
    for name, value in dataclasses.asdict(self).items():
      if not value > 0:
        raise ValueError(f"{name}={value:g} must be positive")


_RULES, _TIMING = Rules(), Timing()


class _Gone(NamedTuple):
  """Event: a connection has ended.

  Attributes:
    wrong: Whether the peer sent an invalid message.
  """

  wrong: bool


class PeerStatus(NamedTuple):
  """Status of a peer, for monitoring.

  Attributes:
    peer: Id of the peer.
    what: Human-readable description of its current activity.
    silent_s: Seconds since its last message; None without a connection.
    report: Its last `Report`; None if it has sent none.
  """

  peer: Id
  what: str
  silent_s: float | None
  report: m.Report | None


class CoordinatorService:
  """Coordinator process: state machine, journal and connections.

  Attributes:
    address: (host, port) at which it listens.
    state: State of the coordinator.
    rules: Constants of the run.
  """

  def __init__(
    self, address: Address, security: Security, journal: Journal, *,
    rules: Rules = _RULES, timing: Timing = _TIMING,
    log: history.Log | None = None, max_peers: int = 256,
    say: Callable[[str], None] = print,
  ) -> None:
    """Starts to listen.

    Args:
      address: (host, port); port 0 selects a free port.
      security: Token and TLS settings of connections.
      journal: Journal of the coordinator's records.
      rules: Constants of the run.
      timing: Timeouts.
      log: Log of all messages and effects; None for no log.
      max_peers: Maximum number of connected peers.
      say: Callback that receives lines for the terminal.

    Raises:
      ValueError: `Rules.least` exceeds `max_peers`, `max_peers` is too large,
        or the address cannot be used.
    """
    if not 1 <= rules.least <= max_peers <= frames.MAX_ITEMS:
      raise ValueError(
        f"least={rules.least} must be from 1 to max_peers={max_peers}, which "
        f"must be at most {frames.MAX_ITEMS}"
      )
    self._journal, self.rules, self._timing = journal, rules, timing
    self._log, self._say = log or history.Log(None), say
    self._max_peers, self._security = max_peers, security
    # Bounded, so that connection threads block while the coordinator is busy.
    self._events: queue.Queue[tuple[Channel | None, Id, Any]] = queue.Queue(
      _MAX_EVENTS
    )
    # Twice the limit that peers have, since a response takes time to arrive.
    self._admission = AdmissionCandidates(COORDINATOR_ID, 2 * timing.check_s)
    self._scope = SocketGroup()  # connections to candidates
    self._channels: dict[Id, Channel] = {}
    self._watched: dict[Id, float] = {}  # start of the watch or disconnection
    self._reports: dict[Id, m.Report] = {}
    self._timers: list[tuple[float, Any]] = []  # (due time, message)
    self._status, self._since, self._is_reported = "", 0.0, False
    self._sent_s: dict[Id, float] = {}  # time of the last report to each peer
    self._closed = threading.Event()
    self.state = CoordinatorState()
    # Twice max_peers: each may reconnect before its old connection has ended.
    limits = Limits(2 * max_peers, handshake_s=timing.handshake_s)
    try:
      self._listener = Listener(COORDINATOR_ID, security, address, limits)
    except OSError as error:
      raise ValueError(
        f"cannot listen at {address[0]}:{address[1]}: {error}"
      ) from error
    self.address = self._listener.address

  def serve(self) -> None:
    """Runs until `close` is called or the process ends."""
    self.state, effects = coordinator.initial_state(self._journal.record)
    # The rules are logged, so that a replay uses the same rules.
    self._log.started(self._journal.record, self.rules, effects)
    self._do(effects)
    self._listener.serve(Purpose.CONTROL, AcceptRule(0, None, self._meet))
    # The interval of checks is short, so that timeouts are detected on time.
    tick = min(0.25, self._timing.silence_s / 8, self._timing.reconnect_s / 4)
    awake = time.monotonic()
    while not self._closed.is_set():
      with contextlib.suppress(queue.Empty):
        self._take(*self._events.get(timeout=tick))
      now = time.monotonic()
      # If this process was suspended (laptop lid, debugger), restart timeouts.
      if now - awake > max(4 * tick, self._timing.silence_s / 2):
        for channel in self._channels.values():
          channel.last_received = now
        self._watched = dict.fromkeys(self._watched, now)
      awake = now
      self._check_timeouts(now)
      self._admit(now)
      self._report_wait(now)

  def close(self) -> None:
    """Ends all connections; the journal suffices to resume later."""
    self._closed.set()
    self._scope.close()
    self._listener.close()

  def __enter__(self) -> "CoordinatorService":
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def seen(self) -> list[PeerStatus]:
    """Returns the current status of all peers; thread-safe."""
    state, now = self.state, time.monotonic()
    # These are copies, since the service's thread modifies the originals.
    channels, reports = dict(self._channels), dict(self._reports)
    found = []
    for peer in (
      *state.record.members, *(p for p, _ in state.pending), *self._admission
    ):
      channel = channels.get(peer)
      found.append(PeerStatus(
        peer, _doing(state, peer),
        None if channel is None else now - channel.last_received,
        reports.get(peer),
      ))
    return found

  def _meet(self, sock: socket.socket, request: DialRequest) -> None:
    """Receives a peer's messages over one connection, in its own thread."""
    peer, wrong = request.sender, False
    ids.address(peer)  # raises if the id is malformed
    channel = Channel(sock, frames.PEER_MESSAGES, self._timing.silence_s)
    # The peer uses the same timeout.
    channel.send(m.Welcome(float(self._timing.silence_s)))
    try:
      channel.run(lambda message: self._events.put((channel, peer, message)))
    except (OSError, ValueError) as error:
      channel.reason = channel.reason or str(error) or type(error).__name__
      # FrameError is a ValueError: the peer sent invalid data.
      wrong = isinstance(error, ValueError)
    finally:
      self._events.put((channel, peer, _Gone(wrong)))

  def _take(self, channel: Channel | None, peer: Id, message: Any) -> None:
    """Processes a message of a peer, or a result of this process's checks."""
    if channel is None:
      self._admission.answered(peer, message.peer, message.error)
      return
    current = self._channels.get(peer)
    if isinstance(message, m.Hello) and channel is not current:
      if current is not None:
        # A reconnect replaces the old connection, which may be half-open.
        current.close("has connected again")
      elif len(self._channels) >= self._max_peers:
        self._line(f"{peer} refused: {self._max_peers} peers are connected")
        channel.reason = "too many peers"
        channel.send(m.Waiting(
          self.state.record.revision, False, "has no room: max_peers="
          f"{self._max_peers} peers are connected; this peer connects again"
        ))
        # This closes the connection after the message has been sent.
        threading.Thread(
          target=channel.finish, args=(1.0,), daemon=True
        ).start()
        return
      self._channels[peer] = current = channel
    if channel is not current:
      # The connection was replaced, or its `Hello` has not arrived yet.
      if isinstance(message, _Gone) and message.wrong:
        self._line(f"{peer} refused: {channel.reason}")
      return
    if isinstance(message, _Gone):
      del self._channels[peer]
      self._admission.remove(peer)
      if peer in self._watched:
        self._watched[peer] = time.monotonic()
      # The peer stays a member for reconnect_s.
      self._line(f"{peer} has no connection: {channel.reason}")
      return
    if isinstance(message, m.Report):
      self._reports[peer] = message
      return
    if isinstance(message, m.Checked):
      self._admission.answered(peer, message.peer, message.error)
      return
    if isinstance(message, m.Hello) and peer not in self._admitted_peers():
      self._admission.add(peer, message)
      return
    if peer in self._admission:
      if isinstance(message, m.Leave):
        self._drop(peer, "it leaves")
      return  # other messages are of a time when the peer was a member
    self._step(peer, message)

  def _admitted_peers(self) -> set[Id]:
    """Returns the members, and the peers that wait for the next epoch."""
    state = self.state
    return {*state.record.members, *(peer for peer, _ in state.pending)}

  def _admit(self, now: float) -> None:
    """Checks candidates, and processes the `Hello` of those that pass."""
    connected = self._admitted_peers() & self._channels.keys()
    for dialer, targets in self._admission.questions(connected, now).items():
      if dialer != COORDINATOR_ID:
        self._channels[dialer].send(
          m.Check(tuple(targets), float(self._timing.check_s))
        )
        continue
      for target in targets:
        threading.Thread(
          target=self._check_reachable, args=(target,), daemon=True
        ).start()
    while True:
      state = self.state
      members = {*state.record.members}
      there = {peer for peer, _ in state.pending}
      if state.phase is not Phase.ASSEMBLING:
        there |= members
      elif members and not state.late:
        return  # first wait for the members of the last epoch
      found = self._admission.outcome(there, members, now)
      if found is None:
        return
      for peer, why in found.dropped:
        self._drop(peer, why)
      if found.hello is not None:
        self._step(found.peer, found.hello)
      else:
        self._refuse(found.peer, found.text)

  def _check_reachable(self, peer: Id) -> None:
    """Connects to a candidate; runs in its own thread."""
    error = reachability_error(
      COORDINATOR_ID, peer, ids.address(peer), self._security, self._scope,
      self._timing.check_s,
    )
    self._events.put((None, COORDINATOR_ID, m.Checked(peer, error)))

  def _refuse(self, peer: Id, why: str) -> None:
    """Reports why a candidate is not admitted, also to the candidate."""
    self._line(f"{peer} not admitted: {why}")
    address = "{}:{}".format(*ids.address(peer))
    text = (
      f"does not admit this peer at {address}: {why}. Check listen, advertise "
      "and firewalls; the connections are tried again"
    )
    self._channels[peer].send(
      m.Waiting(self.state.record.revision, False, text[: m.MAX_CHARS])
    )

  def _drop(self, peer: Id, why: str) -> None:
    """Closes the connection of a peer that is not a member."""
    self._line(f"{peer} dropped: {why}")
    self._admission.remove(peer)
    if peer in self._watched:
      self._watched.pop(peer)
      self._step(None, m.Silent(peer))
    elif peer in self._channels:
      self._channels.pop(peer).close("dropped")

  def _step(self, sender: Id | None, message: Any) -> None:
    """Processes a message and executes the effects."""
    state, before = self.state, self.state.record
    self.state, effects = coordinator.step(
      self.state, sender, message, self.rules
    )
    self._log.log_step(sender, message, effects, self.state)
    for effect in effects:
      # `_check_timeouts` reports silent peers.
      if isinstance(effect, m.Close) and not isinstance(message, m.Silent):
        why = _drop_reason(state, effect.peer, sender, message)
        self._line(f"{effect.peer} dropped: {why}")
      if isinstance(effect, m.Send) and isinstance(effect.message, m.Stop):
        self._line(f"{effect.to} stopped: {effect.message.text}")
    self._do(effects)
    now = self.state.record
    if now.epoch != before.epoch:
      self._line(_epoch_line(before.members, now))

  def _do(self, effects: list[Any]) -> None:
    """Executes effects in order."""
    for effect in effects:
      match effect:
        case m.Record():  # on disk before any later Send
          self._journal.append(effect)
        case m.Send():
          # A disconnected peer receives it after its next Hello.
          if effect.to in self._channels:
            self._channels[effect.to].send(effect.message)
        case m.Watch():
          self._watched[effect.peer] = time.monotonic()
        case m.Close():
          self._watched.pop(effect.peer, None)
          self._reports.pop(effect.peer, None)
          self._admission.remove(effect.peer)
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

  def _check_timeouts(self, now: float) -> None:
    """Processes silent peers and expired timers."""
    for peer, since in list(self._watched.items()):
      if peer not in self._watched:  # closed in the step of an earlier peer
        continue
      channel = self._channels.get(peer)
      if channel is not None:
        # Keep-alives count as signs of life.
        since, limit_s = channel.last_received, self._timing.silence_s
      else:
        limit_s = self._timing.reconnect_s
      if now - since >= limit_s:
        self._watched.pop(peer)
        what = "silent" if channel else "without a connection"
        self._line(f"{peer} dropped: {what} for {limit_s:g} s")
        self._step(None, m.Silent(peer))
    for peer in self._admission:
      channel = self._channels[peer]
      if now - channel.last_received >= self._timing.silence_s:
        self._drop(peer, f"silent for {self._timing.silence_s:g} s")
    # Expired timers are removed before their steps, which may add timers.
    due = [message for end, message in self._timers if end <= now]
    self._timers = [timer for timer in self._timers if timer[0] > now]
    for message in due:
      self._step(None, message)

  def _report_wait(self, now: float) -> None:
    """Reports what the coordinator has waited for since `_REPORT_AFTER_S`."""
    state, text = self.state, describe_wait(self.state, self.rules)
    if text != self._status:  # a new status restarts the delay
      self._status, self._since, self._is_reported = text, now, False
    if now - self._since <= _REPORT_AFTER_S:
      return
    if not self._is_reported:
      self._is_reported = True
      self._line(text)
    # Peers waiting for admission receive the report, too.
    there = {peer for peer, _ in state.pending}
    self._sent_s = {p: when for p, when in self._sent_s.items() if p in there}
    # If the time for recovery is over, no connected peer has that revision.
    lost = state.phase is Phase.ASSEMBLING and state.late
    waiting = m.Waiting(state.record.revision, lost, text[: m.MAX_CHARS])
    for peer in there & self._channels.keys():
      if self._sent_s.get(peer, 0.0) < max(
        self._since, now - _REPORT_INTERVAL_S
      ):
        self._sent_s[peer] = now
        self._channels[peer].send(waiting)

  def _line(self, text: str) -> None:
    self._say(f"{time.strftime('%H:%M:%S')} {text}")


def _doing(state: CoordinatorState, peer: Id) -> str:
  """Returns a description of a peer's current activity."""
  if peer not in state.record.members:
    pending = any(peer == other for other, _ in state.pending)
    return "waits to join" if pending else "is checked"
  match state.phase:
    case Phase.ASSEMBLING:
      return "is waited for"
    case Phase.FORMING:
      return "is prepared" if peer in state.ready else "connects, fetches"
    case Phase.RUNNING if peer in state.contributors:
      return "has voted" if peer in dict(state.votes) else "exchanges"
  return "is ready" if peer in state.ready else "computes"


def _drop_reason(
  state: CoordinatorState, peer: Id, sender: Id | None, message: Any
) -> str:
  """Returns the reason for which a message caused a peer to be dropped.

  Args:
    state: State before the message.
    peer: The dropped peer.
    sender: Peer that sent the message.
    message: The message.
  """
  match message:
    case m.Vote():
      return f"its digest of round {message.round} differs from the majority's"
    case m.Unreachable() | m.Prepared():
      return reason(peer, coordinator.failed_pairs(state, sender, message))
    case m.Leave():
      return "it leaves"
  return "no connected peer holds the newest revision"


def _epoch_line(before: tuple[Id, ...], now: m.Record) -> str:
  """Returns a line for the terminal about the members of a new epoch.

  ``before`` are the members of the epoch before.
  """
  joined = sorted({*now.members} - {*before})
  left = sorted({*before} - {*now.members})
  return (
    f"epoch {now.epoch}, revision {now.revision}: {len(now.members)} members"
    + (f"; new: {', '.join(joined)}" if joined else "")
    + (f"; gone: {', '.join(left)}" if left else "")
  )


def describe_wait(state: CoordinatorState, rules: Rules) -> str:
  """Returns a description of what a coordinator waits for."""
  record, there = state.record, {peer for peer, _ in state.pending}
  if state.phase is Phase.ASSEMBLING:
    if not record.members:
      more = rules.least - len(there)
      if there and more <= 0:
        newest = max(hello.revision for _, hello in state.pending)
        return (
          f"waits for one peer more or less: two states of revision {newest}, "
          "or two configs, are held by equally many peers"
        )
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
    expected, there = state.contributors, {peer for peer, _ in state.votes}
    what = f"votes on round {record.revision}"
  else:
    expected, there = record.members, state.ready
    what = (
      f"members to connect and to have revision {record.revision}"
      if state.phase is Phase.FORMING
      else f"contributions to round {record.revision}"
    )
  missing = [p for p in expected if p not in there]
  return (
    f"waits for {what}: {len(expected) - len(missing)} of {len(expected)} "
    f"there, missing {', '.join(missing)}"
  )
