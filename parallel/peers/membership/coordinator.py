"""State machine of the coordinator: membership and commits.

A swarm has one coordinator. It holds no tensors and is the only process that
decides, so peers that are disconnected from it cannot continue. Each decision
is in its journal before a peer is notified of it: the number and members of
each proposed epoch, and each committed round. A restarted coordinator waits for
the members of its last epoch to reconnect, and forms a new epoch from those
that do. A round that was voted on but is not in the journal is not committed.
With an empty journal it starts from the newest revision of the connected peers,
and with an epoch above all of theirs.

The protocol is the pure function `step`, without clock, socket or disk.

Source: the states of PCCL (arXiv 2505.14065), reduced. A failed attempt always
starts a new epoch (as in torchft since its pull request 183), so that messages
of different attempts cannot be confused.

Example:
  >>> from parallel.peers.membership import coordinator, messages as m
  >>> rules = coordinator.Rules(least=1)
  >>> state, _ = coordinator.started(m.Record())
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
from parallel.peers.membership.reachability import Pair

Effects = list[Any]
# Larger epochs of a `Hello` count as this one: a peer may claim any number, and
# numbers of samples, computed from epochs (`leases.draw`), must be below 2^63.
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
  """Constants of a run.

  Attributes:
    least: Number of peers that the first epoch requires.
    quorum: Number of contributions with which a round starts after the grace
      time; 0 requires the contributions of all members.
  """

  least: int = 1
  quorum: int = 0


class Coordinator(NamedTuple):
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
  failed: frozenset[Pair] = frozenset()
  holders: frozenset[Id] = frozenset()
  late: bool = False
  wrong: frozenset[Id] = frozenset()
  disputed: bool = False


def started(record: Record) -> tuple[Coordinator, Effects]:
  """Returns (state, effects) of a coordinator that starts from a journal.

  Args:
    record: Last record of the journal; the default record for a new run.
  """
  effects: Effects = [m.Arm(m.Recovered())] if record.members else []
  return Coordinator(record), effects


def step(
  state: Coordinator, sender: Id | None, message: Any, rules: Rules
) -> tuple[Coordinator, Effects]:
  """Processes one message.

  Args:
    state: State before the message.
    sender: Peer that sent the message; None for the host.
    message: Any message to a coordinator.
    rules: Constants of the run.

  Returns:
    (new state, effects). The host executes the effects in this order.
  """
  record = state.record
  if isinstance(message, m.Silent):
    return _lost(state, message.peer, rules)
  if isinstance(message, m.Leave):
    return _lost(state, sender, rules)
  # No longer wait for all former members.
  if isinstance(message, m.Recovered):
    return _assemble(state._replace(late=True), rules)
  if isinstance(message, m.Grace):
    # A timer of an earlier round is stale.
    now = state.phase is Phase.OPEN and message == (
      record.epoch, record.revision
    )
    return _begin(state._replace(late=True), rules) if now else (state, [])
  if isinstance(message, m.Hello):
    return _hello(state, sender, message, rules)
  # Messages of former members and of earlier epochs are stale.
  if (
    sender not in record.members or message.epoch != record.epoch
    or state.phase is Phase.ASSEMBLING
  ):
    return state, []
  if isinstance(message, m.Prepared):
    return _prepared(state, sender, rules)
  if isinstance(message, m.Unreachable):
    return _unreachable(state, sender, message, rules)
  # Round r starts from revision r, so this message belongs to another round.
  if message.round != record.revision:
    return state, []
  if isinstance(message, m.Ready):
    return _ready(state, sender, rules)
  assert isinstance(message, m.Vote), message
  return _vote(state, sender, message.digest, rules)


def _hello(
  state: Coordinator, sender: Id, hello: m.Hello, rules: Rules
) -> tuple[Coordinator, Effects]:
  """Queues a peer for admission, or resends what a member may have missed."""
  record = state.record
  if record.epoch and hello.revision > record.revision:
    # Admission would discard its rounds. Nor may it replace the group's state:
    # any peer could claim to have the newest one.
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
      return state, [Send(sender, _prepare(state))]
    effects: Effects = [Send(sender, _go(state))]
    if state.phase is Phase.RUNNING and sender in state.contributors:
      effects.append(Send(sender, _start(state)))
    return state, effects
  others = [entry for entry in state.pending if entry[0] != sender]
  # A repeated Hello replaces the former one.
  state = state._replace(pending=tuple(sorted([*others, (sender, hello)])))
  state, effects = _assemble(state, rules)
  return state, [m.Watch(sender), *effects]


def _assemble(
  state: Coordinator, rules: Rules
) -> tuple[Coordinator, Effects]:
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
    elected = _elected([hello for _, hello in state.pending])
    if elected is None:
      return state, []  # a tie; a peer that joins or leaves may break it
    revision, digest, committed = elected
    state = state._replace(record=record._replace(
      revision=revision, digest=digest, committed=committed
    ))
  elif not any(_holds(hello, record) for _, hello in state.pending):
    return state, []  # wait for a peer that holds the newest revision
  return _form(state._replace(holders=frozenset()), there)


def _elected(hellos: list[m.Hello]) -> tuple[int, Digest, int] | None:
  """Returns (newest revision, its most frequent digest, its epoch or 0).

  The epoch is known from a peer that voted for the revision and has not
  received the outcome of the vote.

  The result is None if several digests are equally frequent. In revision 0 the
  smallest of them is chosen, since no committed round depends on it.
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


