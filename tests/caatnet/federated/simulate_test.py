"""Faults in every phase of a round, on a simulated clock."""

import collections
import dataclasses
import random

import numpy as np
import pytest

from caatnet.federated import simulate
from caatnet.federated.simulate import Fault
from tests.caatnet.federated import numeric

SEEDS = range(100)


KINDS = ("kill", "stop", "cut", "server")


def faults(seed, kinds=KINDS):
  """Returns one to four faults in the first rounds."""
  draw = random.Random(seed)
  return [
    Fault(
      draw.uniform(0.0, 10.0), draw.choice(kinds), draw.randrange(4),
      draw.choice((0.2, 1.0, 2.5, 6.0)),
    )
    for _ in range(draw.randint(1, 4))
  ]


@pytest.mark.parametrize("policy", ["wait", "drop", "late"])
@pytest.mark.parametrize("at_once", [0, 1])
def test_every_round_ends_as_the_policy_specifies(policy, at_once):
  plain = numeric.rules(
    stragglers=policy, per_round=3, deadline_s=2.0, downlinks_at_once=at_once,
    uplinks_at_once=at_once,
  )
  limited = dataclasses.replace(plain, hang_s=5.0)
  samples = [e.sampled for e in numeric.ended(numeric.run(plain))]
  hit = collections.Counter()
  for seed in SEEDS:
    drawn = faults(seed, (*KINDS, "hang", "count"))
    rules = limited if any(f.kind == "hang" for f in drawn) else plain
    found = numeric.run(rules, drawn)
    hit.update(found.hit)
    # Clients that may be without a connection for reconnect_s; a client tries
    # to connect every 0.5 s.
    down_s = sum(f.lasts_s + 0.5 for f in drawn if f.kind == "server")
    away = {
      k for k in range(4) if down_s + sum(
        f.lasts_s for f in drawn if f.client == k and f.kind != "server"
      ) >= rules.reconnect_s
    }
    wrong = {f.client for f in drawn if f.kind == "count"}
    # Nothing hangs, and the clients of each round are those of a run without
    # faults. The round after a restart is executed again.
    assert found.state.finished == "6 rounds have ended", seed
    rounds = numeric.ended(found)
    assert [e.round for e in rounds] == list(range(6)), seed
    assert [e.sampled for e in rounds] == samples, seed
    for end in rounds:
      on_time = [k for k, r, _ in end.merged if r == end.round]
      assert set(on_time) | set(end.missing) <= set(end.sampled)
      # No client that counts correctly is refused, but for its time.
      for client, reason in end.refused:
        assert client in wrong or reason in ("late", "between rounds"), end
      if policy == "wait":
        # Only a client that was away for reconnect_s, or hangs, is missing.
        assert not end.late or rules is limited
      if not end.late:
        assert set(end.missing) <= away, (seed, end)
      assert end.duration_s <= rules.limit_s + 1e-6, (seed, end)
      if policy != "late":
        assert len(on_time) == len(end.merged)
    merged = [(k, r) for e in rounds for k, r, _ in e.merged]
    assert len(merged) == len(set(merged)), seed  # no update counts twice
  phases = {"idle", "downlink", "training", "uplink"}
  phases |= {"waiting"} if at_once else set()
  kinds = ("kill", "stop", "cut", "hang", "count")
  assert set(hit) == {(k, p) for k in kinds for p in phases}


class Counting(simulate.ConstantNetwork):
  """Keeps the transfers in progress, and the most of each direction."""

  def __init__(self):
    super().__init__(0.3, 0.4)
    self.most, self.order = {False: 0, True: 0}, []

  def start(self, time, transfer, size):
    super().start(time, transfer, size)
    self.order.append((transfer.up, transfer.client))
    for up in (False, True):
      now = sum(t.up == up for t in self._ends)
      self.most[up] = max(self.most[up], now)


