"""Exhaustive search of the protocol in small worlds, also with faults in it."""

import dataclasses
import pathlib
import types

import pytest

from parallel.peers.membership import coordinator, peer, search
from parallel.peers.membership import messages as m
from parallel.peers.membership.coordinator import Rules
from parallel.peers.membership.transitions import Model
from parallel.peers.membership.world import (
  FaultBudget,
  ProtocolModules,
  SearchBounds,
)

pytestmark = pytest.mark.quick

# Worlds that take a few seconds; configs/elastic/protocol.py has larger ones.
_WORLDS = {
  "nothing": SearchBounds(3, 1, FaultBudget(), Rules(3)),
  "killed": SearchBounds(2, 2, FaultBudget(crashes=1, leaves=1), Rules(2)),
  "cut": SearchBounds(2, 2, FaultBudget(cuts=1, copies=1), Rules(2)),
  "coordinator": SearchBounds(2, 1, FaultBudget(restarts=1, halts=1), Rules(2)),
  "journal lost": SearchBounds(
    2, 1, FaultBudget(restarts=1, losses=1), Rules(2)
  ),
  "suspected": SearchBounds(2, 1, FaultBudget(suspicions=1), Rules(2)),
  "failed": SearchBounds(2, 1, FaultBudget(failures=1, crashes=1), Rules(2)),
  "unheard": SearchBounds(2, 1, FaultBudget(cuts=1, failures=1), Rules(2)),
  "late": SearchBounds(2, 2, FaultBudget(crashes=1), Rules(2, quorum=1)),
  "void": SearchBounds(2, 2, FaultBudget(voids=1), Rules(2, quorum=1)),
}


@pytest.mark.parametrize("name", _WORLDS)
def test_every_reachable_state_keeps_the_invariants_and_can_progress(name):
  found = search.search(_WORLDS[name])
  assert found.complete
  assert not found.problem, "\n".join(found.trace)
  assert found.states > 50


# Fault: module, original text, replacement, world, and violated invariant.
_CUT, _LOST = FaultBudget(cuts=1), FaultBudget(restarts=1, losses=1)
_FAULTS = {
  "a round is committed before all votes": (
    coordinator, "if len(votes) < len(state.contributors):", "if not votes:",
    SearchBounds(2, 1, FaultBudget(crashes=1), Rules(2)), "",
  ),
  "a commit is not written": (
    coordinator, "return state, [record, *effects]", "return state, effects",
    SearchBounds(2, 1, FaultBudget(), Rules(2)),
    "a peer applies an uncommitted round",
  ),
  "an empty journal starts with the first epoch": (
    coordinator, "max(record.epoch, *received, 0)", "record.epoch",
    SearchBounds(2, 1, _LOST, Rules(2)), "no run can complete",
  ),
  "a failed round keeps the epoch": (
    coordinator, "epoch=newest + 1",
    "epoch=newest + (record.members != (*sorted(members),))",
    SearchBounds(2, 1, FaultBudget(failures=1), Rules(2)),
    "no run can complete",
  ),
  "a contribution that may be counted is kept": (
    peer, "keep = message.revision == state.revision", "keep = True",
    SearchBounds(2, 2, FaultBudget(suspicions=1), Rules(2)),
    "a contribution that was counted is kept",
  ),
  "a committed result is dropped": (
    peer, "vote.epoch, vote.round + 1, vote.digest", "vote.epoch, -1, ''",
    SearchBounds(2, 1, FaultBudget(suspicions=1), Rules(2)), "",
  ),
  "a lost vote is not resent": (
    peer, "return state, [Send(None, state.voted)]", "return state, []",
    SearchBounds(2, 1, _CUT, Rules(2)), "no run can complete",
  ),
  "a returning member gets no reply": (
    coordinator, "    return state, effects\n  others = [",
    "    return state, []\n  others = [",
    SearchBounds(2, 1, _CUT, Rules(2)), "no run can complete",
  ),
  "an epoch starts without the newest revision": (
    coordinator, "if not state.holders:", "if False:",
    SearchBounds(2, 1, FaultBudget(suspicions=1), Rules(1)),
    "no run can complete",
  ),
  "a joining peer is forgotten": (
    coordinator,
    "tuple(entry for entry in state.pending if entry[0] not in record.members)",
    "()", SearchBounds(2, 1, FaultBudget(failures=1), Rules(1)),
    "no run can complete",
  ),
  "a message of another epoch is accepted": (
    coordinator, " or message.epoch != record.epoch", "",
    SearchBounds(2, 1, FaultBudget(suspicions=1), Rules(2)),
    "a peer has uncommitted content",
  ),
  "a peer continues alone after its vote": (
    peer,
    "return state._replace(phase=Phase.HALTED), [m.Halt()]",
    "return _applied(state) if state.voted else (state, [])",
    SearchBounds(2, 1, FaultBudget(cuts=1, halts=1), Rules(2)),
    "a peer applies an uncommitted round",
  ),
  "missing members are not waited for": (
    coordinator, "[m.Arm(m.Recovered())] if record.members else []", "[]",
    SearchBounds(2, 1, FaultBudget(restarts=1, halts=1), Rules(2)),
    "no run can complete",
  ),
  "a silent peer is dropped without notice": (
    coordinator, "return state, [m.Close(peer)]", "return state, []",
    SearchBounds(2, 1, FaultBudget(suspicions=1), Rules(2)),
    "no run can complete",
  ),
}


def _broken(module, text, replacement):
  source = pathlib.Path(module.__file__).read_text()
  assert source.count(text) == 1, text
  copy = types.ModuleType(module.__name__)
  exec(compile(source.replace(text, replacement), "broken", "exec"),
       copy.__dict__)
  return copy