def _holds(hello: m.Hello, record: Record) -> bool:
  """Returns whether a peer holds the newest revision.

  A peer whose vote made that revision holds its result, and applies it when it
  receives the outcome.
  """
  return (hello.revision, hello.digest) == (
    record.revision, record.digest
  ) or hello.voted == m.Vote(
    record.committed, record.revision - 1, record.digest
  )


def _form(
  state: Coordinator, members: Iterable[Id]
) -> tuple[Coordinator, Effects]:
  """Proposes an epoch; a round running in the last one is not committed."""
  record, before = state.record, state.record.members
  # Peers ignore epochs up to their own, which is above that of this journal if
  # the journal has been lost or replaced by an older copy.
  received = (min(hello.epoch, _MAX_EPOCH) for _, hello in state.pending)
  newest = max(record.epoch, *received, 0)
  record = record._replace(epoch=newest + 1, members=(*sorted(members),))
  # Peers that hold the newest revision can serve it to the others.
  came = {peer for peer, hello in state.pending if _holds(hello, record)}
  state = Coordinator(
    record, Phase.FORMING,
    tuple(entry for entry in state.pending if entry[0] not in record.members),
    holders=(state.holders | came).intersection(record.members),
    wrong=state.wrong, disputed=state.disputed,
  )
  if not state.holders:  # close all; peers reconnect and wait for a holder
    state = Coordinator(state.record, pending=state.pending, late=True)
    return state, [record, *(m.Close(peer) for peer in before)]
  prepare = _prepare(state)
  return state, [record, *(Send(peer, prepare) for peer in record.members)]


def _prepare(state: Coordinator) -> m.Prepare:
  record = state.record
  return m.Prepare(
    record.epoch, record.members, record.revision, record.committed,
    record.digest, (*sorted(state.holders),), state.disputed,
  )


def _go(state: Coordinator) -> m.Go:
  record = state.record
  return m.Go(
    record.epoch, record.revision, record.digest, (*sorted(state.holders),)
  )


def _start(state: Coordinator) -> m.Start:
  record = state.record
  return m.Start(record.epoch, record.revision, state.contributors)


def failed_pairs(state: Coordinator, sender: Id, message: Any) -> set[Pair]:
  """Returns the known failed connections of an epoch and those of a message.

  Args:
    state: State before the message.
    sender: Member that sent it.
    message: Any message to a coordinator.
  """
  failed = set(state.failed)
  if isinstance(message, m.Unreachable):
    failed |= {(sender, peer) for peer in message.peers}
    failed |= {(peer, sender) for peer in message.absent}
  members = {*state.record.members}
  return {(a, b) for a, b in failed if a != b and {a, b} <= members}


def _unreachable(
  state: Coordinator, sender: Id, message: m.Unreachable, rules: Rules
) -> tuple[Coordinator, Effects]:
  """Records failed connections of a member."""
  if state.phase is not Phase.FORMING:
    return state, []
  failed = failed_pairs(state, sender, message)
  if not failed:  # names no other member: it cannot be prepared
    return _lost(state, sender, rules)
  return _judged(state._replace(
    failed=frozenset(failed), reporters=state.reporters | {sender}
  ), rules)


def _judged(
  state: Coordinator, rules: Rules
) -> tuple[Coordinator, Effects]:
  """Drops members that others cannot reach, once all involved have reported.

  A single report does not show which end of a connection is at fault.
  """
  involved = {peer for pair in state.failed for peer in pair}
  if not involved or not involved <= state.ready | state.reporters:
    return state, []
  return _without(state, reachability.culprits(state.failed), rules)


def _prepared(
  state: Coordinator, sender: Id, rules: Rules
) -> tuple[Coordinator, Effects]:
  """Opens the first round of an epoch once all members are prepared."""
  if state.phase is not Phase.FORMING:
    return state, []
  state = state._replace(
    ready=state.ready | {sender}, holders=state.holders | {sender}
  )
  if not state.ready.issuperset(state.record.members):
    return _judged(state, rules)
  return _open(state)


