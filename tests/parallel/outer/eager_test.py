"""Eager updates with elastic membership."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from parallel.axes import Axis, make_mesh
from parallel.outer.base import Plan, stack_copies
from parallel.outer.eager import Eager
from parallel.outer.joining import elastic_adapter, with_worker_axis
from parallel.outer.optimizers import Optax
from tests.parallel.outer.small_run import draw, each, exchange

START = draw(0)
ONE = Axis("worker", 1)
LOOP = Eager(
  ONE, 1, Optax(optax.sgd(1.0)), exchange(worker=ONE), common=True
)


@functools.cache
def program(name, size):
  axis = Axis("worker", size)
  plan = Plan((name == "begin", name == "finish"), (1,))
  specs = {k: P("worker") if k == "workers" else P() for k in LOOP.init(START)}

  def run(state, weights, trees):
    loop = with_worker_axis(LOOP, axis, tuple(weights))
    found = getattr(loop, name)(*trees, state, plan)
    return found if name == "begin" else found[1]

  return jax.jit(jax.shard_map(
    run, mesh=make_mesh({"worker": axis}),
    in_specs=(specs, P(), P("worker")), out_specs=specs,
  ))


def hook(name, workers, weights, *trees):
  """Runs a hook on one device for workers that each have a state of the loop.

  Returns their states. Trees are ``[W, ...]``; "mask" is per worker.
  """
  own = each(lambda *x: jnp.concatenate(x), *[s["workers"] for s in workers])
  mask = jnp.concatenate([s["mask"] for s in workers])
  state = workers[0] | {"workers": own, "mask": mask}
  state = program(name, len(workers))(state, jnp.float32(weights), trees)
  return [
    state | {
      "workers": each(lambda x, i=i: x[i : i + 1], state["workers"]),
      "mask": state["mask"][i : i + 1],
    }
    for i in range(len(workers))
  ]


def stack(trees):
  return each(lambda *x: jnp.concatenate(x), *trees)


def finish(workers, weights, deltas):
  """Ends a round after workers have moved by ``deltas`` from their params."""
  params = stack([w["workers"]["params"] for w in workers])
  updates = each(lambda *d: -jnp.stack(d), *deltas)
  return hook("finish", workers, weights, params, updates)


def begin(workers, weights):
  params = stack([w["workers"]["params"] for w in workers])
  return hook("begin", workers, weights, params)


def came(workers):
  """Returns the state of a joining worker, which has the shared part only."""
  return elastic_adapter(LOOP).started(workers[0] | {
    key: LOOP.init(draw(99))[key] for key in ("workers", "mask")
  })


def assert_close(xs, ys):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), xs, ys)


@pytest.mark.parametrize("seed", [0, 2])
def test_updates_telescope_with_joining_and_leaving_workers(seed):
  """Params change by the sum of means, and by the worker's newest delta."""
  rng = np.random.default_rng(seed)
  workers = [LOOP.init(START) for _ in range(3)]
  total = each(np.zeros_like, START)

  def change():
    if len(workers) > 1 and rng.random() < 0.5:
      workers.pop(rng.integers(len(workers)))
    if rng.random() < 0.6:
      workers.insert(rng.integers(len(workers) + 1), came(workers))

  for number in range(6):
    change()
    weights = rng.integers(1, 5, len(workers)).astype("f4")
    if number:
      told = stack([w["workers"]["delta"] for w in workers])
      share = weights * np.concatenate([w["mask"] for w in workers])
      share /= share.sum()
      workers = begin(workers, weights)
      total = each(
        lambda t, d, s=share: t + np.tensordot(s, d, 1), total, told
      )
    change()
    weights = rng.integers(1, 5, len(workers)).astype("f4")
    deltas = [draw([seed, number, i]) for i in range(len(workers))]
    if number == 3:  # a joining worker diverges, and is left out
      workers.append(came(workers))
      deltas.append(each(lambda x: np.full_like(x, np.nan), START))
      weights = np.append(weights, np.float32(2))
    workers = finish(workers, weights, deltas)
    if number == 3:
      deltas[-1], weights[-1] = each(np.zeros_like, START), 0
    common = each(np.subtract, START, total)
    for worker, delta, share in zip(
      workers, deltas, weights / weights.sum(), strict=True
    ):
      assert_close(worker["params"], common)
      assert_close(worker["workers"]["params"], stack_copies(each(
        lambda c, d, s=share: c - s * d, common, delta
      ), ONE))


@pytest.mark.parametrize("hooks", [
  ("begin", "finish"), ("begin", "begin"), ("finish", "begin"),
  ("finish", "finish"),
])
def test_pending_delta_of_a_late_worker_is_applied_once(hooks):
  """The late worker's delta enters exactly one mean of the next rounds."""
  alone = LOOP.init(START)
  mine, first, second = (draw(i) for i in (1, 2, 3))
  late, other = finish([alone, alone], (1, 1), [mine, first])
  params, unsaid = late["workers"]["params"], mine
  if hooks[0] == "finish":
    late, other = begin([late, other], (1, 1))
    unsaid = draw(4)
    params = each(lambda p, d: p - d[None], params, unsaid)
  else:
    (other,) = begin([other], (1,))
  if hooks[1] == "begin":
    (other,) = finish([other], (1,), [second])
  elif hooks[0] == "finish":
    (other,) = finish([other], (1,), [second])
    (other,) = begin([other], (1,))
  shared = other | {key: late[key] for key in ("workers", "mask")}
  params, now = elastic_adapter(LOOP).late(params, late, shared, hooks, (1, 2))
  assert_close(
    now["workers"]["params"], stack_copies(other["params"], ONE)
  )
  if hooks[1] == "begin":  # the delta sent now, and the remaining one
    now, other = begin([now, other], (1, 1))
    before = each(np.subtract, other["params"], now["mean"])
  told = each(jnp.subtract, now["workers"]["params"], params)
  if hooks == ("begin", "begin"):
    (now,) = finish([now], (1,), [each(np.zeros_like, START)])
    assert_close(now["params"], before)
    told = each(jnp.add, told, late["workers"]["delta"])
  assert_close(told, stack_copies(unsaid, ONE))
