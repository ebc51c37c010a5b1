"""Decisions of the server's core, message by message."""

import dataclasses
import json
import math

import numpy as np
import pytest

from caatnet.federated import events, sampling, server, snapshot
from tests.caatnet.federated import numeric
from tests.caatnet.federated.numeric import PARAMS, Plain


def start(examples=numeric.EXAMPLES, **changes):
  """Returns a server whose clients have connected, and its rules."""
  rules = numeric.rules(clients=len(examples), **changes)
  state = server.initial_state(PARAMS, Plain())
  for client, num in enumerate(examples):
    state, _ = step(state, events.Hello(client, num), rules=rules)
  return state, rules


def step(state, message, time=0.0, rules=None, arithmetic=None):
  return server.step(state, message, time, rules, arithmetic or Plain())


def update(client, round=0, revision=0, value=1.0, **changes):
  delta = np.full(3, value, np.float32)
  return events.Update(client, round, revision, delta, **changes)


def of(kind, effects):
  return [e for e in effects if isinstance(e, kind)]


def test_step_of_all_clients_is_the_mean_by_examples():
  state, rules = start(max_examples=7)
  values = [0.5, -1.0, 2.0, 4.0]
  losses, validated = [1.5, 1.0, 3.0, 2.0], [7, 0, 1, 2]
  for client in (2, 0, 3, 1):  # the order of arrival has no effect
    state, effects = step(state, update(
      client, value=values[client], loss=losses[client],
      validated=validated[client],
    ), rules=rules)
  expected = np.average(values, weights=numeric.EXAMPLES)
  np.testing.assert_allclose(state.params, PARAMS + expected, rtol=1e-6)
  (end,) = of(events.RoundEnded, effects)
  assert sum(f for *_, f in end.merged) == pytest.approx(1.0)
  assert end.loss == pytest.approx(np.average(losses, weights=validated))
  assert (state.round, state.revision) == (1, 1)
  # The state is saved before clients receive the next round's work.
  kinds = [type(e) for e in effects]
  assert kinds.index(events.Save) < kinds.index(events.Train)


def test_client_without_a_connection_is_sent_nothing_at_the_end_of_a_round():
  state, rules = start(stragglers="drop", deadline_s=2.0)
  state, _ = step(state, events.Disconnected(3), 0.5, rules)
  for client in (0, 1):
    state, _ = step(state, update(client), 1.0, rules)
  state, effects = step(state, events.Tick(), 2.0, rules)
  (end,) = of(events.RoundEnded, effects)
  assert end.missing == (2, 3)
  # Client 2 still computes.
  assert of(events.Abandon, effects) == [events.Abandon(2, 0)]
  assert {e.client for e in of(events.Train, effects)} == {0, 1, 2}


@pytest.mark.parametrize("origin", [0.0, 1000.0])
@pytest.mark.parametrize(("gone", "late"), [(True, False), (False, True)])
def test_round_is_late_if_its_deadline_has_passed(origin, gone, late):
  """After its start: monotonic clocks have any origin."""
  rules = numeric.rules(stragglers="drop", deadline_s=8.0, reconnect_s=3.0)
  state = server.initial_state(PARAMS, Plain())
  for client, num in enumerate(numeric.EXAMPLES):
    state, _ = step(state, events.Hello(client, num), origin, rules)
  for client in range(3):
    state, _ = step(state, update(client), origin + 1.0, rules)
  if gone:
    state, _ = step(state, events.Disconnected(3), origin + 2.0, rules)
  time = server.wake_s(state, rules)
  assert time == origin + (5.0 if gone else 8.0)
  _, effects = step(state, events.Tick(), time, rules)
  (end,) = of(events.RoundEnded, effects)
  assert end.missing == (3,)
  assert end.late == late
  assert end.duration_s == time - origin


def test_round_waits_for_the_last_of_its_lost_clients():
  state, rules = start()
  for client in (0, 1):
    state, _ = step(state, update(client), 0.5, rules)
  for client, time in ((3, 1.0), (2, 2.0)):
    assert server.wake_s(state, rules) is None
    state, _ = step(state, events.Disconnected(client), time, rules)
  assert server.wake_s(state, rules) == 5.0


