"""State machine of the coordinator: membership and commits.

A swarm has one coordinator. It holds no tensors and is the only process that
decides, so peers that are disconnected from it cannot continue. Each decision
is in its journal before a peer is notified of it: the number and members of
each proposed epoch, and each committed round. A restarted coordinator waits for
the members of its last epoch to reconnect, and forms a new epoch from those
that do. A round that was voted on but is not in the journal is not committed.
A coordinator with an empty journal starts from the newest revision of the
connected peers, and with an epoch number above all of theirs.

The protocol is the pure function `step`, without clock, socket or disk.

Source: a subset of the states of PCCL (arXiv 2505.14065). A failed attempt of a
round always starts a new epoch (as in torchft since its pull request 183), so
that messages of different attempts cannot be confused.

Example:
  >>> from parallel.peers.membership import coordinator, messages as m
  >>> rules = coordinator.Rules(least=1)
  >>> state, _ = coordinator.initial_state(m.Record())
  >>> hello = m.Hello(epoch=0, revision=0, digest="", voted=None)
  >>> state, effects = coordinator.step(state, "a", hello, rules)
  >>> [type(effect).__name__ for effect in effects]
  ['Watch', 'Record', 'Send']
  >>> state.record.members, state.phase.name
  (('a',), 'FORMING')
"""

from collections import Counter
from collections.abc import Iterable
import enum
from typing import Any, NamedTuple

from parallel.peers.membership import messages as m
from parallel.peers.membership import reachability
from parallel.peers.membership.messages import Digest, Id, Record, Send
from parallel.peers.membership.reachability import PeerPair

Effects = list[Any]
# Larger epochs of a `Hello` count as this one: a peer may claim any number, and
# numbers of samples, computed from epochs (`leases.next_samples`), must be
# below 2^63.
_MAX_EPOCH = 1 << 32


class Phase(enum.IntEnum):
  """Phase of the coordinator.

  ASSEMBLING: waits for peers, at the start of a run or after a restart.
  FORMING: waits for the members of an epoch to be prepared. OPEN: waits for
  contributions to the next round. RUNNING: waits for votes.
  """

  ASSEMBLING = 0
  FORMING = 1
  OPEN = 2
  RUNNING = 3


class Rules(NamedTuple):
  """Constants of an elastic training run.

  Attributes:
    least: Number of peers that the first epoch (list of members) requires.
    quorum: Number of contributions with which a round starts after the grace
      time; 0 requires the contributions of all members.
  """

  least: int = 1
  quorum: int = 0


class CoordinatorState(NamedTuple):
  """State of the coordinator.

  Attributes:
    record: Durable state, as in the journal.
    phase: Phase of the protocol.
    pending: Peers waiting for admission, with their `Hello`; sorted by id.
    ready: Members that are prepared (FORMING) or have a contribution (OPEN).
    reporters: Members that have reported failed connections (FORMING).
    contributors: Contributors of the running round, in the order of their
      ranks.
    votes: (contributor, digest) pairs received so far.
    failed: Connections that members have reported as failed (FORMING), as
      (member that connects, other member).
    holders: Members that hold the newest revision.
    late: Whether the time limit for waiting (grace or recovery) has expired.
    wrong: Peers whose vote on the next round differed from the majority. They
      would vote the same again, so they are admitted only after the round is
      committed without them.
    disputed: Whether the last votes on the next round differed without a
      majority, so that all members verify their revision.
  """

  record: Record = Record()
  phase: Phase = Phase.ASSEMBLING
  pending: tuple[tuple[Id, m.Hello], ...] = ()
  ready: frozenset[Id] = frozenset()
  reporters: frozenset[Id] = frozenset()
  contributors: tuple[Id, ...] = ()
  votes: tuple[tuple[Id, Digest], ...] = ()
  failed: frozenset[PeerPair] = frozenset()
  holders: frozenset[Id] = frozenset()
  late: bool = False
  wrong: frozenset[Id] = frozenset()
  disputed: bool = False


def initial_state(record: Record) -> tuple[CoordinatorState, Effects]:
  """Returns (state, effects) of a coordinator that starts from a journal.

  Args:
    record: Last record of the journal; the default record for a new run.
  """
  effects: Effects = [m.Arm(m.Recovered())] if record.members else []
  return CoordinatorState(record), effects