@pytest.mark.parametrize(("down", "up"), [(0, 1), (1, 0), (2, 1), (1, 2)])
def test_few_clients_receive_and_send_at_once(down, up):
  network = Counting()
  rules = numeric.rules(downlinks_at_once=down, uplinks_at_once=up)
  found = numeric.run(rules, network=network)
  assert network.most[False] == (down or 4)
  assert network.most[True] <= (up or 4)
  plain = numeric.run(numeric.rules())
  np.testing.assert_array_equal(found.state.params, plain.state.params)
  if down == 1:  # the longest compute is first, from the second round on
    models = [client for sends, client in network.order if not sends]
    assert models[4:] == [3, 2, 1, 0] * 5


def test_resumed_run_has_the_same_bits():
  """If no client is lost, faults change no bit of any policy without a limit.
  """
  rules = numeric.rules(per_round=3, reconnect_s=1e6)
  expected = numeric.run(rules).state.params
  restarts = 0
  for seed in SEEDS:
    drawn = faults(seed)
    restarts += sum(f.kind == "server" for f in drawn)
    found = numeric.run(rules, drawn)
    np.testing.assert_array_equal(found.state.params, expected)
  assert restarts > 40


class Cancelling(simulate.ConstantNetwork):
  """Keeps the cancelled transfers, which have begun and not arrived."""

  def __init__(self):
    super().__init__(0.3, 0.4)
    self.cancelled = []

  def cancel(self, time, transfer):
    assert transfer in self._ends
    super().cancel(time, transfer)
    self.cancelled.append((time, transfer.client, transfer.up))


@pytest.mark.parametrize(("time", "up"), [(0.2, False), (1.6, True)])
def test_cut_connection_ends_its_transfer_in_the_network(time, up):
  network = Cancelling()
  found = numeric.run(
    numeric.rules(rounds=1), [Fault(time, "cut", 2, 1.0)], network=network
  )
  assert found.hit == [("cut", "uplink" if up else "downlink")]
  assert network.cancelled == [(time, 2, up)]


def test_pause_of_a_client_delays_a_round_by_no_more_than_its_length():
  """In each phase; what the client would send or receive follows the pause."""
  rules, pause_s = numeric.rules(rounds=1), 0.7
  (plain,) = numeric.ended(numeric.run(rules))
  phases = set()
  for time in np.arange(0.05, plain.duration_s, 0.1):
    for client in range(4):
      found = numeric.run(rules, [Fault(time, "stop", client, pause_s)])
      (end,) = numeric.ended(found)
      added_s = end.duration_s - plain.duration_s
      assert -1e-9 <= added_s <= pause_s + 1e-9, found.hit
      phases |= {phase for _, phase in found.hit}
  assert phases >= {"downlink", "training", "uplink"}


def test_late_updates_are_merged_with_a_weight_by_age():
  """Client 3 needs more than two deadlines."""
  def slow(client, round):
    return {"t_tr": 5.0} if client == 3 else numeric.compute(client, round)

  rules = numeric.rules(
    stragglers="late", deadline_s=2.0, weights="equal", rounds=8
  )
  rounds = numeric.ended(numeric.run(rules, compute=slow))
  late = [(e, m) for e in rounds for m in e.merged if m[1] != e.round]
  assert late
  for end, (client, round, factor) in late:
    assert client == 3
    age = end.round - round  # each round makes a revision
    assert factor == pytest.approx((1 + age) ** -0.5 / len(end.merged))


def test_dead_client_does_not_disable_the_deadline():
  rules = numeric.rules(stragglers="drop", deadline_s=2.0, reconnect_s=100.0)
  found = numeric.run(rules, [Fault(0.5, "kill", 2, 1e9)])
  rounds = numeric.ended(found)
  assert [e.missing for e in rounds] == [(2,)] * 6
  assert all(e.late and abs(e.duration_s - 2.0) < 1e-9 for e in rounds)