WEIGHTS = dict(enumerate((1.0, 2.0, 3.0, 4.0, 10.0) * 10))


def of_sample(drawn, num, kind):
  """Returns the coefficients of a sample, ``[N]``."""
  merged = [(k, drawn.count(k), 0) for k in dict.fromkeys(drawn)]
  found = np.zeros(len(WEIGHTS))
  found[list(dict.fromkeys(drawn))] = sampling.coefficients(
    WEIGHTS, num, kind, merged
  )
  return found


@pytest.mark.parametrize("kind", ["uniform", "weighted", "ratio"])
def test_samples_have_the_documented_bias_and_variance(kind):
  n, k, rounds = len(WEIGHTS), 20, 3000
  deltas = 15 - np.array(list(WEIGHTS.values()))
  shares = np.array(list(WEIGHTS.values())) / sum(WEIGHTS.values())
  full = shares @ deltas
  drawn = np.array([
    of_sample(sampling.sample(WEIGHTS, k, kind, 0, r), k, kind)
    for r in range(rounds)
  ])
  sums, steps = drawn.sum(axis=1), drawn @ deltas
  rest = (1 - k / n) / k / (n - 1)
  moved = n * shares * (deltas - full)
  bias = -rest * (n * shares @ moved) if kind == "ratio" else 0.0
  variance = {
    "weighted": shares @ (deltas - full) ** 2 / k,
    "uniform": rest * ((n * shares * deltas - full) ** 2).sum(),
    "ratio": rest * (moved**2).sum(),
  }[kind]
  error = (variance / rounds) ** 0.5
  assert steps.mean() == pytest.approx(full + bias, abs=4 * error)
  assert abs(bias) > 4 * error or kind != "ratio"
  assert steps.var() == pytest.approx(variance, rel=0.15)
  if kind == "uniform":
    assert sums.max() > 1.3
  else:
    np.testing.assert_allclose(sums, 1.0)
  # All clients take part once.
  found = of_sample(sampling.sample(WEIGHTS, n, kind, 0, 1), n, kind)
  np.testing.assert_allclose(found, shares)


@pytest.mark.parametrize(
  ("kind", "warned"), [("uniform", True), ("weighted", False), ("ratio", False)]
)
def test_coefficients_far_above_one_are_warned_of(kind, warned):
  state, rules = start((92, *[1] * 8), per_round=2, sampling=kind, rounds=40)
  texts = []
  while not state.finished:
    for client in dict.fromkeys(state.sampled):
      state, effects = step(
        state, update(client, state.round, state.revision), rules=rules
      )
      texts += [e.reason for e in of(events.PrintWarning, effects)]
  assert ("sum to 4.18 instead of 1" in "".join(texts)) == warned


@pytest.mark.parametrize(("examples", "sums"), [
  ((3, 1), set()), ((4, 1), {"1.60"}),  # 1.5 is allowed
])
def test_coefficients_above_one_and_a_half_are_warned_of(examples, sums):
  state, rules = start(examples, per_round=1, rounds=9)
  texts = []
  while not state.finished:
    state, effects = step(
      state, update(state.sampled[0], state.round, state.revision), rules=rules
    )
    texts += [e.reason for e in of(events.PrintWarning, effects)]
  assert {x.split(" sum to ")[1].split()[0] for x in texts} == sums


@pytest.mark.parametrize(("examples", "warned"), [
  ((1, 1, 10**9), True), ((1, 1, 1, 3), False), ((1, 1, 1, 4), True),
  ((1, 3), False), ((1, 99), True), ((7,), False), ((0, 0, 0), False),
])
def test_client_with_most_of_the_examples_is_named(examples, warned):
  rules = numeric.rules(clients=len(examples), per_round=1)
  state, found = server.initial_state(PARAMS, Plain()), []
  for client, num in [*enumerate(examples), (0, examples[0])]:
    state, effects = step(state, events.Hello(client, num), rules=rules)
    found += of(events.PrintWarning, effects)
  count, share = examples[-1], examples[-1] / (sum(examples) or 1)
  text = f"client {len(examples) - 1} reports {count:,} examples, {share:.1%} "
  assert [text in e.reason for e in found] == [True] * warned
  equal = dataclasses.replace(rules, weights="equal")
  state = server.initial_state(PARAMS, Plain())
  for client, num in enumerate(examples):
    state, effects = step(state, events.Hello(client, num), rules=equal)
    assert not of(events.PrintWarning, effects)


