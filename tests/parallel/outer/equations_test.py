"""Outer loops compared with their equations, rewritten in float64.

Three workers have a few parameters each and random gradients; the inner
optimizer is SGD. Momentum and decay are on, and there are at least three
rounds: the first round starts from zeros, which hides a wrong sign or factor.
"""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from parallel.axes import Axis, make_mesh
from parallel.ledger import ledger
from parallel.outer import health, noloco
from parallel.outer.base import Plan, broadcast_first
from parallel.outer.data_parallel import DataParallel
from parallel.outer.dc_s3gd import DCS3GD
from parallel.outer.diloco import DiLoCo
from parallel.outer.eager import Eager
from parallel.outer.fragments import fragments
from parallel.outer.noloco import NoLoCo
from parallel.outer.optimizers import Nesterov, Optax
from parallel.outer.sparseloco import SparseLoCo
from parallel.outer.streaming import Streaming
from parallel.wire import Wire
from tests.parallel.outer.small_run import (
  BLOCK_DIMS,
  INNER_RATE,
  LAYERS,
  WORKER,
  M,
  draw,
  each,
  exchange,
  run,
  wide,
)

RATE, MOMENTUM = 0.7, 0.6


def updates_of(num_steps):
  """Returns the inner updates of each step, ``[M, ...]`` each."""
  grads = wide(draw(1, num_steps, M))
  return [
    each(lambda g, n=n: -INNER_RATE * g[n], grads) for n in range(num_steps)
  ]


def workers_start():
  return each(lambda x: np.stack([x] * M), wide(draw(0)))


def nesterov(params, mean, momentum):
  """Nesterov step in Sutskever's form, as in DiLoCo: parameters, momentum."""
  momentum = each(
    lambda v, d: MOMENTUM * v + d, momentum or zeros_like(mean), mean
  )
  step = each(lambda v, d: RATE * (d + MOMENTUM * v), momentum, mean)
  return each(np.subtract, params, step), momentum


def adam(params, mean, state):
  """Adam's step with optax' defaults: parameters, (moments, number of steps).
  """
  (first, second), count = state or ((zeros_like(params),) * 2, 0)
  count += 1
  first = each(lambda m, d: 0.9 * m + 0.1 * d, first, mean)
  second = each(lambda v, d: 0.999 * v + 0.001 * d * d, second, mean)
  step = each(
    lambda m, v: RATE * (m / (1 - 0.9**count))
    / (np.sqrt(v / (1 - 0.999**count)) + 1e-8),
    first, second,
  )
  return each(np.subtract, params, step), ((first, second), count)


def zeros_like(tree):
  return each(np.zeros_like, tree)


def assert_close(ours, theirs, atol=2e-6):
  each(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=atol),
    ours, theirs,
  )


def test_data_parallel_steps_by_the_mean_gradient():
  params = workers_start()
  for found, updates in zip(
    run(DataParallel(WORKER), 3), updates_of(3), strict=True
  ):
    params = each(lambda p, u: p + u.mean(axis=0), params, updates)
    assert_close(found[0], params)
    assert_close(found[2], each(lambda p: p[0], params))


@pytest.mark.parametrize(
  ("weights", "codec"),
  [((), "none"), ((1.0, 2.0, 5.0), "none"), ((1.0, 2.0, 5.0), "int8")],
)
def test_diloco_equals_its_equation(weights, codec):
  loop = DiLoCo(
    WORKER, 2, Nesterov(RATE, MOMENTUM),
    exchange(Wire(codec, 2), weights=weights),
  )
  tolerance = {} if codec == "none" else {"atol": 5e-3}
  share = np.array(weights or (1.0,) * M)
  share = share / share.sum()
  theta, phi = workers_start(), wide(draw(0))
  momentum = zeros_like(phi)
  found = run(loop, 7)
  for number, updates in enumerate(updates_of(7), 1):
    theta = each(np.add, theta, updates)
    if number % 2 == 0:
      mean = each(
        lambda f, t: f - np.tensordot(share, t, 1), phi, theta
      )
      phi, momentum = nesterov(phi, mean, momentum)
      theta = each(lambda f: np.stack([f] * M), phi)
    assert_close(found[number - 1][0], theta, **tolerance)
    assert_close(found[number - 1][2], phi, **tolerance)


