"""Transition relation of the model checker: all successors of a state.

The protocol's own `step` functions are executed. A revision is represented by
its history, the list of the contributions that each committed round summed.
"""

from collections.abc import Callable, Iterator
import functools
from typing import Any

from parallel.peers.membership import messages as m
from parallel.peers.membership.peer import Progress
from parallel.peers.membership.world import ProtocolModules, SearchBounds, World


class SafetyViolation(Exception):
  """Error: a step violates a safety property."""


# Initial history. Digests are histories: for each committed round, (epoch,
# ((peer, number of its contribution), ...)).
_EMPTY_HISTORY: tuple[Any, ...] = ()


class Model:
  """Transition system of a few peers: states, events and properties."""

  def __init__(self, bounds: SearchBounds, protocol: ProtocolModules) -> None:
    self._bounds, self._protocol = bounds, protocol
    # Cached, since many worlds differ only in what a step does not read. The
    # message's type is an argument since tuples of different types are equal.
    self._coordinator_step = functools.lru_cache(None)(
      lambda state, sender, message, _: protocol.coordinator.step(
        state, sender, message, bounds.rules
      )
    )
    self._peer_step = functools.lru_cache(None)(
      lambda state, message, _: protocol.peer.step(state, message)
    )

  def first(self) -> World:
    """Returns the initial world, without connections and messages."""
    n = self._bounds.peers
    state, _ = self._protocol.coordinator.initial_state(
      m.Record(digest=_EMPTY_HISTORY)
    )
    make = self._protocol.peer.PeerState
    return World(
      # Coordinator, journal, timers, watched peers.
      state, m.Record(digest=_EMPTY_HISTORY), frozenset(), frozenset(),
      # Peers, connections, numbers of contributions.
      tuple(make(i, digest=_EMPTY_HISTORY) for i in range(n)), (False,) * n,
      (0,) * n,
      # Messages, tasks, started exchanges, faults.
      frozenset(), frozenset(), frozenset(), self._bounds.budget,
    )

  def done(self, world: World) -> bool:
    """Returns whether all rounds are committed and held by all live peers."""
    if world.coordinator is None:
      return False
    record = world.coordinator.record
    there = [p for p in world.peers if self._lives(p)]
    return record.revision >= self._bounds.rounds and all(
      p.revision == record.revision for p in there
    )

  def can_go_on(self, world: World) -> bool:
    """Returns whether the live peers must be able to complete the run.

    They must if at least `Rules.least` of them live before the first epoch, and
    later if one of them holds the newest revision.
    """
    there = [p for p in world.peers if self._lives(p)]
    record = world.journal
    if not record.epoch:  # the first epoch needs enough peers
      return len(there) >= self._bounds.rules.least
    return any(p.digest == record.digest or self._has_newest_result(p, record)
               for p in there)

  def _has_newest_result(self, peer: Any, record: m.Record) -> bool:
    """Returns whether a peer's vote, of unknown outcome, was committed."""
    vote = peer.voted
    return vote is not None and vote.digest == record.digest

  def _lives(self, peer: Any) -> bool:
    return peer is not None and (
      peer.phase is not self._protocol.peer.Phase.HALTED
    )

  def violation(self, before: World, world: World) -> str:
    """Returns the safety property that a step violates; "" for none."""
    record, old = world.journal, before.journal
    if not record.epoch:  # nothing is decided, or the journal has been lost
      return ""
    # Epochs and revisions never decrease, and an epoch's members are fixed.
    if record.epoch < old.epoch or record.revision < old.revision:
      return "an epoch or a revision decreases"
    if record.epoch == old.epoch and record.members != old.members:
      return "an epoch has two lists of members"
    # Committed histories only grow.
    if record.revision > 0 and record.digest[: len(old.digest)] != old.digest:
      return "a committed round is lost"
    # Exactly once: no contribution is summed in two committed rounds.
    parts = [part for _, given in record.digest for part in given]
    if len(parts) != len(set(parts)):
      return "a contribution is counted twice"
    for peer in world.peers:
      if peer is None:
        continue
      if peer.digest is None:
        return "a peer applies a round that failed"
      # A peer's content is a prefix of the committed history.
      if peer.digest != record.digest[: len(peer.digest)]:
        return "a peer has uncommitted content"
      if len(peer.digest) != peer.revision:
        return "a peer's revision does not match its content"
    return ""

  def successors(
    self, world: World
  ) -> Iterator[tuple[str, bool, World | str]]:
    """Yields (description, whether it is a fault, next world) of each event.

    If the event violates a property, a string that names the property replaces
    the world.
    """
    for what, accident, act in self._events(world):
      try:
        result = act()
      # An assertion of the protocol counts as a violation.
      except (SafetyViolation, AssertionError) as error:
        yield what, accident, str(error) or "an assertion fails"
      else:
        if result != world:  # ignore events without an effect
          yield what, accident, result

  def _events(
    self, world: World
  ) -> Iterator[tuple[str, bool, Callable[[], World]]]:
    """Yields (description, whether it is a fault, event to execute)."""
    left = world.left
    # Any message may be delivered next; a duplicated one stays in flight.
    for entry in sorted(world.messages, key=repr):
      source, target, kind, message = entry
      after = world._replace(messages=world.messages - {entry})
      what = f"{_name(source)} -> {_name(target)}: {kind} {tuple(message)}"
      yield what, False, lambda a=after, e=entry: self._deliver(a, e)
      if left.copies:
        twice = self._spend_fault(world, "copies")
        yield what + " (delivered again later)", True, (
          lambda a=twice, e=entry: self._deliver(a, e)
        )
    yield from self._host_events(world)
    yield from self._task_events(world)
    yield from self._fault_events(world)

  def _host_events(
    self, world: World
  ) -> Iterator[tuple[str, bool, Callable[[], World]]]:
    """Yields timers, restarts, reconnections and detections of dead peers."""
    up = world.coordinator is not None
    # Timers may expire at any moment. They are sorted, so that searches are
    # reproducible.
    for message in sorted(world.armed, key=repr):
      after = world._replace(armed=world.armed - {message})
      yield f"timer expires: {message}", False, (
        lambda a=after, e=message: self._deliver_to_coordinator(a, None, e)
      )
    if not up:
      yield (
        "the coordinator restarts", False,
        lambda: self._restart_coordinator(world)
      )
    for i, peer in enumerate(world.peers):
      if up and not world.linked[i] and self._lives(peer):
        linked = world._replace(linked=_set(world.linked, i, True))
        yield f"peer {i} connects", False, (
          lambda a=linked, i=i: self._deliver_to_peer(a, i, m.Reconnected())
        )
      # A dead peer is always detected, so this is not a fault.
      if up and i in world.watched and not self._lives(peer):
        after = world._replace(watched=world.watched - {i})
        yield f"peer {i} is silent", False, (
          lambda a=after,
          i=i: self._deliver_to_coordinator(a, None, m.Silent(i))
        )

  def _task_events(
    self, world: World
  ) -> Iterator[tuple[str, bool, Callable[[], World]]]:
    """Yields each way in which a running task can end."""
    for entry in sorted(world.tasks, key=repr):
      i, kind, task = entry
      after = world._replace(tasks=world.tasks - {entry})
      # A failure that is a fault counts against the budget.
      for accident, answer in self._task_results(world, i, kind, task):
        begin = self._spend_fault(after, "failures") if accident else after
        what = f"peer {i}: {type(answer).__name__} {tuple(answer)}"
        yield what, accident, (
          lambda a=begin, i=i, e=answer: self._deliver_to_peer(a, i, e)
        )

  def _task_results(
    self, world: World, i: int, kind: str, task: Any
  ) -> Iterator[tuple[bool, Any]]:
    """Yields (whether it is a fault, result) for each way a task can end.

    ``task`` is one of peer number ``i``; ``kind`` is its kind.
    """
    can_fail = world.left.failures > 0
    if kind == "Work":
      # Peers also work after the last round while a peer waits for admission,
      # since peers are admitted when a round starts.
      state = world.coordinator
      if world.peers[i].revision < self._bounds.rounds or (
        state is not None and state.pending
      ):
        yield False, m.Worked()
    elif kind == "Connect":
      # Dead members are always found unreachable.
      gone = tuple(
        j for j in task.members if not self._lives(world.peers[j])
      )
      yield False, m.Connected(task.epoch, gone)
      if can_fail and len(task.members) > 1:
        other = next(j for j in task.members if j != i)
        yield True, m.Connected(task.epoch, (other,))
    elif kind == "Fetch":
      # A fetch without a live holder does not end.
      if any(
        self._lives(world.peers[j]) and world.peers[j].digest == task.digest
        for j in task.holders
      ):
        yield False, m.Fetched(task.revision, task.digest)
    else:  # Reduce: succeeds once all contributors have started it
      parts = {
        # Contributions that were passed to this attempt.
        j: part for epoch, round_, j, part in world.begun
        if (epoch, round_) == (task.epoch, task.round)
      }
      if set(task.contributors) <= set(parts):
        given = tuple((j, parts[j]) for j in task.contributors)
        base = world.peers[i].digest
        # The result of a round extends the history by one entry.
        digest = (*base, (task.epoch, given))
        yield False, m.Reduced(task.epoch, task.round, digest)
        if can_fail:
          yield True, m.Reduced(task.epoch, task.round, None)
      # A contributor is gone: the exchange fails without a fault.
      if any(
        not self._may_join_round(world, j, task) for j in task.contributors
      ):
        yield False, m.Reduced(task.epoch, task.round, None)

  def _may_join_round(self, world: World, j: int, task: Any) -> bool:
    """Returns whether a peer takes part in a round or may still join it."""
    peer = world.peers[j]
    return self._lives(peer) and peer.epoch == task.epoch

  def _fault_events(
    self, world: World
  ) -> Iterator[tuple[str, bool, Callable[[], World]]]:
    """Yields the faults that the remaining budget allows."""
    left, up = world.left, world.coordinator is not None
    if left.restarts and up:
      yield (
        "the coordinator is killed", True,
        lambda: self._kill_coordinator(world)
      )
    if left.losses and not up:
      lost = self._spend_fault(world, "losses")._replace(
        journal=m.Record(digest=_EMPTY_HISTORY)
      )
      yield "the journal is lost", True, lambda: lost
    for i, peer in enumerate(world.peers):
      if not self._lives(peer):
        continue
      if left.crashes:
        yield f"peer {i} is killed", True, lambda i=i: self._crash(world, i)
      if left.cuts and world.linked[i]:
        cut = self._spend_fault(self._disconnect(world, i), "cuts")
        yield f"peer {i} is cut off", True, lambda a=cut: a
      # The suspicion is false: the peer is alive.
      if left.suspicions and up and i in world.watched:
        begin = self._spend_fault(world, "suspicions")
        yield f"peer {i} seems silent", True, (
          lambda a=begin,
          i=i: self._deliver_to_coordinator(a, None, m.Silent(i))
        )
      # Void contributions occur only while a newer revision is fetched.
      if left.voids and peer.fetching and peer.part == Progress.THERE:
        begin = self._spend_fault(world, "voids")
        yield f"peer {i}'s contribution is void", True, (
          lambda a=begin, i=i: self._deliver_to_peer(a, i, m.Voided())
        )
      if left.halts and not world.linked[i]:
        begin = self._spend_fault(world, "halts")
        yield f"peer {i} halts", True, (
          lambda a=begin, i=i: self._deliver_to_peer(a, i, m.Alone())
        )
      if left.leaves and up and world.linked[i]:
        begin = self._spend_fault(world, "leaves")
        yield f"peer {i} leaves", True, lambda a=begin, i=i: self._remove_peer(
          self._deliver_to_coordinator(a, i, m.Leave()), i
        )

  def _spend_fault(self, world: World, what: str) -> World:
    """Deducts one fault of the kind ``what`` from the budget."""
    left = world.left._replace(**{what: getattr(world.left, what) - 1})
    return world._replace(left=left)

  def _disconnect(self, world: World, i: int) -> World:
    """Breaks a peer's connection and drops its messages in flight."""
    under_way = frozenset(e for e in world.messages if i not in e[:2])
    return world._replace(
      messages=under_way, linked=_set(world.linked, i, False)
    )

  def _remove_peer(self, world: World, i: int) -> World:
    """Removes a peer, its connection and its tasks."""
    world = self._disconnect(world, i)
    return world._replace(
      peers=_set(world.peers, i, None),
      tasks=frozenset(e for e in world.tasks if e[0] != i),
    )

  def _crash(self, world: World, i: int) -> World:
    return self._remove_peer(self._spend_fault(world, "crashes"), i)

  def _kill_coordinator(self, world: World) -> World:
    """Stops the coordinator; only the journal survives."""
    world = self._spend_fault(world, "restarts")
    for i in range(len(world.peers)):
      world = self._disconnect(world, i)
    return world._replace(
      coordinator=None, armed=frozenset(), watched=frozenset()
    )

  def _restart_coordinator(self, world: World) -> World:
    state, effects = self._protocol.coordinator.initial_state(world.journal)
    return self._host(world._replace(coordinator=state), effects)

  def _deliver(self, world: World, entry: tuple[Any, ...]) -> World:
    source, target, _, message = entry
    if target is None:
      return self._deliver_to_coordinator(world, source, message)
    return self._deliver_to_peer(world, target, message)

  def _deliver_to_coordinator(
    self, world: World, sender: int | None, message: Any
  ) -> World:
    assert world.coordinator is not None
    state, effects = self._coordinator_step(
      world.coordinator, sender, message, type(message)
    )
    return self._host(world._replace(coordinator=state), effects)

  def _host(self, world: World, effects: list[Any]) -> World:
    """Executes the coordinator's effects."""
    for effect in effects:
      if isinstance(effect, m.Record):
        world = world._replace(journal=effect)
      elif isinstance(effect, m.Arm):
        world = world._replace(armed=world.armed | {effect.message})
      elif isinstance(effect, m.Watch):
        world = world._replace(watched=world.watched | {effect.peer})
      elif isinstance(effect, m.Close):
        world = self._disconnect(world, effect.peer)
      elif world.linked[effect.to]:  # otherwise resent after the next Hello
        world = self._send(world, None, effect.to, effect.message)
    return world

  def _send(
    self, world: World, source: int | None, target: int | None, message: Any
  ) -> World:
    # The type's name distinguishes equal tuples of different types.
    entry = source, target, type(message).__name__, message
    return world._replace(messages=world.messages | {entry})

  def _deliver_to_peer(self, world: World, i: int, message: Any) -> World:
    """Delivers a message to a peer and executes its effects."""
    state, effects = self._peer_step(world.peers[i], message, type(message))
    world = world._replace(peers=_set(world.peers, i, state))
    for effect in effects:
      kind = type(effect).__name__
      if isinstance(effect, m.Send):
        if world.linked[i]:
          world = self._send(world, i, None, effect.message)
      elif isinstance(effect, m.Cancel):
        world = self._end(world, i, "Reduce")
      elif isinstance(effect, m.Discard):
        self._check_discard(world, i, effect)
      elif isinstance(effect, m.Apply):
        # A peer must not be ahead of the journal.
        if state.revision and world.journal.revision < state.revision:
          raise SafetyViolation("a peer applies an uncommitted round")
      elif isinstance(effect, m.Halt):
        world = world._replace(
          tasks=frozenset(e for e in world.tasks if e[0] != i)
        )
      else:
        if isinstance(effect, m.Work):
          counts = _set(world.counts, i, world.counts[i] + 1)  # a new number
          world = world._replace(counts=counts)
        if isinstance(effect, m.Reduce):
          # The contribution that this exchange sums.
          entry = effect.epoch, effect.round, i, world.counts[i]
          world = world._replace(begun=world.begun | {entry})
        world = self._end(world, i, kind)
        world = world._replace(tasks=world.tasks | {(i, kind, effect)})
    return world

  def _end(self, world: World, i: int, kind: str) -> World:
    """Ends the peer's running task of a kind, if there is one."""
    return world._replace(
      tasks=frozenset(e for e in world.tasks if e[:2] != (i, kind))
    )

  def _check_discard(self, world: World, i: int, discard: m.Discard) -> None:
    """Raises `SafetyViolation` if a peer keeps a counted contribution."""
    part = i, world.counts[i]
    counted = any(part in given for _, given in world.journal.digest)
    if discard.keep and counted:
      raise SafetyViolation("a contribution that was counted is kept")


def _set(values: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
  return (*values[:i], value, *values[i + 1 :])


def _name(who: int | None) -> str:
  return "coordinator" if who is None else f"peer {who}"
