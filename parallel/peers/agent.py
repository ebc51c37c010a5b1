"""Agent of a peer: runs `peer.step` concurrently with the user's program.

One thread processes the coordinator's messages and the results of the peer's
tasks. Tasks (connecting, fetching, exchanging) may block, so each runs in its
own thread; a new epoch cancels them. The user's contribution is never modified,
and is kept until its round is committed.

If the coordinator is unreachable, the agent retries with exponential backoff;
after `PeerSettings.alone_s` seconds the peer halts.
"""

from collections.abc import Callable, Mapping
import logging
import queue
import threading
import time
from typing import Any

from parallel.peers.exchange import PeerContribution, RoundExchange
from parallel.peers.membership import ids, leases, service
from parallel.peers.membership import messages as m
from parallel.peers.membership import peer as peers
from parallel.peers.membership import revision as revisions
from parallel.peers.membership.fetch import Fetch, StateServer
from parallel.peers.membership.leases import Spans
from parallel.peers.membership.messages import Id
from parallel.peers.membership.revision import LEASES_KEY, Revision
from parallel.peers.membership.shared_state import State
from parallel.peers.ring.bandwidth import AlgorithmSelector
from parallel.peers.settings import PeerSettings
from parallel.peers.timeouts import (
  AdmissionTimeout,
  PeerHalted,
  StoppedByCoordinator,
)
from parallel.peers.transport import frames
from parallel.peers.transport.channel import Channel
from parallel.peers.transport.handshake import (
  Address,
  Cancelled,
  DialRequest,
  Purpose,
  Security,
  SocketGroup,
  dial,
  format_address,
  reachability_error,
)
from parallel.peers.transport.links import LinkOptions, Links
from parallel.peers.transport.listener import AcceptRule, Listener
from parallel.peers.transport.transfers import LinksLost, UnreachableError

LOG = logging.getLogger(__name__)
# First and longest pause before the failure of a round is reported (exponential
# backoff): without it, a persistent failure would cause thousands of epochs.
_RETRY_PAUSE_S, _MAX_RETRY_PAUSE_S = 0.02, 2.0
# If commits have outdated this many fetches in succession, a peer leaves and
# joins again, since the swarm waits for new members before it starts a round.
_MAX_OUTDATED_FETCHES = 3
# time limit for connecting to members, in units of silence_s
_CONNECT_TIMEOUTS = 1.5
# interval of warnings about an unreachable coordinator
_WARNING_INTERVAL_S = 10.0