def test_sampled_clients_are_averaged_with_their_weights():
  weights = np.array([1.0, 2.0, 5.0])
  loop = DiLoCo(
    WORKER, 2, Optax(optax.sgd(1.0)), exchange(weights=tuple(weights)),
    clients=2,
  )
  theta = workers_start()
  left_out = set()
  found = run(loop, 8)
  for number, updates in enumerate(updates_of(8), 1):
    theta = each(np.add, theta, updates)
    if number % 2 == 0:
      # Two of three workers are drawn: one of the three means matches.
      masks = [1 - np.eye(M)[out] for out in range(M)]
      means = [
        each(lambda t, h=h: np.average(t, 0, weights * h), theta) for h in masks
      ]
      distances = [
        max(np.abs(a - b).max() for a, b in zip(
          *map(jax.tree.leaves, (m, found[number - 1][2])), strict=True
        ))
        for m in means
      ]
      out = int(np.argmin(distances))
      left_out.add(out)
      assert distances[out] < 1e-5 < sorted(distances)[1]
      theta = each(lambda m: np.stack([m] * M), means[out])
  assert len(left_out) > 1  # the sample differs between rounds


@pytest.mark.parametrize("feedback", ["int4", "bfloat16"])
def test_error_feedback_carries_the_rounding_error_forward(feedback):
  """With outer SGD(1), what was sent plus the residual is the whole update."""
  wire = (
    Wire(dtype="bfloat16") if feedback == "bfloat16" else Wire("int4", 2)
  )
  loop = DiLoCo(
    WORKER, 1, Optax(optax.sgd(1.0)), exchange(wire, error_feedback=True)
  )
  # The bfloat16 sum is rounded once more, which no residual contains.
  tolerance = 1e-2 if feedback == "bfloat16" else 1e-5
  start, told = wide(draw(0)), zeros_like(wide(draw(0)))
  for (_, state, phi), updates in zip(run(loop, 4), updates_of(4), strict=True):
    told = each(lambda t, u: t - u.mean(axis=0), told, updates)
    left = each(lambda e: e.mean(axis=0), wide(state["workers"]["residual"]))
    assert max(np.abs(x).max() for x in jax.tree.leaves(left)) > 1e-4
    each(
      lambda s, f, rest, t: np.testing.assert_allclose(
        s - f + rest, t, atol=tolerance
      ), start, wide(phi), left, told,
    )


def test_eager_equals_its_equation():
  """d~_m(k) = d_m(k) / M + (mean(k - 1) - d_m(k - 1) / M), and momentum."""
  found = run(
    Eager(WORKER, 2, Nesterov(RATE, MOMENTUM), exchange()), 7
  )
  theta = phi = workers_start()
  last, momentum = zeros_like(phi), zeros_like(phi)
  for number, updates in enumerate(updates_of(7), 1):
    theta = each(np.add, theta, updates)
    if number % 2 == 0:
      delta = each(np.subtract, phi, theta)
      eager = each(
        lambda d, e: d / M + (e.mean(axis=0) - e / M), delta, last
      )
      phi, momentum = nesterov(phi, eager, momentum)
      theta, last = phi, delta
    assert_close(found[number - 1][0], theta)
    assert_close(found[number - 1][2], each(lambda x: x.mean(axis=0), phi))


def test_eager_sends_at_the_start_of_a_round():
  """The exchange therefore overlaps with the whole round."""
  found = run(Eager(WORKER, 3, Nesterov(RATE, MOMENTUM), exchange()), 7)
  for first in (3, 6):
    told = found[first - 1][1]["workers"]["delta"]
    assert_close(
      found[first][1]["mean"], each(lambda d: d.mean(axis=0), wide(told))
    )