def step(
  state: CoordinatorState, sender: Id | None, message: Any, rules: Rules
) -> tuple[CoordinatorState, Effects]:
  """Processes one message.

  Args:
    state: State before the message.
    sender: Peer that sent the message; None for the host, the process around
      this state machine.
    message: Any message to a coordinator.
    rules: Constants of the run.

  Returns:
    (new state, effects). The host executes the effects in this order.
  """
  record = state.record
  if isinstance(message, m.Silent):
    return _remove_peer(state, message.peer, rules)
  if isinstance(message, m.Leave):
    return _remove_peer(state, sender, rules)
  # From now on, do not wait for all former members.
  if isinstance(message, m.Recovered):
    return _assemble(state._replace(late=True), rules)
  if isinstance(message, m.Grace):
    # The timer of an earlier round is ignored.
    now = state.phase is Phase.OPEN and message == (
      record.epoch, record.revision
    )
    return _start_round_if_ready(
      state._replace(late=True), rules
    ) if now else (state, [])
  if isinstance(message, m.Hello):
    return _handle_hello(state, sender, message, rules)
  # Messages of former members and of earlier epochs are ignored.
  if (
    sender not in record.members or message.epoch != record.epoch
    or state.phase is Phase.ASSEMBLING
  ):
    return state, []
  if isinstance(message, m.Prepared):
    return _handle_prepared(state, sender, rules)
  if isinstance(message, m.Unreachable):
    return _handle_unreachable(state, sender, message, rules)
  # Round r starts from revision r, so this message belongs to another round.
  if message.round != record.revision:
    return state, []
  if isinstance(message, m.Ready):
    return _handle_ready(state, sender, rules)
  assert isinstance(message, m.Vote), message
  return _handle_vote(state, sender, message.digest, rules)


def _handle_hello(
  state: CoordinatorState, sender: Id, hello: m.Hello, rules: Rules
) -> tuple[CoordinatorState, Effects]:
  """Queues a new peer for admission; resends recent messages to a member."""
  record = state.record
  if record.epoch and hello.revision > record.revision:
    # Admission would discard this peer's rounds. Its state may not replace that
    # of the group either: any peer could claim to have the newest one.
    return state, [Send(sender, m.Stop(
      f"the run of this peer is at round {hello.revision}, and that of the "
      f"group at round {record.revision}: joining would discard "
      f"{hello.revision - record.revision} rounds. To continue this run, start "
      "the coordinator with a new --journal and with --least=N, so that all N "
      "peers begin from the most advanced run; to join the group's run, use "
      "another --workdir"
    ))]
  if sender in record.members and state.phase is not Phase.ASSEMBLING:
    if state.phase is Phase.FORMING:
      return state, [Send(sender, _prepare_message(state))]
    effects: Effects = [Send(sender, _go_message(state))]
    if state.phase is Phase.RUNNING and sender in state.contributors:
      effects.append(Send(sender, _start_message(state)))
    return state, effects
  others = [entry for entry in state.pending if entry[0] != sender]
  # A repeated Hello replaces the former one.
  state = state._replace(pending=tuple(sorted([*others, (sender, hello)])))
  state, effects = _assemble(state, rules)
  return state, [m.Watch(sender), *effects]


def _assemble(
  state: CoordinatorState, rules: Rules
) -> tuple[CoordinatorState, Effects]:
  """Forms an epoch from the connected peers, once there are enough."""
  if state.phase is not Phase.ASSEMBLING:
    return state, []
  record, there = state.record, {peer for peer, _ in state.pending}
  if record.members:
    enough = state.late or there.issuperset(record.members)
  else:
    enough = len(there) >= rules.least
  if not there or not enough:
    return state, []
  if not record.epoch:  # nothing has been decided yet
    elected = _elect_revision([hello for _, hello in state.pending])
    if elected is None:
      return state, []  # a tie, which a peer that joins or leaves may break
    revision, digest, committed = elected
    state = state._replace(record=record._replace(
      revision=revision, digest=digest, committed=committed
    ))
  elif not any(
    _has_newest_revision(hello, record) for _, hello in state.pending
  ):
    return state, []  # wait for a peer that holds the newest revision
  return _propose_epoch(state._replace(holders=frozenset()), there)


def _elect_revision(hellos: list[m.Hello]) -> tuple[int, Digest, int] | None:
  """Returns (newest revision, its most frequent digest, epoch of its vote).

  They are of the shared states that the peers' ``hellos`` report.

  The epoch is that in which a peer voted for the revision without receiving the
  outcome of the vote; 0 if there is no such peer. If several digests are most
  frequent, the result is None. In revision 0 the smallest of them is chosen,
  since no committed round depends on it.
  """
  newest = max(hello.revision for hello in hellos)
  found = _most_frequent(
    [hello.digest for hello in hellos if hello.revision == newest]
  )
  if len(found) > 1 and newest:
    return None
  digest = min(found)
  votes = [hello.voted for hello in hellos if hello.voted is not None]
  return newest, digest, max([0, *(
    vote.epoch for vote in votes
    if (vote.round + 1, vote.digest) == (newest, digest)
  )])


def _most_frequent(digests: Iterable[Digest]) -> list[Digest]:
  """Returns the most frequent digests; several if there is a tie."""
  counts = Counter(digests)
  most = max(counts.values())
  return [digest for digest, count in counts.items() if count == most]