@pytest.mark.parametrize("name", _FAULTS)
def test_fault_is_found_with_a_shortest_trace(name):
  module, text, replacement, bounds, problem = _FAULTS[name]
  which = module.__name__.rsplit(".", 1)[1]
  protocol = ProtocolModules()._replace(
    **{which: _broken(module, text, replacement)}
  )
  bounds = dataclasses.replace(bounds, most=40_000)  # some are unbounded
  found = search.search(bounds, protocol)
  assert found.problem
  assert problem in found.problem
  assert found.trace
  # The trace leads from the first state to the violation.
  model = Model(bounds, protocol)
  worlds, steps = {model.first()}, []
  for event in found.trace:
    steps = [
      (world, result) for world in worlds
      for what, _, result in model.successors(world) if what == event
    ]
    worlds = {result for _, result in steps if not isinstance(result, str)}
  assert steps
  assert found.problem in {
    result if isinstance(result, str)
    else model.violation(world, result) or "no run can complete"
    for world, result in steps
  }
  assert not search.search(bounds).problem


def test_no_state_is_chosen_while_as_many_peers_have_another():
  """A start from one of two resumed states would discard the other one."""
  state, rules = coordinator.CoordinatorState(), coordinator.Rules(least=2)
  epochs = []
  for who, digest in (("a", "0a"), ("b", "0b"), ("c", "0b")):
    hello = m.Hello(0, 7, digest, None)
    state, _ = coordinator.step(state, who, hello, rules)
    epochs.append(state.record.epoch)
  assert epochs == [0, 0, 1]
  assert (state.record.revision, state.record.digest) == (7, "0b")


@pytest.mark.parametrize(("vote", "epoch"), [
  (m.Vote(5, 6, "0a"), 5), (m.Vote(5, 5, "0a"), 0), (m.Vote(5, 6, "0b"), 0),
  (m.Vote(5, 6, None), 0),
])
def test_empty_journal_recovers_the_epochs_of_peers(vote, epoch):
  """Epochs of the newest revision and of all peers, one of which claims any."""
  state, rules = coordinator.CoordinatorState(), coordinator.Rules(least=3)
  for who, hello in (
    ("a", m.Hello(5, 7, "0a", None)), ("b", m.Hello(9, 6, "00", vote)),
    ("c", m.Hello(2**62, 6, "00", None)),
  ):
    state, _ = coordinator.step(state, who, hello, rules)
  record = state.record
  assert (record.revision, record.digest) == (7, "0a")
  assert (record.committed, record.epoch) == (epoch, 2**32 + 1)
  assert state.holders == ({"a", "b"} if epoch else {"a"})


@pytest.mark.parametrize("digests", [("0a", "0b"), ("0b", "0a", "0c")])
def test_votes_without_a_majority_are_repeated_once_from_verified_states(
  digests
):
  peers, rules = "abc"[: len(digests)], coordinator.Rules(least=len(digests))
  state = coordinator.CoordinatorState()

  def run(*said):
    nonlocal state
    effects = []
    for sender, message in said:
      state, more = coordinator.step(state, sender, message, rules)
      effects += [x for x in more if isinstance(x, m.Send)]
    return effects

  def attempt(epoch, number, votes):
    return run(
      *((who, m.Prepared(epoch)) for who in peers),
      *((who, m.Ready(epoch, number)) for who in peers),
      *((who, m.Vote(epoch, number, vote))
        for who, vote in zip(peers, votes, strict=True)),
    )

  run(*((who, m.Hello(0, 0, "", None)) for who in peers))
  said = attempt(1, 0, digests)[-len(peers) :]
  assert {x.to for x in said} == {*peers}
  assert {x.message.verify for x in said} == {True}
  assert state.record.members == tuple(peers)
  attempt(2, 0, ["0d"] * len(peers))
  assert (state.record.revision, state.record.digest) == (1, "0d")
  # Another round: a second disagreement ends all members, and no digest wins.
  run(*((who, m.Ready(2, 1)) for who in peers))
  run(*((who, m.Vote(2, 1, vote))
        for who, vote in zip(peers, digests, strict=True)))
  stops = attempt(3, 1, digests)[-len(peers) :]
  assert [type(x.message) for x in stops] == [m.Stop] * len(peers)
  assert state.record.revision == 1
  assert "two results without a majority" in stops[0].message.text


def test_peer_with_wrong_vote_is_readmitted_after_a_round_without_it():
  """The peer keeps its part until a newer revision, and repeats its vote."""
  state, rules = coordinator.CoordinatorState(), coordinator.Rules(least=3)
  said = [(who, m.Hello(0, 0, "", None)) for who in "abc"]
  said += [(who, m.Prepared(1)) for who in "abc"]
  said += [(who, m.Ready(1, 0)) for who in "abc"]
  said += [(who, m.Vote(1, 0, "0b" if who == "c" else "0a")) for who in "abc"]
  said += [("c", m.Hello(1, 0, "", m.Vote(1, 0, "0b")))]
  said += [(who, m.Prepared(2)) for who in "ab"]
  said += [(who, m.Ready(2, 0)) for who in "ab"]
  members = []
  for sender, message in said:
    state, _ = coordinator.step(state, sender, message, rules)
  assert state.record.members == ("a", "b")
  assert state.phase is coordinator.Phase.RUNNING
  for message in (m.Vote(2, 0, "0a"), m.Ready(2, 1)):
    for who in "ab":
      state, _ = coordinator.step(state, who, message, rules)
      members.append(state.record.members)
  assert members == [("a", "b")] * 3 + [("a", "b", "c")]