def test_dc_s3gd_equals_its_equation():
  """The correction is towards the parameters that receive the update."""

  def norm(tree):  # [W, ...] -> [W]
    return jnp.sqrt(sum(
      jnp.sum(jnp.square(x), axis=tuple(range(1, x.ndim)))
      for x in jax.tree.leaves(tree)
    ))

  compensation = 0.3
  found = run(
    DCS3GD(WORKER, exchange(rule=health.ExclusionRule(norm)), compensation), 4
  )
  common, update = wide(draw(0)), zeros_like(workers_start())
  for number, plain in enumerate(updates_of(4)):
    grads = each(lambda u: u / -INNER_RATE, plain)
    correction = each(
      lambda g, u: g * g * (u.mean(axis=0) - u), grads, update
    )
    sizes = [np.sqrt(sum(
      np.square(x).reshape(M, -1).sum(axis=1) for x in jax.tree.leaves(tree)
    )) for tree in (grads, correction)]
    strength = compensation * sizes[0] / np.where(sizes[1] > 0, sizes[1], 1)
    common = each(lambda w, u: w + u.mean(axis=0), common, update)
    update = each(
      lambda g, c, s=strength: -INNER_RATE * (
        g + s.reshape(M, *[1] * (g.ndim - 1)) * c
      ), grads, correction,
    )
    params, state, evaluated = found[number]
    assert_close(state["workers"]["update"], update)
    assert_close(state["params"], common)
    assert_close(params, each(np.add, common, update))
    assert_close(evaluated, each(lambda p: p.mean(axis=0), wide(params)))