def _has_newest_revision(hello: m.Hello, record: Record) -> bool:
  """Returns whether a peer holds the newest revision of the shared state.

  ``record`` names that revision. A peer that voted for it holds it, too, as the
  result of a round, and applies the result when it receives the outcome of the
  vote.
  """
  return (hello.revision, hello.digest) == (
    record.revision, record.digest
  ) or hello.voted == m.Vote(
    record.committed, record.revision - 1, record.digest
  )


def _propose_epoch(
  state: CoordinatorState, members: Iterable[Id]
) -> tuple[CoordinatorState, Effects]:
  """Proposes a new epoch with these members.

  A round that is still running is not committed.
  """
  record, before = state.record, state.record.members
  # Peers ignore epochs up to their own, which is above that of this journal if
  # the journal has been lost or replaced by an older copy.
  received = (min(hello.epoch, _MAX_EPOCH) for _, hello in state.pending)
  newest = max(record.epoch, *received, 0)
  record = record._replace(epoch=newest + 1, members=(*sorted(members),))
  # New peers that hold the newest revision can serve it to other members.
  came = {
    peer for peer, hello in state.pending if _has_newest_revision(hello, record)
  }
  state = CoordinatorState(
    record, Phase.FORMING,
    tuple(entry for entry in state.pending if entry[0] not in record.members),
    holders=(state.holders | came).intersection(record.members),
    wrong=state.wrong, disputed=state.disputed,
  )
  if not state.holders:  # close all; peers reconnect and wait for a holder
    state = CoordinatorState(state.record, pending=state.pending, late=True)
    return state, [record, *(m.Close(peer) for peer in before)]
  prepare = _prepare_message(state)
  return state, [record, *(Send(peer, prepare) for peer in record.members)]


def _prepare_message(state: CoordinatorState) -> m.Prepare:
  record = state.record
  return m.Prepare(
    record.epoch, record.members, record.revision, record.committed,
    record.digest, (*sorted(state.holders),), state.disputed,
  )


def _go_message(state: CoordinatorState) -> m.Go:
  record = state.record
  return m.Go(
    record.epoch, record.revision, record.digest, (*sorted(state.holders),)
  )


def _start_message(state: CoordinatorState) -> m.Start:
  record = state.record
  return m.Start(record.epoch, record.revision, state.contributors)


def failed_pairs(
  state: CoordinatorState, sender: Id, message: Any
) -> set[PeerPair]:
  """Returns all connections of an epoch that members report as failed.

  Args:
    state: State with the failed connections that are known already.
    sender: Member that sent the message.
    message: Any message to a coordinator; `Unreachable` adds connections.
  """
  failed = set(state.failed)
  if isinstance(message, m.Unreachable):
    failed |= {(sender, peer) for peer in message.peers}
    failed |= {(peer, sender) for peer in message.absent}
  members = {*state.record.members}
  return {(a, b) for a, b in failed if a != b and {a, b} <= members}


def _handle_unreachable(
  state: CoordinatorState, sender: Id, message: m.Unreachable, rules: Rules
) -> tuple[CoordinatorState, Effects]:
  """Records the failed connections that a member has reported."""
  if state.phase is not Phase.FORMING:
    return state, []
  failed = failed_pairs(state, sender, message)
  if not failed:  # the sender names no other member, so cannot be prepared
    return _remove_peer(state, sender, rules)
  return _drop_culprits(state._replace(
    failed=frozenset(failed), reporters=state.reporters | {sender}
  ), rules)


def _drop_culprits(
  state: CoordinatorState, rules: Rules
) -> tuple[CoordinatorState, Effects]:
  """Drops members so that the others can all connect to each other.

  It waits for reports from both ends of each failed connection, since a single
  report does not show which end is at fault.
  """
  involved = {peer for pair in state.failed for peer in pair}
  if not involved or not involved <= state.ready | state.reporters:
    return state, []
  return _continue_without(state, reachability.culprits(state.failed), rules)


def _handle_prepared(
  state: CoordinatorState, sender: Id, rules: Rules
) -> tuple[CoordinatorState, Effects]:
  """Opens the first round of an epoch once all members are prepared."""
  if state.phase is not Phase.FORMING:
    return state, []
  state = state._replace(
    ready=state.ready | {sender}, holders=state.holders | {sender}
  )
  if not state.ready.issuperset(state.record.members):
    return _drop_culprits(state, rules)
  return _open_round(state)


def _open_round(state: CoordinatorState) -> tuple[CoordinatorState, Effects]:
  """Requests contributions to the next round from all members."""
  state = state._replace(
    phase=Phase.OPEN, ready=frozenset(), reporters=frozenset(),
    contributors=(), votes=(), failed=frozenset(), late=False,
  )
  go = _go_message(state)
  return state, [Send(peer, go) for peer in state.record.members]