@pytest.mark.parametrize(
  ("message", "reason"),
  [
    (update(1, round=1), "of the future"),
    (update(1, revision=1), "of the future"),
    (update(1, value=math.nan), "not finite"),
    (update(1, value=math.inf), "not finite"),
    (events.Update(1, 0, 0, np.zeros(2, np.float32)), "of another size"),
    (update(1, validated=2**40), "of too many examples"),
    (update(7), "not registered"),
  ],
)
def test_invalid_update_is_refused_counted_and_named(message, reason):
  state, rules = start()
  after, effects = step(state, message, rules=rules)
  (refused,) = of(events.UpdateRefused, effects)
  assert f"client {message.client} in round" in refused.reason
  assert refused.reason.endswith(reason)
  assert after.counts == {reason: 1}
  assert not after.received


def losses(num):
  return [events.Disconnected(1), events.Hello(1, 2)] * num


@pytest.mark.parametrize("at_once", [0, 1])
@pytest.mark.parametrize("found", [
  # Messages of a client in round 1, with "wait", and the reason.
  ([update(1, 7)], "of the future"),
  ([update(1, 1, 7)], "of the future"),
  ([events.UpdateReady(1, 7)], "of the future"),
  ([update(1, 0)], "of the past"),
  ([events.UpdateReady(1, 0)], "of the past"),
  (losses(5), "interrupted too often"),
  ([events.Tick()], ""),  # it is connected, and does not answer
], ids=str)
def test_no_client_blocks_a_round_for_ever(found, at_once):
  state, rules = start(
    hang_s=60.0, downlinks_at_once=at_once, uplinks_at_once=at_once
  )

  def others(state):
    for client in (0, 2, 3):
      state, effects = step(
        state, update(client, state.round, state.revision), rules=rules
      )
    return state, effects

  state, _ = step(state, update(1), rules=rules)
  state, _ = others(state)
  assert state.round == 1
  messages, reason = found
  for message in messages:
    state, _ = step(state, message, rules=rules)
  state, effects = others(state)
  time = 0.0 if reason else 60.0
  if not reason:
    assert server.wake_s(state, rules) == 60.0
    assert "the deadline is 60 s" in server.describe_wait(state, rules)
    state, effects = step(state, events.Tick(), time, rules)
    assert of(events.Abandon, effects) == [events.Abandon(1, 1)]
  (end,) = of(events.RoundEnded, effects)
  assert end.refused == (((1, reason),) if reason else ())
  assert end.missing == (() if reason else (1,))
  assert [k for k, *_ in end.merged] == [k for k in end.sampled if k != 1]
  # The next round has its update.
  assert any(e.client == 1 for e in of(events.Train, effects)) or at_once
  state, _ = step(state, update(1, 2, 2), time, rules)
  assert len(state.received) == 1


def test_client_that_loses_few_connections_has_an_update():
  state, rules = start()
  for round in range(3):
    for message in (*losses(4), update(1, round, round)):
      state, _ = step(state, message, rules=rules)
    assert len(state.received) == 1
    for client in (0, 2, 3):
      state, _ = step(state, update(client, round, round), rules=rules)
  assert (state.round, state.counts) == (3, {})


def test_round_that_ended_without_a_client_is_no_error_of_it():
  """An update of round 0 may arrive in round 1, before that of round 1."""
  state, rules = start()
  state, _ = step(state, events.Disconnected(1), rules=rules)
  for client in (0, 2, 3):
    state, _ = step(state, update(client), rules=rules)
  state, _ = step(state, events.Tick(), 3.0, rules)
  for message in (events.Hello(1, 2), update(1, 0), update(1, 1, 1)):
    state, _ = step(state, message, 3.0, rules)
  assert state.counts == {"late": 1}
  assert [c.update.client for c in state.received] == [1]


