"""Runs of outer loops without a model: random gradients and inner SGD."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from parallel.axes import Axis, make_mesh
from parallel.outer.exchange import Exchange
from parallel.wire import Wire

M = 3
WORKER = Axis("worker", M, M)
INNER_RATE = 0.1
LAYERS = 6
SHAPES = {"blocks": {"w": (LAYERS, 6)}, "head": (7,)}
BLOCK_DIMS = {"blocks": {"w": 1}, "head": 0}


def draw(seed, *lead):
  """Returns a random tree like the parameters, with float32 values."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda shape: rng.normal(size=(*lead, *shape)).astype("f4"), SHAPES,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def wide(tree):
  return jax.tree.map(lambda x: np.asarray(x, "f8"), tree)


def each(f, *trees):
  return jax.tree.map(f, *trees)


def exchange(wire=None, worker=WORKER, **options):
  return Exchange(worker, wire or Wire(block=2), BLOCK_DIMS, **options)


def run(loop, num_steps, change=None):
  """Returns parameters, state and evaluated parameters after every step.

  With fewer than M workers, the gradients are those of the first workers.
  ``change`` maps the parameters and gradients ``[W, ...]`` before a step, and
  the step's number.
  """
  count = loop.worker.size
  start, grads = draw(0), draw(1, num_steps, M)
  grads = each(lambda g: g[:, :count], grads)
  state = jax.device_get(loop.init(start))
  specs = {
    key: each(lambda _, key=key: P("worker") if key == "workers" else P(), part)
    for key, part in state.items()
  }

  def program(state, params, grads):
    found = []
    for number in range(num_steps):
      gradients = each(lambda g, n=number: g[n], grads)
      if change:
        params, gradients = change((params, gradients), number)
      plan = loop.plan(number)
      plan = plan._replace(numbers=each(jnp.int32, plan.numbers))
      carried = loop.begin(params, state, plan)
      changed = loop.gradients(gradients, carried)
      updates = each(lambda g: -INNER_RATE * g, changed)
      params, state = loop.finish(params, updates, carried, plan)
      found.append((params, state, loop.export_params(params, state)))
    return found

  f = jax.jit(jax.shard_map(
    program, mesh=make_mesh({"worker": loop.worker}),
    in_specs=(specs, P("worker"), P(None, "worker")),
    out_specs=[(P("worker"), specs, P())] * num_steps,
  ))
  params = each(lambda x: np.stack([x] * count), start)
  return jax.device_get(f(state, params, grads))
