"""Dropped members and refused peers, if some cannot reach others."""

import itertools
import random

import pytest

from parallel.peers.membership import coordinator
from parallel.peers.membership import messages as m
from parallel.peers.membership.coordinator import Phase, Rules
from parallel.peers.membership.reachability import (
  AdmissionCandidates,
  culprits,
  reason,
)

pytestmark = pytest.mark.quick
HELLO = m.Hello(0, 0, "", None)


@pytest.mark.parametrize("seed", range(20))
def test_remaining_peers_reach_each_other(seed):
  rng = random.Random(seed)
  pairs = list(itertools.permutations("abcdef", 2))
  for _ in range(50):
    failed = set(rng.sample(pairs, rng.randrange(8)))
    kept = set(rng.sample("abcdef", rng.randrange(3)))
    found = culprits(failed, kept)
    assert not found & kept
    for a, b in failed:
      assert {a, b} & found or {a, b} <= kept
    assert not culprits({p for p in failed if not found & {*p}}, kept)


@pytest.mark.parametrize("name", ["a", "c", "e"])
def test_peer_that_others_cannot_reach_is_the_culprit_whatever_it_reports(name):
  """Whatever its age, and also among two."""
  others = set("abcde") - {name}
  failed = {(other, name) for other in others}
  for reported in ((), others, [min(others)]):
    assert culprits(failed | {(name, x) for x in reported}) == {name}
  assert culprits({("b", name)}) == {name}
  # With equal evidence it is the youngest, or the one the coordinator doubts.
  both = {("x", "y"), ("y", "x")}
  assert culprits(both) == {"y"}
  assert culprits(both, doubted={"x"}) == {"x"}


def test_reason_names_peers_in_both_directions():
  failed = {(p, "x") for p in "abcde"} | {("x", "a")}
  assert reason("x", failed) == (
    "a, b, c and 2 more cannot reach it; it cannot reach a"
  )
  assert reason("y", failed) == ""


def _formed(peers, rules):
  """Returns a coordinator whose members form an epoch."""
  state, _ = coordinator.initial_state(m.Record())
  for peer in peers:
    state, _ = coordinator.step(state, peer, HELLO, rules)
  assert state.phase is Phase.FORMING
  return state


def _reports(direction):
  """Returns what each member reports if x cannot be reached, or cannot dial."""
  others = ("a", "b", "z")
  if direction == "in":
    return {
      **{p: m.Unreachable(1, ("x",)) for p in others},
      "x": m.Unreachable(1, (), others),
    }
  if direction == "out":
    return {
      **{p: m.Unreachable(1, (), ("x",)) for p in others},
      "x": m.Unreachable(1, others),
    }
  return {
    **{p: m.Unreachable(1, ("x",)) for p in others},
    "x": m.Unreachable(1, others),
  }


@pytest.mark.parametrize("direction", ["in", "out", "both"])
def test_unreachable_member_is_dropped_in_any_order_of_reports(direction):
  """The youngest member, z, is kept."""
  rules = Rules(least=4)
  for order in itertools.permutations("abxz"):
    state = _formed("abxz", rules)
    for peer in order:
      assert state.record.members == ("a", "b", "x", "z")
      state, effects = coordinator.step(
        state, peer, _reports(direction)[peer], rules
      )
    assert state.record.members == ("a", "b", "z")
    assert state.failed == state.reporters == frozenset()
    assert m.Close("x") in effects


def test_report_is_judged_when_the_others_involved_have_answered():
  rules = Rules(least=3)
  state = _formed("abz", rules)
  state, _ = coordinator.step(state, "a", m.Unreachable(1, ("z",)), rules)
  state, _ = coordinator.step(state, "b", m.Prepared(1), rules)
  assert state.record.members == ("a", "b", "z")
  # z was connected, so the report of a is the only evidence.
  state, _ = coordinator.step(state, "z", m.Prepared(1), rules)
  assert state.record.members == ("a", "b")


def test_dead_member_is_dropped_and_no_reporter():
  rules = Rules(least=3)
  state = _formed("abz", rules)
  for peer in "bz":
    state, _ = coordinator.step(state, peer, m.Unreachable(1, ("a",)), rules)
  assert state.record.members == ("a", "b", "z")
  state, _ = coordinator.step(state, None, m.Silent("a"), rules)
  assert state.record.members == ("b", "z")