def test_outlier_is_excluded_when_the_round_ends():
  state, rules = start()
  for client in range(4):
    value = 1e8 if client == 2 else 1.0
    state, effects = step(state, update(client, value=value), rules=rules)
  (end,) = of(events.RoundEnded, effects)
  assert end.refused == ((2, "an outlier"),)
  assert [k for k, *_ in end.merged] == [k for k in end.sampled if k != 2]
  assert np.abs(state.params - PARAMS).max() < 10
  for round, value in ((1, 1.0), (2, 1e8)):  # reasons are those of a round
    for client in range(4):
      value_here = value if client == 1 else 1.0
      state, effects = step(
        state, update(client, round, round, value_here), rules=rules
      )
    (end,) = of(events.RoundEnded, effects)
    assert end.refused == (((1, "an outlier"),) if round == 2 else ())
  assert state.counts == {"an outlier": 2}


@pytest.mark.parametrize("wrong", [
  {"loss": -1e300}, {"loss": 1e300}, {"validated": -9},
], ids=str)
def test_implausible_loss_does_not_count(wrong):
  state, rules = start()
  for client in range(4):
    said = {"loss": 2.0, "validated": 3} | (wrong if client == 2 else {})
    state, effects = step(state, update(client, **said), rules=rules)
  (end,) = of(events.RoundEnded, effects)
  assert end.loss == 2
  assert len(end.merged) == 4
  refused = [e.reason for e in of(events.UpdateRefused, effects)]
  assert len(refused) == ("loss" in wrong)
  assert all("loss of client 2 in round 0 refused" in x for x in refused)


def test_duplicated_update_counts_once():
  state, rules = start()
  once, _ = step(state, update(1), rules=rules)
  twice, effects = step(once, update(1, value=5.0), rules=rules)
  assert twice.received == once.received
  assert "duplicate" in of(events.UpdateRefused, effects)[0].reason
  # It does not count in the next round either.
  for client in (0, 2, 3):
    twice, _ = step(twice, update(client), rules=rules)
  assert twice.round == 1
  after, _ = step(twice, update(1), rules=rules)
  assert not after.received


def test_no_valid_update_leaves_the_model_unchanged():
  state, rules = start(per_round=1)
  state, effects = step(
    state, update(state.sampled[0], value=math.nan), rules=rules
  )
  assert of(events.RoundEnded, effects)[0].merged == ()
  assert (state.round, state.revision) == (1, 0)
  np.testing.assert_array_equal(state.params, PARAMS)


@pytest.mark.parametrize(
  ("hello", "reason"),
  [
    (events.Hello(4, 1), "ids are 0 to 3"),
    (events.Hello(1, 2, digest="ab"), "another model"),
    (events.Hello(1, 2, revision=3), "another run"),
    (events.Hello(1, 9), "before it had 2"),
    (events.Hello(1, 10**18), "at most max_examples=1,000,000,000"),
  ],
)
def test_client_that_does_not_fit_is_refused(hello, reason):
  state, rules = start()
  after, effects = step(state, hello, rules=rules)
  assert reason in of(events.RefuseClient, effects)[0].reason
  assert after.members == state.members


def test_client_without_data_is_never_sampled():
  state, rules = start((1, 0, 2), per_round=2)
  for round in range(5):
    assert set(state.sampled) == {0, 2}
    for client in state.sampled:
      state, _ = step(state, update(client, round, round), rules=rules)
  state, rules = start((1, 0, 2), per_round=3)  # more than have data
  assert sorted(state.sampled) == [0, 2]
  state, rules = start((0, 0), per_round=1)
  assert state.finished == "no client has training examples"


def test_early_stopping_ends_the_run():
  state, rules = start(patience=2, min_gain=0.1, rounds=100)
  # 0.88 is a gain of more than 0.1 over 1.0, not over 0.95.
  for round, loss in enumerate((2.0, 1.0, 0.95, 0.88, 0.85, 0.8)):
    assert not state.finished
    for client in range(4):
      state, effects = step(
        state, update(client, round, round, loss=loss, validated=3),
        rules=rules,
      )
  assert "2 rounds" in state.finished
  assert of(events.Stop, effects)