def _handle_ready(
  state: CoordinatorState, sender: Id, rules: Rules
) -> tuple[CoordinatorState, Effects]:
  if state.phase is not Phase.OPEN:
    return state, []
  state = state._replace(
    ready=state.ready | {sender}, holders=state.holders | {sender}
  )
  return _start_round_if_ready(state, rules)


def _start_round_if_ready(state: CoordinatorState, rules: Rules) -> tuple[
  CoordinatorState, Effects
]:
  """Starts a round, or an epoch with pending peers, once members are ready.

  A round starts when all members are ready, or when at least `Rules.quorum`
  members are and the grace time is over.
  """
  record = state.record
  missing = len(record.members) - len(state.ready)
  few = not rules.quorum or len(state.ready) < rules.quorum
  if missing and (few or not state.late):
    # The grace timer starts when the number of ready members equals the quorum.
    waits = not few and len(state.ready) == rules.quorum
    grace = m.Grace(record.epoch, record.revision)
    return state, [m.Arm(grace)] if waits else []
  came = {peer for peer, _ in state.pending} - state.wrong
  if came:  # members keep their contributions for the first round of the epoch
    return _propose_epoch(state, {*record.members, *came})
  contributors = tuple(p for p in record.members if p in state.ready)
  state = state._replace(phase=Phase.RUNNING, contributors=contributors)
  return state, [Send(peer, _start_message(state)) for peer in contributors]


def _handle_vote(
  state: CoordinatorState, sender: Id, digest: Digest | None, rules: Rules
) -> tuple[CoordinatorState, Effects]:
  """Records a vote; commits the round if all contributors agree."""
  if state.phase is not Phase.RUNNING or sender not in state.contributors:
    return state, []
  record = state.record
  if digest is None:  # one failure ends the attempt; retry in a new epoch
    return _propose_epoch(state, record.members)
  # A repeated vote of a contributor replaces its former one.
  votes = {**dict(state.votes), sender: digest}
  state = state._replace(votes=tuple(sorted(votes.items())))
  if len(votes) < len(state.contributors):
    return state, []
  # All contributors must have computed the same bits.
  chosen, *rivals = _most_frequent(votes.values())
  if rivals:
    return _handle_dispute(state)
  wrong = {peer for peer, digest in votes.items() if digest != chosen}
  if wrong:  # drop the minority
    return _continue_without(
      state._replace(wrong=state.wrong | wrong), wrong, rules
    )
  record = record._replace(
    # The commit: the record is written before any peer receives `Go`.
    revision=record.revision + 1, committed=record.epoch, digest=chosen
  )
  state, effects = _open_round(
    state._replace(
      record=record, holders=frozenset(state.contributors), wrong=frozenset(),
      disputed=False,
    )
  )
  return state, [record, *effects]


def _handle_dispute(state: CoordinatorState) -> tuple[
  CoordinatorState, Effects
]:
  """Repeats a round without a majority of votes; at the second time, ends it.

  Before the repetition, each member computes the digest of its current revision
  again, and fetches the revision if its memory has changed. If the votes still
  have no majority, all members are stopped.
  """
  record = state.record
  if not state.disputed:
    return _propose_epoch(state._replace(disputed=True), record.members)
  voted = ", ".join(
    f"{peer}: {str(digest)[:8]}" for peer, digest in state.votes
  )
  stop = m.Stop((
    f"round {record.revision} has two results without a majority, computed "
    f"twice from the same verified revision; digests: {voted}"
  )[:m.MAX_CHARS])
  ended = CoordinatorState(record, pending=state.pending, late=True)
  return ended, [Send(peer, stop) for peer in record.members]


def _remove_peer(
  state: CoordinatorState, peer: Id, rules: Rules
) -> tuple[CoordinatorState, Effects]:
  """Removes a peer, which may be alive, and continues without it."""
  pending = tuple(entry for entry in state.pending if entry[0] != peer)
  state = state._replace(pending=pending)
  # The removal of a peer that is no member does not change the epoch.
  if peer not in state.record.members or state.phase is Phase.ASSEMBLING:
    return state, [m.Close(peer)]
  return _continue_without(state, {peer}, rules)


def _continue_without(
  state: CoordinatorState, peers: set[Id], rules: Rules
) -> tuple[CoordinatorState, Effects]:
  """Proposes an epoch without some members, and closes their connections."""
  rest = [peer for peer in state.record.members if peer not in peers]
  if rest:
    state, effects = _propose_epoch(state, rest)
  else:  # continue with pending peers, if one holds the newest revision
    state, effects = _assemble(
      CoordinatorState(state.record, pending=state.pending, late=True), rules
    )
  return state, [*effects, *(m.Close(peer) for peer in sorted(peers))]
