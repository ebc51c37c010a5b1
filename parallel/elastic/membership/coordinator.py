"""The coordinator: who is a member, and which rounds are committed.

It holds no tensors and decides alone, so peers that are cut off from it cannot
go on by themselves. There is one of it. Whatever must outlive it is in its
journal before a peer hears of it: the number and members of each epoch that it
proposes, and each round that it commits. Started again, it waits for the
members of its last epoch to come back, and forms a new one of those who do.
What was voted on and is not in the journal was not committed.

Everything is in `step`, a function without clock, socket or disk.

Source: the states of PCCL (arXiv 2505.14065), reduced. A failed attempt always
makes a new epoch (as torchft does since its pull request 183), so that no
message of one attempt can be taken for another's.
"""

from collections import Counter
from collections.abc import Iterable
import enum
from typing import Any, NamedTuple

from parallel.elastic.membership import messages as m
from parallel.elastic.membership.messages import Digest, Id, Record, Send

Effects = list[Any]


class Phase(enum.IntEnum):
  """What the coordinator waits for.

  ASSEMBLING: for peers, at the beginning or after it was started again.
  FORMING: for the members of an epoch to be prepared. OPEN: for their parts of
  the next round. RUNNING: for votes.
  """

  ASSEMBLING = 0
  FORMING = 1
  OPEN = 2
  RUNNING = 3


class Rules(NamedTuple):
  """What is fixed for a run.

  Attributes:
    least: Peers with which the first epoch begins.
    quorum: Parts with which a round begins after the grace time; 0 for those
      of all members.
  """

  least: int = 1
  quorum: int = 0


class Coordinator(NamedTuple):
  """The coordinator's state.

  Attributes:
    record: What is in the journal.
    phase: What it waits for.
    pending: Peers that are to be admitted, with their `Hello`.
    said: Members who are prepared (FORMING) or have their part (OPEN).
    contributors: Of the round that runs, in the order of their ranks.
    votes: Digests by contributor.
    holders: Members that have the newest revision.
    late: Whether the time in which others are waited for is over.
    wrong: Whose votes on the next round were not those of most: they would vote
      so again, and are admitted once it is committed without them.
  """

  record: Record = Record()
  phase: Phase = Phase.ASSEMBLING
  pending: tuple[tuple[Id, m.Hello], ...] = ()
  said: frozenset[Id] = frozenset()
  contributors: tuple[Id, ...] = ()
  votes: tuple[tuple[Id, Digest], ...] = ()
  holders: frozenset[Id] = frozenset()
  late: bool = False
  wrong: frozenset[Id] = frozenset()


def started(record: Record) -> tuple[Coordinator, Effects]:
  """Returns a coordinator with a journal, and what it does first."""
  effects: Effects = [m.Arm(m.Recovered())] if record.members else []
  return Coordinator(record), effects


def step(
  state: Coordinator, sender: Id | None, message: Any, rules: Rules
) -> tuple[Coordinator, Effects]:
  """Takes one message.

  Args:
    state: The state before.
    sender: The peer that sent it; None for the host.
    message: Any message to a coordinator.
    rules: What is fixed for the run.

  Returns:
    The state after, and what the host is to do, in this order.
  """
  record = state.record
  if isinstance(message, m.Silent):
    return _lost(state, message.peer, rules)
  if isinstance(message, m.Leave):
    return _lost(state, sender, rules)
  if isinstance(message, m.Recovered):
    return _assemble(state._replace(late=True), rules)
  if isinstance(message, m.Grace):
    now = state.phase is Phase.OPEN and message == (
      record.epoch, record.revision
    )
    return _begin(state._replace(late=True), rules) if now else (state, [])
  if isinstance(message, m.Hello):
    return _hello(state, sender, message, rules)
  if (
    sender not in record.members or message.epoch != record.epoch
    or state.phase is Phase.ASSEMBLING
  ):
    return state, []
  if isinstance(message, m.Prepared):
    return _prepared(state, sender)
  if isinstance(message, m.Unreachable):
    if state.phase is not Phase.FORMING:
      return state, []
    # Nobody knows whose fault it is: the younger one of a pair goes.
    pair = {sender, *message.peers} & {*record.members}
    return _lost(state, max(pair), rules)
  if message.round != record.revision:
    return state, []
  if isinstance(message, m.Ready):
    return _ready(state, sender, rules)
  assert isinstance(message, m.Vote), message
  return _vote(state, sender, message.digest, rules)