def test_ended_run_continues_with_more_rounds():
  state, rules = start(rounds=1, patience=2)
  for client in range(4):
    state, _ = step(
      state, update(client, loss=1.0, validated=1), rules=rules
    )
  assert state.finished == "1 rounds have ended"
  assert server.resume_state(state, 9.0, rules).finished == state.finished
  more = dataclasses.replace(rules, rounds=2)
  assert not server.resume_state(state, 9.0, more).finished
  stopped = dataclasses.replace(state, stale=2, finished="early")
  assert server.resume_state(stopped, 9.0, more).finished == "early"


def test_late_update_is_corrected_for_the_change_of_the_model():
  """By the squared update times the change, with the norm of 0.5 updates."""
  def merged(**changes):
    state, rules = start(
      (1, 1), per_round=2, stragglers="late", deadline_s=2.0, **changes
    )
    state, _ = step(
      state, events.Update(0, 0, 0, np.float32([2, 0, -4])), rules=rules
    )
    state, _ = step(state, events.Tick(), 2.0, rules)
    assert set(state.bases) == ({0, 1} if changes else set())
    # The update of round 0 arrives in round 1, with the weight of age 1.
    state, _ = step(
      state, events.Update(1, 0, 0, np.float32([1, 2, 3])), 3.0, rules
    )
    before = state.params
    state, effects = step(state, events.Tick(), 4.0, rules)
    ((_, _, factor),) = of(events.RoundEnded, effects)[0].merged
    assert set(state.bases) == ({1, 2} if changes else set())
    return (state.params - before) / factor

  plain = merged()
  np.testing.assert_allclose(plain, [1, 2, 3], rtol=1e-5)
  correction = merged(compensation=0.5) - plain
  # The model moved by [2, 0, -4], and the squared update is [1, 4, 9].
  direction = -np.float32([2, 0, -36])
  np.testing.assert_allclose(
    correction, direction * 0.5 * 14**0.5 / np.linalg.norm(direction),
    atol=1e-5,
  )
  # A squared update may exceed the range of float32.
  found = server._compensate_delay(np.float32([1e30]), np.float32([1]), 0.25)
  np.testing.assert_allclose(found, [0.75e30], rtol=1e-6)
  for delta, moved in (([0.0], [1.0]), ([1.0], [0.0])):
    same = server._compensate_delay(np.float32(delta), np.float32(moved), 0.25)
    np.testing.assert_array_equal(same, delta)


class Coded(Plain):
  """Publishes differences rounded to halves, in one byte each."""

  def publish(self, difference):
    codes = np.round(2 * difference).astype(np.int8)
    return codes.tobytes(), codes.astype(np.float32) / 2


def test_differences_lead_to_the_published_model():
  """Errors of rounding do not accumulate over revisions."""
  rules = numeric.rules(per_round=1, rounds=40, seed=3)
  arithmetic = Coded()
  state = server.initial_state(PARAMS, arithmetic)
  for client in range(4):
    state, _ = step(state, events.Hello(client, 1), 0.0, rules, arithmetic)
  held = {0: np.copy(PARAMS)}
  while not state.finished:
    value = 0.3 * (-1) ** state.round + 0.1
    state, _ = step(
      state, update(state.sampled[0], state.round, state.revision, value),
      0.0, rules, arithmetic,
    )
    assert np.abs(state.params - state.published).max() <= 0.25 + 1e-5
    for base in range(max(0, state.revision - 6), state.revision):
      coded, parts = server.downlink_payload(state, base)
      # Three differences of three bytes are less than twelve bytes.
      assert coded == (state.revision - base <= 4)
      if coded:
        found = held[base] + sum(
          np.frombuffer(p, np.int8).astype(np.float32) / 2 for p in parts
        )
        np.testing.assert_array_equal(found, state.published)
    assert server.downlink_payload(state, -1)[1] == (state.published.tobytes(),)
    assert server.downlink_payload(state, state.revision) == (True, ())
    held[state.revision] = state.published


