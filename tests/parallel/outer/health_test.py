"""Health checks: a diverged worker is left out of the exchange."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from parallel import collectives
from parallel.axes import Axis, make_mesh
from parallel.collectives import ranks_here
from parallel.ledger import ledger
from parallel.outer import health
from parallel.outer.base import OuterLoop
from parallel.outer.dc_s3gd import DCS3GD
from parallel.outer.diloco import _CLIENTS_FOLD, DiLoCo
from parallel.outer.eager import Eager
from parallel.outer.fragments import fragments
from parallel.outer.joining import elastic_adapter
from parallel.outer.noloco import NoLoCo
from parallel.outer.optimizers import Nesterov
from parallel.outer.sparseloco import SparseLoCo
from parallel.outer.streaming import Streaming
from parallel.wire import Wire
from tests.parallel.outer.small_run import (
  BLOCK_DIMS,
  INNER_RATE,
  LAYERS,
  M,
  draw,
  each,
  exchange,
  run,
)

SICK = M - 1
OUTER = Nesterov(0.7, 0.6)
FACTOR = 10.0
RULE = health.ExclusionRule(outlier_factor=FACTOR)


def judging(worker, wire=None, **options):
  return exchange(wire, worker, rule=RULE, **options)


def streaming(worker, wire=None, pieces=1, **options):
  overlap = 2 if pieces > 1 else 1
  return Streaming(
    worker, 6, OUTER, judging(worker, wire, **options),
    fragments({"blocks": LAYERS}, 3, True), (overlap,), 0.5, pieces,
  )


INT4 = {"wire": Wire("int4", 2), "error_feedback": True}
# Name: the loop; the step before which a worker diverges, the step after which
# it is left out, and the number of steps until the second exchange is complete.
LOOPS = {
  "diloco": (lambda w: DiLoCo(w, 2, OUTER, judging(w)), 1, 2, 4),
  "diloco int4": (lambda w: DiLoCo(w, 2, OUTER, judging(w, **INT4)), 1, 2, 4),
  "streaming": (streaming, 5, 7, 9),
  "streaming at once": (
    lambda w: Streaming(
      w, 6, OUTER, judging(w), fragments({"blocks": LAYERS}, 3, True), (0,)
    ), 5, 6, 8,
  ),
  "streaming in pieces": (lambda w: streaming(w, pieces=2, **INT4), 5, 7, 10),
  "eager": (lambda w: Eager(w, 2, OUTER, judging(w)), 1, 2, 4),
  "dc_s3gd": (lambda w: DCS3GD(w, judging(w), 0.3), 0, 1, 3),
  "sparseloco": (
    lambda w: SparseLoCo(
      w, 2, 0.7, BLOCK_DIMS, 0.8, 6, 4, rule=RULE
    ), 1, 2, 4,
  ),
}


def spoiled(worker, step, value, sick=SICK):
  """Returns a change of one worker's parameters and gradients at a step."""

  def change(trees, number):
    if number != step:
      return trees
    return jax.vmap(
      lambda here, p: each(lambda x: jnp.where(here, x + value, x), p)
    )(ranks_here(worker) == sick, trees)

  return change


def same_numbers(ours, theirs):
  # Programs may fuse products and sums differently, which saves a rounding.
  each(
    lambda a, b: np.testing.assert_allclose(a, b, atol=5e-7), ours, theirs
  )