def _hello(
  state: Coordinator, sender: Id, hello: m.Hello, rules: Rules
) -> tuple[Coordinator, Effects]:
  """Admits a peer later, or tells a member again what it may have missed."""
  record = state.record
  if sender in record.members and state.phase is not Phase.ASSEMBLING:
    if state.phase is Phase.FORMING:
      return state, [Send(sender, _prepare(state))]
    effects: Effects = [Send(sender, _go(state))]
    if state.phase is Phase.RUNNING and sender in state.contributors:
      effects.append(Send(sender, _start(state)))
    return state, effects
  others = [entry for entry in state.pending if entry[0] != sender]
  state = state._replace(pending=tuple(sorted([*others, (sender, hello)])))
  state, effects = _assemble(state, rules)
  return state, [m.Watch(sender), *effects]


def _assemble(
  state: Coordinator, rules: Rules
) -> tuple[Coordinator, Effects]:
  """Forms an epoch of those who are there, once enough are."""
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
    revision, digest = _elected([hello for _, hello in state.pending])
    state = state._replace(
      record=record._replace(revision=revision, digest=digest)
    )
  elif not any(_holds(hello, record) for _, hello in state.pending):
    return state, []  # until somebody comes who has the newest revision
  return _form(state._replace(holders=frozenset()), there)


def _elected(hellos: Iterable[m.Hello]) -> tuple[int, Digest]:
  """Returns the newest revision, and what most have there; ties: the least."""
  votes = Counter((hello.revision, hello.digest) for hello in hellos)
  newest = max(revision for revision, _ in votes)
  most = max(n for (revision, _), n in votes.items() if revision == newest)
  return min(key for key, n in votes.items() if key[0] == newest and n == most)


def _holds(hello: m.Hello, record: Record) -> bool:
  """Returns whether a peer has the newest revision, or its result."""
  return (hello.revision, hello.digest) == (
    record.revision, record.digest
  ) or hello.voted == m.Vote(
    record.committed, record.revision - 1, record.digest
  )


def _form(
  state: Coordinator, members: Iterable[Id]
) -> tuple[Coordinator, Effects]:
  """Proposes an epoch; what ran in the last one ends without a commit."""
  record, before = state.record, state.record.members
  record = record._replace(epoch=record.epoch + 1, members=(*sorted(members),))
  came = {peer for peer, hello in state.pending if _holds(hello, record)}
  state = Coordinator(
    record, Phase.FORMING,
    tuple(entry for entry in state.pending if entry[0] not in record.members),
    holders=(state.holders | came).intersection(record.members),
    wrong=state.wrong,
  )
  if not state.holders:  # they come again, and wait for one
    state = Coordinator(state.record, pending=state.pending, late=True)
    return state, [record, *(m.Close(peer) for peer in before)]
  prepare = _prepare(state)
  return state, [record, *(Send(peer, prepare) for peer in record.members)]


def _prepare(state: Coordinator) -> m.Prepare:
  record = state.record
  return m.Prepare(
    record.epoch, record.members, record.revision, record.committed,
    record.digest, (*sorted(state.holders),),
  )


def _go(state: Coordinator) -> m.Go:
  record = state.record
  return m.Go(
    record.epoch, record.revision, record.digest, (*sorted(state.holders),)
  )