def two_bit_top_k(x, chunk, k):
  """Signs of a chunk's k largest, times the mean of the upper or lower half."""
  kept = np.zeros_like(x)
  for start in range(0, len(x), chunk):
    part = x[start : start + chunk]
    order = np.argsort(-np.abs(part))
    for half in (order[: k // 2], order[k // 2 : k]):
      size = np.abs(part[half]).sum() / (k // 2)  # a chunk is zero-padded
      kept[start + half] = np.sign(part[half]) * size
  return kept


@pytest.mark.parametrize("weights", [(), (1.0, 2.0, 5.0)])
def test_sparseloco_equals_its_equation(weights):
  decay, chunk, k = 0.8, 6, 4
  loop = SparseLoCo(WORKER, 2, RATE, BLOCK_DIMS, decay, chunk, k, weights)
  share = np.array(weights or (1.0,) * M)
  theta, phi = workers_start(), wide(draw(0))
  residual = zeros_like(theta)

  def sent(x, dims):
    rows = x.reshape(-1, int(np.prod(x.shape[1 + dims :])))
    return np.stack(
      [two_bit_top_k(row, chunk, k) for row in rows]
    ).reshape(x.shape)

  found = run(loop, 7)
  for number, updates in enumerate(updates_of(7), 1):
    theta = each(np.add, theta, updates)
    if number % 2 == 0:
      total = each(lambda e, f, t: decay * e + f - t, residual, phi, theta)
      kept = each(sent, total, BLOCK_DIMS)
      residual = each(np.subtract, total, kept)
      phi = each(
        lambda f, c: f - RATE * np.average(c, 0, share), phi, kept
      )
      theta = each(lambda f: np.stack([f] * M), phi)
      assert_close(found[number - 1][1]["workers"]["residual"], residual)
    assert_close(found[number - 1][0], theta)
    assert_close(found[number - 1][2], phi)


def test_noloco_equals_its_equation():
  """Phi differ from the second round on; both terms act from the third on."""
  momentum, pull = 0.5, 0.3
  loop = NoLoCo(WORKER, 2, RATE, momentum, pull)
  theta = phi = workers_start()
  speed = zeros_like(phi)
  met = set()
  found = run(loop, 10)
  for number, updates in enumerate(updates_of(10), 1):
    theta = each(np.add, theta, updates)
    if number % 2 == 0:
      drawn = loop.plan(number - 1).variant
      met.add(drawn)
      j = np.array(noloco.partners_of_round(M, drawn))
      delta = each(np.subtract, phi, theta)
      speed = each(
        lambda s, d, f, j=j: momentum * s - RATE * (d + d[j]) / 2
        - pull * (f - f[j]) / 2,
        speed, delta, phi,
      )
      phi = theta = each(np.add, phi, speed)
      assert_close(found[number - 1][1]["workers"]["momentum"], speed)
    assert_close(found[number - 1][0], theta)
    assert_close(found[number - 1][2], each(lambda x: x.mean(axis=0), phi))
  assert len(met) > 1


def fragment_of(layer_sets, number):
  """Returns functions that read and write a fragment of trees of layers."""

  def select(tree, dim):
    if number == len(layer_sets):
      return {"head": tree["head"]}
    index = (slice(None),) * dim + (layer_sets[number],)
    return {"w": tree["blocks"]["w"][index]}

  def write(tree, part, dim):
    if number == len(layer_sets):
      return {**tree, "head": part["head"]}
    w = tree["blocks"]["w"].copy()
    w[(slice(None),) * dim + (layer_sets[number],)] = part["w"]
    return {**tree, "blocks": {"w": w}}

  return select, write


def streaming_by_hand(
  sync_every, layer_sets, taus, keep, num_steps, step=nesterov,
  share=(1 / M,) * M,
):
  """Algorithm 2: returns theta and phi after every step.

  ``step`` maps a fragment's parameters, mean and state to new ones; each
  fragment has its own state. ``share`` has the weights of the workers.
  """
  count = len(layer_sets) + 1
  spacing = sync_every // count
  theta, phi = workers_start(), wide(draw(0))
  states = {}
  sent, after = {}, []
  for now, updates in enumerate(updates_of(num_steps), 1):
    theta = each(np.add, theta, updates)
    for fragment in range(count):
      select, write = fragment_of(layer_sets, fragment)
      # Sent every H steps, starting one round after its offset in the first.
      turn = sync_every + fragment * spacing
      if now >= turn and (now - turn) % sync_every == 0:
        sent[fragment, now] = each(
          lambda f, t: f - np.tensordot(share, t, 1),
          select(phi, 0), select(theta, 1),
        )
      for tau in sorted(set(taus)):
        mean = sent.get((fragment, now - tau))
        if mean is None:
          continue
        if tau == min(taus):  # the outer step is taken once
          new, states[fragment] = step(
            select(phi, 0), mean, states.get(fragment)
          )
          phi = write(phi, new, 0)
        here = np.array(taus) == tau
        mine = each(
          lambda t, f, here=here: np.where(
            here.reshape(M, *[1] * f.ndim), keep * t + (1 - keep) * f, t
          ), select(theta, 1), select(phi, 0),
        )
        theta = write(theta, mine, 1)
    after.append((theta, phi))
  return after


STREAMING = {
  "at once, consecutive layers": (
    dict(sync_every=6, strided=False, overlap=(0, 0, 0), keep=0.0, pieces=1),
    [[0, 1, 2], [3, 4, 5]],
  ),
  "late, strided layers": (
    dict(sync_every=6, strided=True, overlap=(1, 2, 2), keep=0.25, pieces=1),
    [[0, 2, 4], [1, 3, 5]],
  ),
  # Two fragments are in flight at once; a round's last two steps send nothing.
  "in pieces": (
    dict(sync_every=8, strided=True, overlap=(3, 4, 3), keep=0.25, pieces=2),
    [[0, 2, 4], [1, 3, 5]],
  ),
}


# Adam divides by the square root of small numbers.
OUTER = {
  "nesterov": (Nesterov(RATE, MOMENTUM), nesterov, 2e-6),
  "adam": (Optax(optax.adam(RATE)), adam, 3e-5),
}


@pytest.mark.mixed_dtypes  # Adam divides by powers with an integer exponent
@pytest.mark.parametrize(("name", "optimizer"), [
  *((name, "nesterov") for name in STREAMING),
  ("at once, consecutive layers", "adam"), ("in pieces", "adam"),
])
def test_streaming_equals_its_equation(name, optimizer):
  """Each fragment keeps its momentum, or count, until its next round."""
  options, layer_sets = STREAMING[name]
  num_steps = 24
  ours, by_hand, atol = OUTER[optimizer]
  loop = Streaming(
    WORKER, options["sync_every"], ours, exchange(),
    fragments({"blocks": LAYERS}, 3, options["strided"]), options["overlap"],
    options["keep"], options["pieces"],
  )
  expected = streaming_by_hand(
    options["sync_every"], layer_sets, options["overlap"], options["keep"],
    num_steps, by_hand,
  )
  for (params, _, phi), (theta, outer) in zip(
    run(loop, num_steps), expected, strict=True
  ):
    assert_close(params, theta, atol)
    assert_close(phi, outer, atol)


@pytest.mark.mixed_dtypes
def test_fragments_count_their_outer_steps_separately():
  """The first step of Adam moves every element by the learning rate."""
  loop = Streaming(
    WORKER, 6, Optax(optax.adam(RATE)), exchange(),
    fragments({"blocks": LAYERS}, 3, strided=True), (1,),
  )
  found = run(loop, 13)
  counts = [
    optax.tree_utils.tree_get(state["optimizer"], "count").tolist()
    for _, state, _ in found
  ]
  assert counts[5:] == [
    [0, 0, 0], [1, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 0], [1, 1, 1],
    [1, 1, 1], [2, 1, 1],
  ]
  moved = each(
    lambda x, y: np.abs(x - y), wide(found[11][2]), wide(draw(0))
  )
  each(lambda x: np.testing.assert_allclose(x, RATE, rtol=1e-3), moved)


@pytest.mark.parametrize("pieces", [1, 2])
def test_fragments_have_separate_residuals(pieces):
  """With outer SGD(1), sent plus residual is the whole update."""
  loop = Streaming(
    WORKER, 6, Optax(optax.sgd(1.0)),
    exchange(Wire("int4", 2), error_feedback=True),
    fragments({"blocks": LAYERS}, 3, True), (2,), 0.0, pieces,
  )
  found = run(loop, 16)
  residuals = [wide(state["workers"]["residual"]) for _, state, _ in found]
  # Even layers are sent after updates 6 and 12, odd ones after 8 and 14, the
  # rest after 10; with two pieces, in the next step and in the one after it.
  changed = [
    np.abs(after["blocks"]["w"] - before["blocks"]["w"]).max(axis=(0, 2)) > 0
    for before, after in itertools.pairwise(residuals)
  ]
  steps = {
    layer: {n + 2 for n, where in enumerate(changed) if where[layer]}
    for layer in range(LAYERS)
  }
  even = {t + i for t in (7, 13) for i in range(pieces)}
  odd = {t + i for t in (9, 15) for i in range(pieces)}
  assert steps == {n: odd if n % 2 else even for n in range(LAYERS)}
  # Even layers in the first exchange: the decoded part, and the residual.
  start = wide(draw(0))["blocks"]["w"]
  went = -sum(u["blocks"]["w"] for u in updates_of(6)).mean(axis=0)
  _, state, phi = found[7]
  left = state["workers"]["residual"]["blocks"]["w"].mean(axis=0)
  received = start - phi["blocks"]["w"]
  np.testing.assert_allclose(
    (received + left)[::2], went[::2], atol=1e-5
  )


@pytest.mark.parametrize("devices", [1, 2])
def test_values_of_worker_0_keep_the_sign_of_zero(devices):
  """A float sum would turn -0 into 0."""
  worker = Axis("worker", 4, devices)
  x = np.array([[-0.0, 0.0, -1.5], *np.ones((3, 3))], "f4")
  found = jax.jit(jax.shard_map(
    lambda x: broadcast_first(x, worker), mesh=make_mesh({"worker": worker}),
    in_specs=P("worker"), out_specs=P(),
  ))(x)
  np.testing.assert_array_equal(found.view("u4"), x[0].view("u4"))


@pytest.mark.parametrize(("workers", "devices"), [(3, 3), (6, 3), (6, 2)])
def test_noloco_sends_the_bytes_of_its_formula(workers, devices):
  """Includes an odd number of workers, and several workers on a device."""
  worker = Axis("worker", workers, devices)
  mesh = make_mesh({"worker": worker})
  for seed in range(3):
    loop = NoLoCo(worker, 2, RATE, 0.5, 0.3, seed)
    start = draw(0)
    state = loop.init(start)
    plan = loop.plan(loop.steady_round[-1])
    specs = {"workers": each(lambda _: P("worker"), state["workers"])}
    f = jax.shard_map(
      lambda p, s, loop=loop, plan=plan: loop.finish(p, p, s, plan), mesh=mesh,
      in_specs=(P("worker"), specs), out_specs=(P("worker"), specs),
    )
    params = each(lambda x: np.stack([x] * workers), start)
    found = collections.Counter()
    for c in ledger.collectives(jax.jit(f).lower(params, state), mesh):
      found[c.dtype] += c.bytes * c.count
    assert +found == loop.sent_bytes(start)


@pytest.mark.parametrize("workers", range(1, 10))
def test_noloco_workers_all_meet_once_in_a_tournament(workers):
  """With an odd number, each sits out once and is then its own partner."""
  rounds = [
    noloco.partners_of_round(workers, number)
    for number in range(noloco.num_pairing_rounds(workers))
  ]
  for partners in rounds:
    assert [partners[j] for j in partners] == list(range(workers))
  met = collections.Counter(
    pair for partners in rounds for pair in enumerate(partners)
  )
  expected = itertools.product(range(workers), repeat=2)
  if workers % 2 == 0:
    expected = ((i, j) for i, j in expected if i != j)
  assert met == collections.Counter(expected)


@pytest.mark.parametrize("number", range(3))
def test_noloco_worker_that_sits_out_takes_its_own_step(number):
  """The outer gradient of one of three workers is its own; nothing pulls."""
  worker = Axis("worker", 3)
  loop = NoLoCo(worker, 1, RATE, 0.5, 0.3)
  mesh = make_mesh({"worker": worker})
  phi, theta, momentum = (
    {"w": np.random.default_rng(seed).normal(size=(3, 5)).astype("f4")}
    for seed in range(3)
  )
  state = loop.init({"w": phi["w"][0]})
  state["workers"] |= {"params": phi, "momentum": momentum}
  specs = {"workers": each(lambda _: P("worker"), state["workers"])}
  params, _ = jax.jit(jax.shard_map(
    lambda p, s: loop.finish(p, each(jnp.zeros_like, p), s, Plan(number)),
    mesh=mesh,
    in_specs=(P("worker"), specs), out_specs=(P("worker"), specs),
  ))(theta, state)
  partners = noloco.partners_of_round(3, number)
  (alone,) = (i for i in range(3) if partners[i] == i)
  phi, theta, momentum = (x["w"][alone] for x in (phi, theta, momentum))
  expected = phi + 0.5 * momentum - RATE * (phi - theta)
  np.testing.assert_allclose(params["w"][alone], expected, rtol=1e-5)


def test_noloco_pairs_are_drawn_from_all_rounds():
  loop = NoLoCo(Axis("worker", 5), 2, RATE, 0.5, 0.3)
  plans = [loop.plan(step).variant for step in range(80)]
  assert set(plans[::2]) == {None}  # no exchange within a round
  assert set(plans[1::2]) == set(range(5))


def test_noloco_pairs_depend_on_the_seed_only():
  def drawn(seed):
    loop = NoLoCo(
      Axis("worker", 8), sync_every=1, rate=RATE, momentum=0.5, pull=0.3,
      seed=seed,
    )
    return [loop.plan(step).variant for step in range(20)]

  assert drawn(0) == drawn(0)
  assert drawn(0) != drawn(1)
  loop = NoLoCo(WORKER, 1, RATE, 0.5, 0.3)
  assert loop == NoLoCo(WORKER, 1, RATE, 0.5, 0.3, seed=0)
  assert exchange() == exchange(seed=0, error_feedback=False)


@pytest.mark.parametrize("make", [DiLoCo, Eager])
def test_rounds_have_distinct_rounding_noise(make):
  """The number of an exchange determines its random draws."""
  loop = make(WORKER, 2, Nesterov(RATE, MOMENTUM), exchange())
  numbers = [
    plan.numbers for plan in map(loop.plan, range(2, 22))
    if plan.variant in (True, (True, False))
  ]
  assert len(numbers) == len(set(numbers)) == 10


def test_pieces_have_distinct_rounding_noise():
  """Deltas are equal, so that means of pieces differ by their draws only."""
  loop = Streaming(
    WORKER, 6, Nesterov(RATE, MOMENTUM),
    exchange(Wire("int4", 64, stochastic=True)),
    fragments({"blocks": LAYERS}, 3, strided=True), (2,), pieces=2,
  )
  row = np.tile(np.linspace(0.0, 1.0, 64, dtype="f4"), 2)  # a block per piece
  start = {"blocks": {"w": np.stack([row] * LAYERS)}, "head": row}

  def mean_here(kind, start, numbers):
    slot = loop.fragments.take(start, kind, numbers.place, 0)
    deltas = each(
      lambda x: jax.lax.pcast(x[None], "worker", to="varying"), slot
    )
    slot, _ = loop._exchange_piece(
      deltas, slot, {"workers": {}}, jnp.ones(M), kind, numbers
    )
    return loop._cutter.take(slot, numbers.piece, 0)

  @functools.partial(jax.jit, static_argnums=0)
  def mean_of_piece(kind, start, numbers):
    return jax.shard_map(
      functools.partial(mean_here, kind), mesh=make_mesh({"worker": WORKER}),
      in_specs=P(), out_specs=P(),
    )(start, numbers)

  found = []
  for plan in map(loop.plan, range(6, 24)):
    send, numbers = plan.variant.send, plan.numbers.send
    if send is not None:
      found.append(mean_of_piece(send.kind, start, numbers))
  blocks = [
    tuple(block)
    for mean in jax.tree.leaves(jax.device_get(found))
    for block in mean.reshape(-1, 64)
  ]
  # Three rounds; two fragments of three layers, and the head; two pieces.
  assert len(blocks) == len(set(blocks)) == 3 * (2 * 3 + 1) * 2


def test_parameters_have_distinct_rounding_noise():
  """Deltas are equal, so that means of parameters differ by their draws."""
  rounded = exchange(Wire("int4", 64, stochastic=True))
  row = np.linspace(0.0, 1.0, 64, dtype="f4")

  def mean(deltas):
    deltas = each(lambda x: jax.lax.pcast(x[None], "worker", to="varying"),
                  deltas)
    return rounded.mean(deltas, {"workers": {}}, jnp.int32(0))[0]

  found = jax.jit(jax.shard_map(
    mean, mesh=make_mesh({"worker": WORKER}), in_specs=P(), out_specs=P(),
  ))({"blocks": {"w": row[None]}, "head": row})
  assert np.abs(found["blocks"]["w"][0] - found["head"]).max() > 0.01
  assert np.abs(found["head"] - row).max() < 0.2


def test_roundings_and_sampled_clients_depend_on_the_seed():
  row = np.linspace(0.0, 1.0, 64, dtype="f4")

  def drawn(seed):
    rounded = exchange(Wire("int4", 64, stochastic=True), seed=seed)
    loop = DiLoCo(WORKER, 1, Optax(optax.sgd(1.0)), rounded, clients=1)
    mean = jax.jit(jax.shard_map(
      lambda deltas: rounded.mean(each(
        lambda x: jax.lax.pcast(x[None], "worker", to="varying"), deltas
      ), {"workers": {}}, jnp.int32(0))[0]["head"],
      mesh=make_mesh({"worker": WORKER}), in_specs=P(), out_specs=P(),
    ))({"blocks": {"w": row[None]}, "head": row})
    clients = [
      int(np.argmax(loop._drawn(number, jnp.ones(M)))) for number in range(9)
    ]
    return tuple(mean.tolist()), tuple(clients)

  means, clients = zip(*map(drawn, (0, 0, 1)), strict=True)
  assert means[0] == means[1] != means[2]
  assert clients[0] == clients[1] != clients[2]


def test_eager_weighs_the_local_delta_as_the_mean_does():
  weights = (1.0, 2.0, 5.0)
  found = run(
    Eager(WORKER, 2, Nesterov(RATE, MOMENTUM), exchange(weights=weights)), 6
  )
  share = np.array(weights) / sum(weights)
  theta = phi = workers_start()
  last, momentum = zeros_like(phi), zeros_like(phi)
  for number, updates in enumerate(updates_of(6), 1):
    theta = each(np.add, theta, updates)
    if number % 2 == 0:
      delta = each(np.subtract, phi, theta)
      eager = each(
        lambda d, e: np.tensordot(share, e, 1) + ((d - e).T * share).T,
        delta, last,
      )
      phi, momentum = nesterov(phi, eager, momentum)
      theta, last = phi, delta
    assert_close(found[number - 1][0], theta)
