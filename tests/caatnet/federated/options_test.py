"""Pairs of a federated run's options: each round follows its equation.

The equations are written out in float64; models are those that the server has
published, so that errors of codes do not add up.
"""

import jax
import numpy as np
import pytest

from caatnet.config import federated
from caatnet.config.override import override
from caatnet.federated import events, predict, simulate, snapshot, vector_codec
from configs.federated import tiny
from parallel.plans.hardware import client_links as links
from tests import pairwise
from tests.caatnet.federated import numeric

# Keys of config.federated.
KEYS = {
  "sampling": ("uniform", "weighted", "ratio"),
  "weights": ("examples", "equal"),
  "stragglers": ("late", "drop", "wait"), "per_round": (2, 4),
  "compensation": (0.5, 0.0),
  "downlinks_at_once": (0, 1), "uplinks_at_once": (1, 0),
  "optimizer": ("fedavgm", "fedadam", "fedavg"),
  "uplink": ("int8", "int4", "e3m0", "sparse", "none"),
  "downlink": ("int4", "e3m0", "int8", "none"), "stochastic": (True, False),
}
# Slow: client 3 computes for longer than the deadline; link of all clients.
TABLE = pairwise.rows(
  KEYS | {"slow": (True, False), "link": ("", "wifi")},
  lambda row: (row["stochastic"] and row["uplink"] in ("none", "sparse"))
  or (row["compensation"] > 0 and row["stragglers"] != "late"),
)
RATE, MOMENTUM, BETA_2, EPS, TOP_K = 0.5, 0.8, 0.9, 0.01, 16
ROUNDS, SEED, N = 5, 7, len(numeric.EXAMPLES)
GIVEN = (
  f"seed={SEED} model.widths=(4,) model.blocks=1 model.groups=2 "
  f"federated.clients={N} federated.rounds={ROUNDS} federated.deadline_s=8 "
  f"federated.reconnect_s=1e6 federated.learning_rate={RATE} "
  f"federated.momentum={MOMENTUM} federated.beta_2={BETA_2} "
  f"federated.eps={EPS} federated.top_k={TOP_K} "
)


def built(row):
  return federated.build(override(
    tiny.get_config("convolutional,test"),
    GIVEN + " ".join(f"federated.{key}={row[key]}" for key in KEYS),
  ))


def delta(client, round, params):
  """Moves by a part of the way to a target of the client."""
  target = np.random.default_rng([client, round]).normal(size=params.size)
  return np.float32(0.25) * (target.astype(np.float32) - params)


class Run:
  """Simulated run whose clients encode their updates, and what it has sent."""

  def __init__(self, row, faults=()):
    made = self.made = built(row)
    codecs = [made.codecs(k) for k in range(N)]
    self.start = made.vectors.initial()
    self.sent, self.states = {}, []
    network = simulate.ConstantNetwork(0.3, 0.4)
    if row["link"]:
      network = predict.LinkNetwork(links.assign_links((row["link"],), N))

    def train(client, round, params):
      data = codecs[client].encode(delta(client, round, params), round)
      self.sent[client, round] = data
      return made.uplink.decode(data, params.size)

    def compute(client, round):
      seconds = 10.0 if row["slow"] and client == 3 else 0.5 + 0.2 * client
      return {"t_tr": seconds}

    self.found = simulate.Simulation(
      made.rules, made.arithmetic, self.start,
      simulate.Clients(numeric.EXAMPLES, train, compute),
      simulate.Transport(network), faults,
      observe=lambda time, state: self.states.append(state),
    )
    self.end = self.found.run(limit_s=1000.0)