class _Network:
  """Coordinator's checks among peers with some unreachable ones."""

  def __init__(self, failed=()):
    self.failed = set(failed)
    self.admission = AdmissionCandidates("coordinator", 10)
    self.there, self.members, self.texts = [], [], {}
    self.now = 0.0

  def settle(self):
    """Asks and answers until nothing changes."""
    while True:
      asked = self.admission.questions(self.there, self.now)
      for dialer, targets in asked.items():
        for target in targets:
          error = "refused" if (dialer, target) in self.failed else ""
          self.admission.answered(dialer, target, error)
      found = self.admission.outcome(self.there, self.members, self.now)
      if found is None and not asked:
        return
      if found is not None:
        for peer, why in found.dropped:
          assert "cannot reach" in why
          self.there.remove(peer)
          self.admission.remove(peer)
        if found.hello is None:
          self.texts[found.peer] = found.text
        else:
          assert found.hello is HELLO
          self.there.append(found.peer)

  def join(self, *peers):
    for peer in peers:
      self.admission.add(peer, HELLO)
      self.settle()


def _unreachable(name, others=("a", "b", "c", "coordinator")):
  return {(other, name) for other in others if other != name}


@pytest.mark.parametrize("order", ["abc", "acb", "bac", "bca", "cab", "cba"])
@pytest.mark.parametrize("seen", [True, False])
def test_unreachable_peer_is_not_admitted_in_any_order(order, seen):
  """If the coordinator reaches all, the third peer decides."""
  failed = _unreachable("b")
  net = _Network(failed - {("coordinator", "b")} if seen else failed)
  net.join(*order)
  assert sorted(net.there) == ["a", "c"]
  for _ in range(3):  # a dropped peer connects again
    if "b" not in net.admission:
      net.join("b")
    net.now += 100
    net.settle()
    assert sorted(net.there) == ["a", "c"]
  assert "cannot reach it" in net.texts["b"]


def test_candidate_does_not_remove_a_member():
  net = _Network(_unreachable("a"))
  net.join("a")
  net.members = ["a"]
  net.join("b", "c")
  assert net.there == ["a"]
  assert net.texts == {p: "it cannot reach a" for p in "bc"}
  # As soon as the member has left, the others are checked again.
  net.there.clear()
  net.members.clear()
  net.settle()
  assert sorted(net.there) == ["b", "c"]


def test_reachable_again_is_admitted_after_a_pause():
  net = _Network(_unreachable("b"))
  net.join("a", "b")
  assert (net.there, [*net.admission]) == (["a"], ["b"])
  assert net.texts == {"b": "a, coordinator cannot reach it"}
  net.failed.clear()
  net.settle()
  assert net.there == ["a"]
  net.now = 5.0
  net.settle()
  assert net.there == ["a", "b"]


def test_pauses_between_checks_double_and_a_reason_is_said_once():
  net = _Network(_unreachable("b"))
  net.join("a", "b")
  times, texts = [], []
  for now in range(1, 260):
    if now == 100:  # the reason changes
      net.failed.discard(("coordinator", "b"))
    asked = net.admission.questions(net.there, now)
    times += [now] * bool(asked)
    for dialer, targets in asked.items():
      for target in targets:
        error = "refused" if (dialer, target) in net.failed else ""
        net.admission.answered(dialer, target, error)
    if (found := net.admission.outcome(net.there, ["a"], now)) is not None:
      assert (found.peer, found.hello) == ("b", None)
      texts.append((now, found.text))
  assert times == [5, 15, 35, 75, 135, 195, 255]
  assert texts == [(135, "a cannot reach it")]


def test_missing_response_is_no_evidence():
  """A peer that never answers delays a candidate by the time limit."""
  admission = AdmissionCandidates("coordinator", 10)
  admission.add("b", HELLO)
  assert admission.questions(["a"], 0.0) == {
    "coordinator": ["b"], "b": ["a"], "a": ["b"]
  }
  admission.answered("b", "a", "")
  admission.answered("b", "z", "refused")  # not asked
  assert admission.outcome(["a"], ["a"], 9.9) is None
  assert admission.outcome(["a"], ["a"], 10.0).hello is HELLO


def test_candidate_that_comes_again_is_judged_by_new_answers():
  admission = AdmissionCandidates("coordinator", 10)
  pairs = ("coordinator", "b"), ("a", "b"), ("b", "a")
  admission.add("b", HELLO)
  admission.questions(["a"], 0.0)
  for pair in pairs:
    admission.answered(*pair, "refused")
  again = HELLO._replace(revision=7)
  admission.add("b", again)
  assert len(admission.questions(["a"], 1.0)) == 3
  assert admission.outcome(["a"], ["a"], 1.0) is None
  for pair in pairs:
    admission.answered(*pair, "")
  assert admission.outcome(["a"], ["a"], 1.0).hello is again


def test_member_without_a_connection_is_asked_when_it_returns():
  admission = AdmissionCandidates("coordinator", 10)
  admission.add("b", HELLO)
  admission.questions([], 0.0)
  assert admission.outcome(["a"], ["a"], 99.0) is None
  assert admission.questions(["a"], 99.0) == {"b": ["a"], "a": ["b"]}