def _open(state: Coordinator) -> tuple[Coordinator, Effects]:
  """Requests contributions to the next round from all members."""
  state = state._replace(
    phase=Phase.OPEN, ready=frozenset(), reporters=frozenset(),
    contributors=(), votes=(), failed=frozenset(), late=False,
  )
  go = _go(state)
  return state, [Send(peer, go) for peer in state.record.members]


def _ready(
  state: Coordinator, sender: Id, rules: Rules
) -> tuple[Coordinator, Effects]:
  if state.phase is not Phase.OPEN:
    return state, []
  state = state._replace(
    ready=state.ready | {sender}, holders=state.holders | {sender}
  )
  return _begin(state, rules)


def _begin(state: Coordinator, rules: Rules) -> tuple[Coordinator, Effects]:
  """Starts a round once enough members are ready; admits pending peers first.

  A round starts when all members are ready, or when at least `Rules.quorum`
  members are and the grace time is over.
  """
  record = state.record
  missing = len(record.members) - len(state.ready)
  few = not rules.quorum or len(state.ready) < rules.quorum
  if missing and (few or not state.late):
    # The grace timer starts once: when the quorum is reached exactly.
    waits = not few and len(state.ready) == rules.quorum
    grace = m.Grace(record.epoch, record.revision)
    return state, [m.Arm(grace)] if waits else []
  came = {peer for peer, _ in state.pending} - state.wrong
  if came:  # members keep their contributions for the first round of the epoch
    return _form(state, {*record.members, *came})
  contributors = tuple(p for p in record.members if p in state.ready)
  state = state._replace(phase=Phase.RUNNING, contributors=contributors)
  return state, [Send(peer, _start(state)) for peer in contributors]


def _vote(
  state: Coordinator, sender: Id, digest: Digest | None, rules: Rules
) -> tuple[Coordinator, Effects]:
  """Records a vote; commits the round if all contributors agree."""
  if state.phase is not Phase.RUNNING or sender not in state.contributors:
    return state, []
  record = state.record
  if digest is None:  # one failure ends the attempt; retry in a new epoch
    return _form(state, record.members)
  # A repeated vote of a contributor replaces its former one.
  votes = {**dict(state.votes), sender: digest}
  state = state._replace(votes=tuple(sorted(votes.items())))
  if len(votes) < len(state.contributors):
    return state, []
  # All contributors must have computed the same bits.
  chosen, *rivals = _most_frequent(votes.values())
  if rivals:
    return _disputed(state)
  wrong = {peer for peer, digest in votes.items() if digest != chosen}
  if wrong:  # drop the minority
    return _without(
      state._replace(wrong=state.wrong | wrong), wrong, rules
    )
  record = record._replace(
    # The commit: the record is written before any peer receives `Go`.
    revision=record.revision + 1, committed=record.epoch, digest=chosen
  )
  state, effects = _open(
    state._replace(
      record=record, holders=frozenset(state.contributors), wrong=frozenset(),
      disputed=False,
    )
  )
  return state, [record, *effects]


def _disputed(state: Coordinator) -> tuple[Coordinator, Effects]:
  """Repeats a round without a majority of votes, or ends all members.

  Before the repetition each member computes the digest of its revision, on
  which all had agreed, again. A member whose memory has changed fetches the
  revision. Further different votes cannot be decided.
  """
  record = state.record
  if not state.disputed:
    return _form(state._replace(disputed=True), record.members)
  voted = ", ".join(
    f"{peer}: {str(digest)[:8]}" for peer, digest in state.votes
  )
  stop = m.Stop((
    f"round {record.revision} has two results without a majority, computed "
    f"twice from the same verified revision; digests: {voted}"
  )[:m.MAX_CHARS])
  ended = Coordinator(record, pending=state.pending, late=True)
  return ended, [Send(peer, stop) for peer in record.members]


def _lost(
  state: Coordinator, peer: Id, rules: Rules
) -> tuple[Coordinator, Effects]:
  """Removes a peer, which may be alive, and continues without it."""
  pending = tuple(entry for entry in state.pending if entry[0] != peer)
  state = state._replace(pending=pending)
  # Not a member: its removal does not change the epoch.
  if peer not in state.record.members or state.phase is Phase.ASSEMBLING:
    return state, [m.Close(peer)]
  return _without(state, {peer}, rules)


def _without(
  state: Coordinator, peers: set[Id], rules: Rules
) -> tuple[Coordinator, Effects]:
  """Forms an epoch of the remaining members, and closes removed peers."""
  rest = [peer for peer in state.record.members if peer not in peers]
  if rest:
    state, effects = _form(state, rest)
  else:  # continue with any peers that hold the newest revision
    state, effects = _assemble(
      Coordinator(state.record, pending=state.pending, late=True), rules
    )
  return state, [*effects, *(m.Close(peer) for peer in sorted(peers))]