def _start(state: Coordinator) -> m.Start:
  record = state.record
  return m.Start(record.epoch, record.revision, state.contributors)


def _prepared(state: Coordinator, sender: Id) -> tuple[Coordinator, Effects]:
  if state.phase is not Phase.FORMING:
    return state, []
  state = state._replace(
    said=state.said | {sender}, holders=state.holders | {sender}
  )
  if not state.said.issuperset(state.record.members):
    return state, []
  return _open(state)


def _open(state: Coordinator) -> tuple[Coordinator, Effects]:
  """Asks all members for their parts of the next round."""
  state = state._replace(
    phase=Phase.OPEN, said=frozenset(), contributors=(), votes=(), late=False
  )
  go = _go(state)
  return state, [Send(peer, go) for peer in state.record.members]


def _ready(
  state: Coordinator, sender: Id, rules: Rules
) -> tuple[Coordinator, Effects]:
  if state.phase is not Phase.OPEN:
    return state, []
  state = state._replace(
    said=state.said | {sender}, holders=state.holders | {sender}
  )
  return _begin(state, rules)


def _begin(state: Coordinator, rules: Rules) -> tuple[Coordinator, Effects]:
  """Begins a round, or admits others first, once enough parts are there."""
  record = state.record
  missing = len(record.members) - len(state.said)
  few = not rules.quorum or len(state.said) < rules.quorum
  if missing and (few or not state.late):
    waits = not few and len(state.said) == rules.quorum
    grace = m.Grace(record.epoch, record.revision)
    return state, [m.Arm(grace)] if waits else []
  came = {peer for peer, _ in state.pending} - state.wrong
  if came:
    return _form(state, {*record.members, *came})
  contributors = tuple(p for p in record.members if p in state.said)
  state = state._replace(phase=Phase.RUNNING, contributors=contributors)
  return state, [Send(peer, _start(state)) for peer in contributors]


def _vote(
  state: Coordinator, sender: Id, digest: Digest | None, rules: Rules
) -> tuple[Coordinator, Effects]:
  if state.phase is not Phase.RUNNING or sender not in state.contributors:
    return state, []
  record = state.record
  if digest is None:
    return _form(state, record.members)
  votes = {**dict(state.votes), sender: digest}
  state = state._replace(votes=tuple(sorted(votes.items())))
  if len(votes) < len(state.contributors):
    return state, []
  counts = Counter(votes.values())
  most = max(counts.values())
  chosen = min(digest for digest, count in counts.items() if count == most)
  if len(counts) > 1:  # what most have is right; ties: the least one
    wrong = {peer for peer, digest in votes.items() if digest != chosen}
    return _without(
      state._replace(wrong=state.wrong | wrong), wrong, rules
    )
  record = record._replace(
    revision=record.revision + 1, committed=record.epoch, digest=chosen
  )
  state, effects = _open(
    state._replace(
      record=record, holders=frozenset(state.contributors), wrong=frozenset()
    )
  )
  return state, [record, *effects]


def _lost(
  state: Coordinator, peer: Id, rules: Rules
) -> tuple[Coordinator, Effects]:
  """Goes on without a peer, which may be alive."""
  pending = tuple(entry for entry in state.pending if entry[0] != peer)
  state = state._replace(pending=pending)
  if peer not in state.record.members or state.phase is Phase.ASSEMBLING:
    return state, [m.Close(peer)]
  return _without(state, {peer}, rules)


def _without(
  state: Coordinator, peers: set[Id], rules: Rules
) -> tuple[Coordinator, Effects]:
  rest = [peer for peer in state.record.members if peer not in peers]
  if rest:
    state, effects = _form(state, rest)
  else:  # whoever comes next and has the newest revision may go on
    state, effects = _assemble(
      Coordinator(state.record, pending=state.pending, late=True), rules
    )
  return state, [*effects, *(m.Close(peer) for peer in sorted(peers))]