def test_snapshot_is_the_state(tmp_path):
  state, rules = start(stragglers="late", per_round=2)
  path = tmp_path / "state.npz"
  assert snapshot.read(path, rules) is None
  for round in range(3):
    for client in state.sampled:
      state, _ = step(
        state, update(client, round, round, loss=1.0, validated=1),
        rules=rules,
      )
  state = dataclasses.replace(
    state, differences=(b"ab", b"", b"c"),
    optimizer=(np.float32([1]), np.int32(3)),
  )
  snapshot.write(path, state, rules)
  found = snapshot.read(path, rules)
  for field in dataclasses.fields(server.ServerState):
    before, after = getattr(state, field.name), getattr(found, field.name)
    if field.name in ("params", "published"):
      np.testing.assert_array_equal(before, after)
    elif field.name == "optimizer":
      assert [x.tolist() for x in before] == [x.tolist() for x in after]
    else:
      assert before == after, field.name
  assert found.published is found.params  # stored once
  coded = dataclasses.replace(state, published=state.params + 1)
  snapshot.write(path, coded, rules)
  np.testing.assert_array_equal(
    snapshot.read(path, rules).published, state.params + 1
  )
  bases = {1: state.params + 2, state.round: state.published}
  snapshot.write(path, dataclasses.replace(state, bases=bases), rules)
  # That of the round in progress is written with the parameters.
  ((round, base),) = snapshot.read(path, rules).bases.items()
  assert round == 1
  np.testing.assert_array_equal(base, bases[1])
  for name, value in {
    "rounds": 9, "reconnect_s": 1.0, "hang_s": 7.0, "max_examples": 9,
  }.items():
    other = dataclasses.replace(rules, **{name: value})
    assert snapshot.read(path, other).round == state.round
  for name, value in {
    "seed": 5, "deadline_s": 9.0, "per_round": 3, "min_gain": 0.5,
    "patience": 2, "sampling": "ratio", "weights": "equal",
    "compensation": 0.5,
  }.items():
    other = dataclasses.replace(rules, **{name: value})
    before = getattr(rules, name)
    words = f"with {name}={before!r}, but this run has {value!r};"
    with pytest.raises(ValueError, match=words):
      snapshot.read(path, other)
  arrays = dict(np.load(path))
  for name in ("optimizer_1", "difference_2", "base_1"):
    np.savez(path, **{k: x for k, x in arrays.items() if k != name})
    with pytest.raises(ValueError, match=f"damaged: .* expected .*{name}"):
      snapshot.read(path, rules)
  np.savez(path, **arrays, base_7=arrays["params"])
  with pytest.raises(ValueError, match=r"damaged: it has the arrays .*base_7"):
    snapshot.read(path, rules)
  path.write_bytes(path.read_bytes()[:-30])
  with pytest.raises(ValueError, match="damaged"):
    snapshot.read(path, rules)
  for meta in (b"[]", b"{}", b'{"rules": 1}', b'{"rules": {}}'):
    np.savez(path, meta=np.frombuffer(meta, np.uint8), params=np.zeros(3))
    with pytest.raises(ValueError, match="damaged"):
      snapshot.read(path, rules)


def test_wait_is_described():
  state, rules = start(stragglers="drop")
  state, _ = step(state, update(1), rules=rules)
  state, _ = step(state, events.Disconnected(3), rules=rules)
  text = server.describe_wait(state, rules)
  assert "without a connection: 3; the deadline is 8 s" in text
  assert "1" not in text.split(";")[0].split("clients")[1].split(",")
  fresh = server.initial_state(PARAMS, Plain())
  assert "clients 0, 1, 2, 3 to connect" in server.describe_wait(fresh, rules)
  many = numeric.rules(clients=10, per_round=10)
  assert "clients 0, 1, 2, 3, 4, 5, 6, 7 and 2 more to connect" in (
    server.describe_wait(fresh, many)
  )


def test_restarted_server_waits_for_its_clients():
  state, rules = start(stragglers="drop", rounds=10)
  for client in range(4):
    state, _ = step(state, update(client), rules=rules)
  state = server.resume_state(state, 100.0, rules)
  # Much later than every limit, no round has ended.
  state, effects = step(state, events.Tick(), 900.0, rules=rules)
  assert (state.round, state.started, effects) == (1, None, [])
  assert server.wake_s(state, rules) is None
  for client in (0, 1):
    hello = events.Hello(client, numeric.EXAMPLES[client])
    state, effects = step(state, hello, 900.0 + client, rules=rules)
    assert not effects
  assert "clients 2, 3 to connect: 2 of 4" in server.describe_wait(state, rules)
  # The others are lost 3 s after the last connection.
  assert server.wake_s(state, rules) == 904.0
  state, effects = step(state, events.Tick(), 904.0, rules=rules)
  assert {e.client for e in of(events.Train, effects)} == {0, 1}
  # In a round without any connection, time has no effect.
  for client in (0, 1):
    state, _ = step(state, events.Disconnected(client), 905.0, rules=rules)
  state, effects = step(state, events.Tick(), 2000.0, rules=rules)
  assert (state.round, effects) == (1, [])