def num_bytes(name, n):
  """Returns the size of a coded vector."""
  blocks, chunks = -(-n // 256), -(-n // 4096)
  return {
    "none": 4 * n, "int8": 260 * blocks, "int4": 132 * blocks,
    "e3m0": 132 * blocks,
    # Positions of 16 bits, codes of 2 bits, and two magnitudes of a chunk.
    "sparse": chunks * (2 * TOP_K + TOP_K // 4 + 8),
  }[name]


def optimizer(name):
  """Returns a function: mean update -> step of the parameters."""
  first, second, count = 0.0, 0.0, 0

  def step(mean):
    nonlocal first, second, count
    count += 1
    if name == "fedavg":
      return RATE * mean
    if name == "fedavgm":
      first = MOMENTUM * first + mean
      return RATE * first
    first = MOMENTUM * first + (1 - MOMENTUM) * mean
    second = BETA_2 * second + (1 - BETA_2) * mean**2
    unbiased = first / (1 - MOMENTUM**count)
    return RATE * unbiased / (
      np.sqrt(second / (1 - BETA_2**count)) + EPS
    )

  return step


def compensated(update, change, strength):
  """Subtracts the correction of DC-S3GD, of a norm relative to the update."""
  update, change = update.astype(np.float64), change.astype(np.float64)
  correction = update * update * change
  norm = np.linalg.norm(correction)
  if not norm:
    return update
  return update - strength * np.linalg.norm(update) / norm * correction


@pytest.mark.rotated(4)
@pytest.mark.parametrize("row", TABLE, ids=pairwise.label)
def test_options_together_follow_their_equations(row):
  run = Run(row)
  n, ends = run.start.size, numeric.ended(run.found)
  assert [end.round for end in ends] == list(range(ROUNDS))
  weights = np.array(
    numeric.EXAMPLES if row["weights"] == "examples" else [1] * N, float
  )
  key = jax.random.key(SEED)
  uplink = vector_codec.make(row["uplink"], row["stochastic"], TOP_K)
  downlink = vector_codec.make(row["downlink"])
  step = optimizer(row["optimizer"])
  params = published = run.start
  models, revisions = [published], []  # by revision, and revision by round
  for end, state in zip(ends, run.states, strict=True):
    revisions.append(len(models) - 1)
    drawn = [ends[round].sampled.count(k) for k, round, _ in end.merged]
    mean = np.zeros(n)
    chosen = np.array(drawn) * weights[[k for k, *_ in end.merged]]
    for (client, round, factor), number in zip(end.merged, drawn, strict=True):
      share = number / sum(drawn)
      if row["sampling"] == "uniform":
        share *= N * weights[client] / weights.sum()
      elif row["sampling"] == "ratio" or row["per_round"] == N:
        share = number * weights[client] / chosen.sum()
      # One over the root of the revisions since its own, and one.
      share /= (1 + revisions[-1] - revisions[round]) ** 0.5
      assert factor == pytest.approx(share)
      own = jax.random.fold_in(jax.random.fold_in(key, client), round)
      data = uplink.encode(
        delta(client, round, models[revisions[round]]), own
      )
      assert data == run.sent[client, round]
      assert len(data) == num_bytes(row["uplink"], n)
      update = uplink.decode(data, n)
      if revisions[round] < revisions[-1]:
        update = compensated(
          update, published - models[revisions[round]], row["compensation"]
        )
      mean += share * update
    if end.merged:
      np.testing.assert_allclose(
        state.params, params + step(mean), rtol=1e-5, atol=1e-5
      )
      params = state.params
      if row["downlink"] == "none":
        published = params
      else:
        code = downlink.encode(params - published, key)
        assert state.differences[-1] == code
        assert len(code) == num_bytes(row["downlink"], n)
        published = published + downlink.decode(code, n)
      models.append(published)
    np.testing.assert_array_equal(state.published, published)
    assert state.revision == len(models) - 1
    _check_clients(row, end)
  if row["slow"] and row["stragglers"] == "late":
    drawn = any(3 in end.sampled for end in ends[:-1])
    late = [m for end in ends for m in end.merged if m[1] < end.round]
    assert {client for client, *_ in late} == ({3} if drawn else set())
  _check_downlinks(row, run, revisions)


def _check_clients(row, end):
  """Checks which clients were drawn, were late and were missing."""
  assert len(end.sampled) == row["per_round"]
  if row["sampling"] != "weighted" or row["per_round"] == N:
    assert len(set(end.sampled)) == row["per_round"]
  on_time = {k for k, round, _ in end.merged if round == end.round}
  assert on_time | set(end.missing) == set(end.sampled)
  late = row["slow"] and row["stragglers"] != "wait"
  assert set(end.missing) == ({3} & {*end.sampled} if late else set())
  if row["stragglers"] != "late":
    assert len(end.merged) == len(on_time)


def _check_downlinks(row, run, revisions):
  """Checks sizes of models: differences while they are smaller than a model."""
  n, held = run.start.size, [None] * N
  size = num_bytes(row["downlink"], n)
  most = 0 if row["downlink"] == "none" else 4 * n // size
  if row["slow"] and row["stragglers"] != "wait":
    return  # clients also receive models of rounds without an update of theirs
  assert {x["client"] for x in run.found.rows} == set().union(
    *(end.sampled for end in numeric.ended(run.found))
  )
  for each in run.found.rows:
    client, revision = each["client"], revisions[each["round"]]
    behind = None if held[client] is None else revision - held[client]
    expected = 4 * n if behind is None or behind > most else behind * size
    assert each["bytes_down"] == expected
    held[client] = revision


@pytest.mark.rotated(4)
@pytest.mark.parametrize(
  "row", [r for r in TABLE if r["stragglers"] == "wait" or not r["slow"]],
  ids=pairwise.label,
)
def test_options_together_resume_with_the_same_bits(row, tmp_path):
  """The server is killed in the third round, and a client in the second."""
  run = Run(row)
  times = [t for t, e in run.found.effects if isinstance(e, events.RoundEnded)]
  again = Run(row, [
    simulate.Fault((times[0] + times[1]) / 2, "kill", 1, 0.2),
    simulate.Fault((times[1] + times[2]) / 2 + 1, "server", 0, 1.0),
  ])
  assert again.end.finished == run.end.finished == f"{ROUNDS} rounds have ended"
  path = tmp_path / "server.npz"
  snapshot.write(path, again.end, again.made.rules)
  for found in (again.end, snapshot.read(path, run.made.rules)):
    for name in ("params", "published"):
      np.testing.assert_array_equal(
        getattr(found, name), getattr(run.end, name)
      )
    for x, y in zip(found.optimizer, run.end.optimizer, strict=True):
      np.testing.assert_array_equal(x, y)
    assert found.differences == run.end.differences
    assert found.history == run.end.history