@pytest.mark.rotated
@pytest.mark.parametrize(
  ("name", "devices"),
  [*((name, M) for name in LOOPS), ("dc_s3gd", 1)],
)
def test_diverged_worker_does_not_affect_the_others(name, devices):
  """The diverged worker restarts from the outer parameters and rejoins."""
  make, when, out, back = LOOPS[name]
  value = 1e4 if name == "diloco" else np.nan
  worker = Axis("worker", M, devices)
  alone = run(make(Axis("worker", SICK, min(devices, SICK))), back)
  found = run(make(worker), back, spoiled(worker, when, value))
  for (ours, state, _), (theirs, their_state, _) in zip(
    found[: back - 1], alone[: back - 1], strict=True
  ):
    same_numbers(each(lambda x: x[:SICK], ours), theirs)
    for key in {"params", "mean"} & state.keys():
      same_numbers(state[key], their_state[key])
  params, state, _ = found[out - 1]
  np.testing.assert_array_equal(state["workers"]["left_out"], [0, 0, 1])
  # Eager's workers have separate outer parameters.
  given = state.get("params") or each(
    lambda x: x[SICK], state["workers"]["params"]
  )
  each(np.testing.assert_array_equal, each(lambda x: x[SICK], params), given)
  # The worker is included again: the outer parameters differ from the others'.
  _, state, phi = found[back - 1]
  np.testing.assert_array_equal(state["workers"]["left_out"], [0, 0, 1])
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, found[-1])))
  differ = each(lambda a, b: (a != b).any(), phi, alone[back - 1][2])
  assert any(jax.tree.leaves(differ))


@pytest.mark.parametrize("value", [np.nan, 1e4])
@pytest.mark.parametrize("sick", range(M))
def test_healthy_worker_of_a_pair_determines_both_updates(sick, value):
  """Both apply the healthy worker's delta; the diverged one is left out."""
  worker = Axis("worker", M, M)
  loop = NoLoCo(worker, 1, 0.7, 0.5, 0.3, rule=RULE)
  partners = [
    dict(loop._pairs(loop.plan(n).variant)) for n in range(6)
  ]
  step = next(n for n, p in enumerate(partners) if n and p[sick] != sick)
  other = partners[step][sick]
  found = run(loop, step + 1, spoiled(worker, step, value, sick))
  before = found[step - 1][1]["workers"]
  after = found[step][1]["workers"]
  grads = draw(1, step + 1, M)
  for s_before, s_after, phi, g in zip(
    *map(jax.tree.leaves, (
      before["momentum"], after["momentum"], before["params"], grads
    )), strict=True,
  ):
    for i, j in ((sick, other), (other, sick)):
      received = s_after[i] - 0.5 * s_before[i] + 0.3 * (phi[i] - phi[j]) / 2
      np.testing.assert_allclose(
        received, -0.7 * INNER_RATE * g[step, other], atol=1e-5
      )
  np.testing.assert_array_equal(after["left_out"], np.arange(M) == sick)


@pytest.mark.parametrize(("norms", "factor", "expected"), [
  ([1, 2, 3], 10, [1, 1, 1]),
  ([1, 2, 21], 10, [1, 1, 0]),
  ([1, 2, 20], 10, [1, 1, 1]),
  ([1, 11], 10, [1, 0]),
  ([np.nan, 11], 10, [0, 1]),
  ([np.inf, 3, 1, np.nan], 2, [0, 0, 1, 0]),
  ([0, 0, 5], 10, [1, 1, 1]),
  ([1, 1e30, np.inf], 0, [1, 1, 0]),
  ([np.nan, np.nan], 10, [0, 0]),
])
def test_norm_is_judged_by_the_lower_median(norms, factor, expected):
  found = health.healthy(jnp.asarray(norms, jnp.float32), factor)
  np.testing.assert_array_equal(found, np.array(expected, bool))


def test_clients_are_sampled_among_healthy_ones():
  """With too few healthy clients, the sample is smaller."""
  assert _CLIENTS_FOLD > 1e6  # more than a model has parameters
  worker = Axis("worker", 4)
  loop = DiLoCo(worker, 1, OUTER, exchange(worker=worker), clients=2)
  for number in range(8):
    for well in ([1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 1, 0]):
      mask = np.asarray(loop._drawn(number, jnp.asarray(well, jnp.float32)))
      assert (mask <= well).all()
      assert mask.sum() == min(2, sum(well))


def test_waiting_for_nan_changes_nothing():
  """`order_after` orders collectives of healthy and diverged workers."""

  def wait(nan):
    results = nan, -jnp.inf * jnp.ones(2), jnp.int32(3)
    return collectives.order_after(
      {"x": jnp.arange(3), "y": jnp.ones(2)}, results
    )

  found = jax.jit(jax.shard_map(
    wait, mesh=make_mesh({"worker": Axis("worker", 1)}), in_specs=P(),
    out_specs=P(),
  ))(jnp.full(2, jnp.nan))
  np.testing.assert_array_equal(found["x"], [0, 1, 2])
  np.testing.assert_array_equal(found["y"], [1, 1])