def ready(client, round=0):
  return events.UpdateReady(client, round)


def test_transfers_of_a_lost_client_do_not_delay_others():
  state, rules = start(downlinks_at_once=1, uplinks_at_once=1)
  order = state.downlinks
  assert sorted(order) == [0, 1, 2, 3]
  state, effects = step(state, events.Disconnected(order[0]), rules=rules)
  assert [e.client for e in of(events.Train, effects)] == [order[1]]
  # One that still waits leaves no place to the next.
  before = state
  state, effects = step(state, events.Disconnected(order[2]), rules=rules)
  assert (state.downlinks, effects) == ((order[1], order[3]), [])
  state = before
  for client in order[1:]:
    state, _ = step(state, events.ModelReceived(client, 0), rules=rules)
  state, effects = step(state, ready(order[1]), rules=rules)
  assert of(events.Resend, effects) == [events.Resend(order[1], 0)]
  state, effects = step(state, ready(order[2]), rules=rules)
  assert effects == []
  state, effects = step(state, events.Disconnected(order[1]), rules=rules)
  assert of(events.Resend, effects) == [events.Resend(order[2], 0)]
  assert state.uplinks == (order[2],)


def test_messages_of_an_earlier_round_begin_no_transfer():
  """Client 3 is late, and its old messages do not end its new downlink."""
  state, rules = start(
    stragglers="drop", deadline_s=2.0, downlinks_at_once=1, uplinks_at_once=1
  )
  for client in state.downlinks:
    state, _ = step(state, events.ModelReceived(client, 0), rules=rules)
  for client in (0, 1, 2):
    state, _ = step(state, ready(client), rules=rules)
    state, _ = step(
      state, update(client, busy_s=float(client)), rules=rules
    )
  state, _ = step(state, events.Tick(), 2.0, rules)
  assert state.downlinks == (2, 1, *sorted({0, 3}, key=state.sampled.index))
  for message in (
    events.ModelReceived(2, 0), ready(2), ready(3), update(3), update(2)
  ):
    before = state.downlinks
    state, effects = step(state, message, 2.0, rules)
    assert (state.downlinks, state.uplinks) == (before, ())
    assert of(events.Train, effects) == of(events.Resend, effects) == []


def test_waiting_models_of_a_late_round_are_those_of_the_next():
  state, rules = start(
    stragglers="late", deadline_s=2.0, downlinks_at_once=1
  )
  first, *waiting = state.downlinks
  state, effects = step(state, events.Tick(), 2.0, rules)
  # The model on the way is of round 0, the others wait for that of round 1.
  assert of(events.Train, effects) == []
  assert state.members[first].working == 0
  assert state.downlinks[0] == first
  assert sorted(state.downlinks[1:]) == sorted(waiting)
  state, effects = step(state, events.ModelReceived(first, 0), 2.0, rules)
  (train,) = of(events.Train, effects)
  assert (train.round, train.client) == (1, state.downlinks[0])


def test_rules_of_an_older_snapshot_have_their_defaults(tmp_path):
  state, rules = start()
  path = tmp_path / "server.npz"
  snapshot.write(path, state, rules)
  found = dict(np.load(path))
  meta = json.loads(found["meta"].tobytes())
  for name in ("downlinks_at_once", "uplinks_at_once"):
    del meta["rules"][name]
  meta["rules"]["least_gain"] = meta["rules"].pop("min_gain")
  for member in meta["members"].values():
    del member["busy_s"]
  found["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
  np.savez(path, **found)
  assert snapshot.read(path, rules).members == state.members
  changed = dataclasses.replace(rules, uplinks_at_once=1)
  with pytest.raises(ValueError, match="uplinks_at_once=0, but this run has 1"):
    snapshot.read(path, changed)