class Agent:
  """Process of a peer: its threads, connections and state.

  Attributes:
    changed: Condition that is notified when a contribution is due or the peer
      has ended; guards the attributes below.
    working: Whether the user's program has to compute a contribution.
    drawn: (`SampleLeases.round` when the samples of that contribution were
      drawn, these samples as [start, stop) spans).
    newest: Newest committed revision (version of the shared state) that the
      peer holds.
    peer: State of the membership protocol.
    members: Members of the swarm in the newest epoch, in the order of their
      ranks.
    counted: Whether the last contribution is known to be in a committed round.
    error: Exception that ended the peer; None while it runs.
  """

  def __init__(
    self, coordinator: Address, security: Security, state: State,
    revision: int, listener: Listener, settings: PeerSettings,
    say: Callable[[str], None],
  ) -> None:
    self._coordinator, self._security = coordinator, security
    # Other threads only append to the queue `_events`; `_run` alone changes the
    # protocol's state.
    self._listener, self._settings = listener, settings
    self._events: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    self._scope = SocketGroup()
    self._server = StateServer()
    self._channel: Channel | None = None
    self._links: Links | None = None
    self._rings: AlgorithmSelector | None = None
    self._reached: m.Connected | None = None  # result of connecting, if ended
    self._fetch: Fetch | None = None
    # (epoch, revision, digest) of the running fetch.
    self._fetching: tuple[int, int, Any] | None = None
    self._overtaken = 0  # fetches that commits have outdated, in succession
    self._admission, self._say = AdmissionTimeout(settings, say), say
    self._sent_bytes = 0  # in earlier epochs
    self._silence_s = 10.0
    # Kept until its round is committed, or until the protocol discards it.
    self._part: PeerContribution | None = None
    self._result: Revision | None = None  # of the round that it voted on
    self._failed = 0  # failed attempts in succession
    self.changed = threading.Condition()
    self.working, self.drawn = False, (0, ())
    self.counted = False
    self.members: tuple[Id, ...] = ()
    self.error: BaseException | None = None
    # Hashes the state, so a large one delays the first connection.
    self._install(revisions.make(revision, state))
    self.peer = peers.PeerState(listener.me, revision, self.newest.digest)
    # A connection that ends at once: it shows that this peer can be reached.
    listener.serve(Purpose.CHECK, AcceptRule(0, None, lambda *_: None))
    self._threads = [
      threading.Thread(target=self._run_task, args=(target,), daemon=True)
      for target in (self._run, self._keep_connected)
    ]
    for thread in self._threads:
      thread.start()

  def give(self, part: PeerContribution) -> None:
    """Accepts the contribution that the user's program has computed."""
    with self.changed:
      self.working = False
    self._events.put((m.Worked(), part))

  def leave(self) -> None:
    """Sends `Leave` to the coordinator, and ends all threads."""
    channel = self._channel
    if channel is not None and self.error is None:
      channel.send(m.Leave())
      channel.finish(1.0)
    # Ends the threads; the error is not raised, since no call of `give` waits.
    self._end(PeerHalted("the peer has left"))
    for thread in self._threads:
      thread.join(5)

  # Connection to the coordinator.

  def _keep_connected(self) -> None:
    """Maintains a connection to the coordinator; runs in its own thread."""
    pause_s, seen, invalid = 0.05, time.monotonic(), ""
    request = DialRequest(
      Purpose.CONTROL, 0, 0, self.peer.id, service.COORDINATOR_ID
    )
    while self.error is None:
      try:
        left_s = max(0.0, seen + self._settings.alone_s - time.monotonic())
        sock = dial(
          # Dials last at most _WARNING_INTERVAL_S, so that warnings appear in
          # between.
          self._coordinator, request, self._security, self._scope,
          min(left_s, _WARNING_INTERVAL_S),
        )
      except Cancelled:
        return
      except OSError as error:
        # the dial used up the rest of alone_s
        if left_s <= _WARNING_INTERVAL_S:
          self._events.put((m.Alone(), invalid or error))
          return
        self._say(
          f"coordinator {format_address(self._coordinator)}: {error}; "
          f"{self.peer.id} halts in {left_s:.0f} s"
        )
        self._scope.closed.wait(1.0)  # pause: a refusal may come at once
        continue
      channel = Channel(
        sock, frames.COORDINATOR_MESSAGES, self._silence_s, ends_silent=True
      )
      began, invalid = time.monotonic(), ""
      try:
        channel.run(lambda message, c=channel: self._receive(c, message))
      except ValueError as error:
        invalid = f"it sent an invalid message: {error}"
        self._say(f"coordinator {format_address(self._coordinator)}: {invalid}")
      except OSError as error:
        LOG.info("the coordinator's connection has ended: %s", error)
      # Only now close the socket: no thread uses it any longer.
      self._scope.end(sock)
      # Exponential backoff for connections that end shortly after they start.
      lasted = time.monotonic() - began > self._silence_s
      if lasted or not invalid:
        seen = time.monotonic()
      pause_s = 0.05 if lasted else min(2 * pause_s, 2.0)
      self._scope.closed.wait(pause_s)

  def _receive(self, channel: Channel, message: Any) -> None:
    """Processes a message that arrived from the coordinator."""
    # After this first message the connection replaces the former one.
    if isinstance(message, m.Welcome):
      self._silence_s = channel.silence_s = max(message.silence_s, 0.1)
      self._channel = channel
      message = m.Reconnected()
    if isinstance(message, m.Waiting):
      error = self._admission.update(message)
      if error is not None:
        self._end(error)
    elif isinstance(message, m.Stop):
      self._end(StoppedByCoordinator(message.text))
    elif isinstance(message, m.Check):
      for peer in message.peers:
        self._start(self._check_reachable, channel, peer, message.limit_s)
    # Messages of a former connection are stale.
    elif channel is self._channel:
      self._events.put((message, None))

  # Event loop.

  def _run(self) -> None:
    """Processes events in order; runs in its own thread."""
    while self.error is None:
      # (None, None) from `_end` wakes the loop.
      message, payload = self._events.get()
      if message is not None:
        self._process_event(message, payload)

  def _process_event(self, message: Any, payload: Any) -> None:
    """Processes an event: a message of the membership protocol.

    ``payload`` is the result of the task whose end the message reports, if any.
    """
    wrong = False
    match message:
      case m.Prepare() if message.verify and message.epoch > self.peer.epoch:
        wrong = self._detect_corruption()
      case m.Connected() if message.epoch == self.peer.epoch:
        self._reached = message
      case m.Worked():
        self._part = payload
        # A newer revision was fetched while the program computed.
        if self._drop_if_void(self.newest):
          message = m.Voided()
      # A newer revision may grant the samples of the contribution to others.
      case m.Fetched() if message == self.peer.fetching:
        if self._drop_if_void(payload):
          self._step(m.Voided(), None)
        self._overtaken = 0
        self._install(payload)
      case m.Reduced() if (message.epoch, message.round) == (
        self.peer.epoch, self.peer.revision
      ):
        # None after a failure, which increases the backoff of the next attempt.
        self._result = payload
        self._failed = 0 if payload else self._failed + 1
    self._step(message, payload)
    if wrong:  # the contribution was computed from a wrong state
      self._part, self.counted = None, False
      self._step(m.Voided(), None)

  def _detect_corruption(self) -> bool:
    """Returns whether this peer's memory of the shared state is corrupt.

    If so, its new digest makes the protocol fetch the revision again.
    """
    held = revisions.make(self.newest.number, self.newest.shared)
    if held.digest == self.newest.digest:
      return False
    self._say(
      f"the state of revision {held.number} has changed in this peer's memory; "
      "it is fetched again"
    )
    self._install(held)
    with self.changed:
      self.peer = self.peer._replace(digest=held.digest)
    return True

  def _drop_if_void(self, newest: Revision) -> bool:
    """Drops the contribution if its samples are now granted to other peers.

    ``newest`` is a new revision of the shared state, which has the grants.
    """
    part = self._part
    if part is None or not self._settings.samples:
      return False
    begun = part.begun, part.samples
    # Still valid: the newest revision grants the samples to this peer, or they
    # were drawn from ungranted numbers since the last commit.
    if leases.are_samples_valid(newest.leases, begun, self.peer.id):
      return False
    self._part, self.counted = None, False
    self._say(
      f"the contribution of samples {part.samples} is dropped: revision "
      f"{newest.number} grants them to other peers"
    )
    return True

  def _step(self, message: Any, payload: Any) -> None:
    """Runs one step of the protocol and executes its effects.

    ``payload`` is the result of the task whose end the message reports, if any.
    """
    with self.changed:
      self.peer, effects = peers.step(self.peer, message)
      # The step has completed or replaced the requested fetch: stop it.
      if self.peer.fetching is None and self._fetch is not None:
        self._fetch.cancel()
        self._fetch = self._fetching = None
    for effect in effects:
      self._do(effect, payload)

  def _do(self, effect: Any, payload: Any) -> None:
    """Executes one effect that a step of the membership protocol returned.

    ``payload`` is that of `_step`.
    """
    match effect:
      case m.Send():
        # The protocol recovers lost messages after the next `Hello`.
        if self._channel is not None:
          self._channel.send(effect.message)
      # Each of the next three starts a thread, which reports by an event.
      case m.Connect():
        self._connect(effect)
      case m.Fetch():
        self._start_fetch(effect)
      case m.Reduce():
        self._start(self._attempt_round, effect, self._links, self._part,
                    self.newest, self._rings)
      # Closing the links makes the running exchange raise `LinksLost`.
      case m.Cancel():
        self._close_links("the round was cancelled")
      case m.Discard():
        self._result = None
        if not effect.keep:
          self._part, self.counted = None, False
          self._say(
            f"the contribution to round {self.newest.number} is dropped: it "
            "may be counted already"
          )
      case m.Apply():
        assert self._result is not None
        self._install(self._result)
        self._report()
        # Counted: the committed result contains the contribution.
        self._part, self._result, self.counted = None, None, True
      case m.Work():
        self._ask_for_work()
      case m.Halt():
        self._end(PeerHalted(
          f"no coordinator at {':'.join(map(str, self._coordinator))}: "
          f"{payload}; the peer's state is kept"
        ))
      case _:
        raise AssertionError(effect)

  def _report(self) -> None:
    """Sends a progress report for the coordinator's display."""
    part, links = self._part, self._links
    if self._channel is not None and links is not None and part is not None:
      # Bytes of all epochs, failed attempts included.
      sent = self._sent_bytes + links.traffic.sent_bytes
      self._channel.send(m.Report(self.newest.number, sent, part.loss))

  def _install(self, newest: Revision) -> None:
    """Makes a revision of the shared state the newest; serves it to peers."""
    # Read-only: the server and fetches of other peers read the same memory.
    for value in newest.shared.values():
      if not isinstance(value, bytes):
        value.setflags(write=False)
    self.newest = newest
    # Requests in progress keep reading the former revision.
    self._server.publish(newest.shared, newest.entries)

  def _ask_for_work(self) -> None:
    """Draws the next contribution's samples and wakes the user's thread."""
    drawn: tuple[int, Spans] = 0, ()  # (round, samples)
    if self._settings.samples:
      now = self.newest.leases
      drawn = now.round, leases.next_samples(
        now, self.peer.epoch, self.members, self.peer.id,
        self._settings.num_samples(now.round),
      )
    with self.changed:
      # Wakes `Swarm._wait`.
      self.working, self.drawn = True, drawn
      self.changed.notify_all()

  def _end(self, error: BaseException) -> None:
    """Ends the peer and keeps its state."""
    with self.changed:
      if self.error is not None:
        return
      self.error = error
      self.changed.notify_all()
    self._events.put((None, None))  # wakes the event loop
    self._scope.close()
    if self._channel is not None:
      self._channel.close("the peer has ended")
    if self._fetch is not None:
      self._fetch.cancel()
    self._close_links("the peer has ended")
    self._listener.close()

  # Tasks, each in its own thread.

  def _start(self, target: Any, *args: Any) -> None:
    threading.Thread(
      target=self._run_task, args=(target, *args), daemon=True
    ).start()

  def _run_task(self, target: Any, *args: Any) -> None:
    """Runs a task; an error that it does not handle ends the peer."""
    try:
      target(*args)
    except BaseException as error:  # SystemExit included
      self._end(error)

  def _close_links(self, reason: str) -> None:
    """Closes the links, which fails a running exchange."""
    if self._links is not None:
      self._links.close(reason)

  def _connect(self, task: m.Connect) -> None:
    """Starts to connect to the members of an epoch of the swarm.

    A repeated request is ignored.
    """
    # A repeated `Prepare` of this epoch: report the result again, if any.
    if self._links is not None and self._links.epoch == task.epoch:
      if self._reached is not None:
        self._events.put((self._reached, None))
      return
    self._reached = None
    self._close_links(f"continues with epoch {task.epoch}")
    if self._links is not None:
      # The counters of the closed links are added to the total.
      self._sent_bytes += self._links.traffic.sent_bytes
    with self.changed:
      self.members = task.members
    members = {peer: ids.address(peer) for peer in task.members}
    options = LinkOptions(
      self._settings.num_connections, self._silence_s, self._settings.checked
    )
    self._links = Links(
      self.peer.id, task.epoch, members, self._security, options
    )
    # Measured bandwidths are valid for one epoch.
    self._rings = (
      AlgorithmSelector(
        self._links, self._say
      ) if self._settings.measured else None
    )
    # Members without the newest revision fetch it while others connect.
    self._server.offer(self._listener, task.epoch, task.members)
    self._start(self._connect_to_members, self._links)

  def _connect_to_members(self, links: Links) -> None:
    """Connects to all members and reports unreachable ones.

    The time limit is longer than `_silence_s`, after which the coordinator
    drops a dead member.
    """
    unreachable: tuple[Id, ...] = ()
    absent: tuple[Id, ...] = ()
    try:
      links.connect(self._listener, _CONNECT_TIMEOUTS * self._silence_s)
    except UnreachableError as error:
      self._say(f"epoch {links.epoch}: {error}")
      unreachable, absent = tuple(error.peers), error.absent
    except LinksLost as error:
      if error.peer is None:
        return  # closed here for a newer epoch
      self._say(f"epoch {links.epoch}: {error}")
      # A peer was lost after it had been connected.
      unreachable = (error.peer,)
    self._events.put((m.Connected(links.epoch, unreachable, absent), None))

  def _check_reachable(
    self, channel: Channel, peer: Id, limit_s: float
  ) -> None:
    """Connects to a peer that is not a member yet, and reports the result."""
    try:
      address = ids.address(peer)
    except ValueError as error:
      text = str(error)
    else:
      text = reachability_error(
        self.peer.id, peer, address, self._security, self._scope, limit_s
      )
    channel.send(m.Checked(peer, text))

  def _start_fetch(self, task: m.Fetch) -> None:
    """Starts to fetch a revision of the shared state from other peers.

    It has no effect if that revision is being fetched already.
    """
    wanted = self.peer.epoch, task.revision, task.digest
    if self._fetching == wanted:  # a repeated request
      return
    if self._fetch is not None:
      self._fetch.cancel()
      # In the same epoch, only a commit makes a fetch outdated.
      self._overtaken += self._fetching[0] == self.peer.epoch
    if self._overtaken >= _MAX_OUTDATED_FETCHES and self._channel is not None:
      LOG.info("rounds are committed faster than they can be fetched")
      self._overtaken = 0
      self._channel.send(m.Leave())
      return
    holders = {
      # This peer lacks the revision, even if the message lists it as a holder.
      peer: ids.address(peer) for peer in task.holders if peer != self.peer.id
    }
    job = self._make_fetch(task, holders)
    with self.changed:
      self._fetching, self._fetch = wanted, job
    self._start(self._fetch_revision, task, holders, job)

  def _make_fetch(
    self, task: m.Fetch, holders: Mapping[Id, Address]
  ) -> Fetch:
    """Returns a download of a revision from the peers ``holders``.

    It reuses the chunks that this peer has already.
    """
    # They are those of an unfinished fetch, else of the held revision.
    kept = None if self._fetch is None else self._fetch.partial_state
    return Fetch(
      self.peer.id, self.peer.epoch, task.digest, holders, self._security,
      have=kept or (self.newest.shared, self.newest.entries),
      limit_s=self._silence_s,
    )

  def _fetch_revision(
    self, task: m.Fetch, holders: Mapping[Id, Address], job: Fetch
  ) -> None:
    """Runs the download ``job`` of a revision of the shared state.

    It retries until a request for another revision arrives.
    """
    pause_s, text = _RETRY_PAUSE_S, ""
    while self.error is None:
      try:
        found = job.result()
      except Cancelled:
        return
      except ConnectionError as error:
        if str(error) != text:  # report each error once
          text = str(error)
          self._say(f"revision {task.revision} is fetched again: {text}")
        self._scope.closed.wait(pause_s)
        pause_s = min(2 * pause_s, _MAX_RETRY_PAUSE_S)
        # A new attempt starts from the chunks received so far.
        again = self._make_fetch(task, holders)
        with self.changed:
          if self._fetch is not job:  # replaced meanwhile
            return
          self._fetch = job = again
      else:
        newest = Revision(task.revision, task.digest, *found)
        self._events.put((m.Fetched(task.revision, task.digest), newest))
        return

  def _attempt_round(
    self, task: m.Reduce, links: Links, part: PeerContribution,
    newest: Revision, rings: AlgorithmSelector | None,
  ) -> None:
    """Attempts a round, an exchange of contributions; reports its result.

    Args:
      task: The round to attempt.
      links: Links to the other members.
      part: This peer's contribution.
      newest: Revision of the shared state before the round.
      rings: Measured links; None if links are not measured.
    """
    found: Revision | None = None
    try:
      # This exchanges weights, samples and measurement requests.
      exchange = RoundExchange(links, task, part.weight, part.samples, rings)
      made = dict(
        part.combine(exchange, newest.state_without_leases, part.value)
      )
      exchange.end()  # raises `LinksLost` if a peer calls one more operation
      if self._settings.samples:
        # All contributors compute the same leases from the same samples.
        made[LEASES_KEY] = leases.encode(leases.leases_after_commit(
          newest.leases, task.epoch, links.members,
          exchange.samples, self._settings.num_samples(task.round + 1),
        ))
      # Hashing costs about 0.7 s per GB and core.
      found = revisions.make(task.round + 1, made)
    except LinksLost as error:  # `found` is None: a vote for a new attempt
      cause = links.error or error
      if cause.peer == self.peer.id:  # it would fail in each attempt
        self._end(ValueError(cause.reason))
        return
      if cause.peer is not None:  # None: closed for a newer epoch
        self._say(f"round {task.round} is attempted again: {cause}")
      self._scope.closed.wait(
        min(_RETRY_PAUSE_S * 2**min(self._failed, 10), _MAX_RETRY_PAUSE_S)
      )
    # Other errors come from the user's function and would occur again, so
    # `_run_task` ends the peer.
    # This is the vote: equal digests on all contributors commit the round.
    name = found.digest if found else None
    self._events.put((m.Reduced(task.epoch, task.round, name), found))