MEAN = {"eager": ("params", "optimizer", "delta", "share"),
        "eager int4": ("params", "optimizer", "delta", "share"),
        "noloco": ("params", "momentum"), "nothing": ()}


@pytest.mark.parametrize("name", [*LOOPS, *sorted(set(MEAN) - set(LOOPS))])
def test_joining_worker_starts_from_the_outer_parameters(name):
  """Starts from the mean where workers have separate ones; others stay."""
  worker = Axis("worker", M)
  others = {
    "noloco": lambda w: NoLoCo(w, 2, 0.7, 0.5, 0.3), "nothing": OuterLoop,
    "eager int4": lambda w: Eager(w, 2, OUTER, judging(w, **INT4)),
  }
  loop = (others.get(name) or LOOPS[name][0])(worker)
  rng = np.random.default_rng(0)

  def some(x):
    return jnp.asarray(rng.normal(size=x.shape), x.dtype)

  def without_last(x):
    return x.at[SICK:].set(0)

  start = draw(0)
  state = each(some, loop.init(start))
  state |= {
    key: each(without_last, state[key])
    for key in ("workers", "mask") if key in state
  }
  params = each(lambda x: without_last(some(np.stack([x] * M))), start)
  new, after = elastic_adapter(loop).joined(params, state, SICK)
  first = each(lambda x: x[:SICK], (params, state.get("workers", {})))
  each(
    np.testing.assert_array_equal,
    each(lambda x: x[:SICK], (new, after.get("workers", {}))), first,
  )
  own = state.get("workers", {}).get("params", params)
  expected = state.get("params") or each(lambda x: x[:SICK].mean(0), own)
  each(
    lambda x, y: np.testing.assert_allclose(x[SICK], y, rtol=1e-6),
    new, expected,
  )
  for key, part in after.get("workers", {}).items():
    for x, y in zip(*map(jax.tree.leaves, (part, state["workers"][key])),
                    strict=True):
      mean = y[:SICK].mean(0) if key in MEAN.get(name, ()) else 0 * y[0]
      np.testing.assert_allclose(x[SICK], mean, rtol=1e-6)
  each(
    np.testing.assert_array_equal,
    {k: v for k, v in after.items() if k != "workers"},
    {k: v for k, v in state.items() if k != "workers"},
  )


def test_norm_covers_all_parameters_of_a_worker():
  tree = draw(5, M)
  flat = np.concatenate([x.reshape(M, -1) for x in jax.tree.leaves(tree)], 1)
  np.testing.assert_allclose(
    health.worker_norms(tree), np.linalg.norm(flat, axis=1), rtol=1e-5
  )


def test_order_after_a_verdict_costs_nothing_unless_it_is_needed():
  tree, mask = {"x": jnp.ones(3)}, jnp.ones(2)
  assert health.ExclusionRule().order_after(tree, mask) is tree
  mesh = make_mesh({"worker": Axis("worker", 1)})
  program = jax.make_jaxpr(jax.shard_map(
    health.ExclusionRule(ordered=True).order_after, mesh=mesh, in_specs=P(),
    out_specs=P(),
  ))(tree, mask)
  assert "bitcast" in str(program)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_health_check_sends_the_bytes_of_its_formula(devices):
  """One norm per worker on a device."""
  worker = Axis("worker", 4, devices)
  lowered = jax.jit(jax.shard_map(
    lambda tree: exchange(worker=worker).judge(tree).mask,
    mesh=make_mesh({"worker": worker}), in_specs=P("worker"), out_specs=P(),
  )).lower(draw(5, 4))
  sent = ledger.collectives(lowered, make_mesh({"worker": worker}))
  assert sum(c.bytes * c.count for c in sent if c.axes) == sum(
    health.sent_bytes(worker).values()
  )
