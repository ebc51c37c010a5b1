"""Training state and its sharding."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from caatnet.program import Program, make_suffix_lookup
from caatnet.train import host_moments
from parallel.collectives import varying
from parallel.outer.base import WORKER_DIM_KEYS, OuterLoop, stack_copies
from parallel.outer.health import select_per_worker


class TrainState(NamedTuple):
  """Training state with arrays of logical shape.

  Shapes depend on the numbers of ranks and workers, not of devices.

  Attributes:
    step: The number of updates made so far, int32 scalar.
    params: Nested dict of float32 arrays ``[workers, ...]``: trained parameters
      and explicit training state.
    opt_state: State of the inner optimizers, all leaves ``[workers, ...]``.
    outer: State of the outer loop.
    key: The run's random key as raw uint32 data, for sampling within a step.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  outer: Any
  key: jax.Array


def state_specs(
  program: Program,
  optimizer: optax.GradientTransformation,
  outer: OuterLoop,
) -> TrainState:
  """Returns a ``PartitionSpec`` for each leaf of the training state."""
  per_worker = program.layout.add_worker_dim
  opt_state = jax.eval_shape(optimizer.init, program.trained_shapes)
  return TrainState(
    step=P(),
    params=per_worker(program.specs),
    opt_state=per_worker(program.specs_like_params(opt_state)),
    outer=outer_specs(program, outer),
    key=P(),
  )


def outer_specs(program: Program, outer: OuterLoop) -> Any:
  """Returns a ``PartitionSpec`` for each leaf of the outer loop's state."""
  return specs_like_outer(
    program, outer, jax.eval_shape(outer.init, program.trained_shapes)
  )


def specs_like_outer(program: Program, outer: OuterLoop, state: Any) -> Any:
  """Returns a ``PartitionSpec`` for each leaf of an outer loop's state.

  ``state`` may have entries that only exist within a step. Entries in
  ``WORKER_DIM_KEYS`` have a leading dim of workers.
  """
  specs = program.specs_like_params(state)
  own = {key: specs[key] for key in WORKER_DIM_KEYS if key in specs}
  return specs | program.layout.add_worker_dim(own)


def state_shardings(
  program: Program,
  optimizer: optax.GradientTransformation,
  outer: OuterLoop,
) -> TrainState:
  """Returns the sharding of each leaf of the training state between steps.

  Moments, the leaves of the optimizer's state with the shape of a parameter,
  are in the memory of ``layout.moments``; step counts are in device memory.
  """
  specs = state_specs(program, optimizer, outer)
  shardings = program.layout.shardings(specs)
  kind, find = program.layout.moments, make_suffix_lookup(program.specs)
  if kind == "device":
    return shardings
  return shardings._replace(opt_state=jax.tree.map_with_path(
    lambda path, s: s if find(path) is None else s.with_memory_kind(kind),
    shardings.opt_state,
  ))


def init_state(
  program: Program,
  optimizer: optax.GradientTransformation,
  outer: OuterLoop,
  seed: int,
  start: Any = None,
) -> TrainState:
  """Returns the training state before the first step, on the program's mesh.

  Args:
    program: The model on a mesh.
    optimizer: The inner optimizer; each worker gets its initial state.
    outer: The outer loop.
    seed: Determines initial parameters, which are equal for all workers.
    start: Parameters ``[workers, ...]``, which are donated; all workers start
      with those of the first one. None to initialise them from the seed.
  """
  worker = program.layout.worker

  def init(start: Any) -> TrainState:
    params_key, run_key = jax.random.split(jax.random.key(seed))
    if start is None:
      params = program.init_params(params_key)
    else:
      params = jax.tree.map(lambda x: x[0], start)
    trained = program.split(params).trained
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      params=stack_copies(params, worker),
      opt_state=stack_copies(optimizer.init(trained), worker),
      outer=outer.init(trained),
      key=jax.random.key_data(run_key),
    )

  shardings = state_shardings(program, optimizer, outer)
  return jax.jit(init, out_shardings=shardings, donate_argnums=0)(start)


def make_count_non_finite(
  program: Program,
) -> Callable[[Any], dict[str, np.ndarray]]:
  """Returns a function that counts non-finite elements of parameters.

  Args:
    program: The model on a mesh.

  Returns:
    A function of the workers' parameters, tree of ``[workers, ...]``. It
    returns each worker's count, int32 ``[workers]``, by parameter path.
  """
  layout = program.layout
  names = layout.rank_names

  def count(params):  # int32 [parameters, workers]
    counts = [
      varying(
        jnp.sum(~jnp.isfinite(x), axis=tuple(range(1, x.ndim))), *names
      )
      for x in jax.tree.leaves(params)
    ]
    return jax.lax.psum(jnp.stack(counts), names)

  counted = jax.jit(
    jax.shard_map(
      count, mesh=layout.mesh,
      in_specs=(layout.add_worker_dim(program.specs),),
      out_specs=P(None, layout.worker.name),
    ),
    out_shardings=layout.shardings(P()),
  )

  def named(params: Any) -> dict[str, np.ndarray]:
    groups = [
      jax.tree_util.keystr(path, simple=True, separator="/")
      for path, _ in jax.tree.leaves_with_path(params)
    ]
    return dict(zip(groups, np.asarray(counted(params)), strict=True))

  return named


def reset_left_out(
  program: Program,
  optimizer: optax.GradientTransformation,
  opt_state: Any,
  params: Any,
  told: Mapping[str, jax.Array],
) -> Any:
  """Resets inner optimizers of workers that the last exchange excluded.

  The step of the learning-rate schedule is kept. W is the number of workers on
  the device.

  Args:
    program: The model on a mesh.
    optimizer: The inner optimizer.
    opt_state: The workers' states ``[W, ...]``.
    params: The workers' trained parameters ``[W, ...]``.
    told: Metrics of the outer loop, ``[W]`` each. Workers with a positive
      "just_left_out" are reset; without this key, none is.

  Returns:
    The workers' states ``[W, ...]``.
  """
  if "just_left_out" not in told:
    return opt_state

  def reset(opt_state, params):
    new = with_schedule_of(opt_state, jax.vmap(optimizer.init)(params))
    return select_per_worker(told["just_left_out"] > 0, new, opt_state)

  return host_moments.apply(program, reset, opt_state, params)


def with_schedule_of(opt_state: Any, new: Any) -> Any:
  """Returns ``new`` with the learning-rate schedule's step in ``opt_state``.

  Args:
    opt_state: Optimizer state with the step of the schedule to keep.
    new: Optimizer state of the same structure, with all other values.
  """

  def is_schedule(x):
    return isinstance(x, optax.ScaleByScheduleState)

  return jax.tree.map(
    lambda old, new: old if is_schedule(old) else new,
    opt_state, new, is_leaf=is_schedule,
  )

def check_equal_start(program: Program, params: Any) -> None:
  """Checks that all workers start from equal parameters, by their hashes.

  Each process initialises parameters itself. If results differed, averaging
  would mix unrelated models without an error.

  Args:
    program: The model on a mesh.
    params: The workers' parameters, tree of ``[workers, ...]``.

  Raises:
    ValueError: If the parameters of a worker differ from those of worker 0.
  """
  layout = program.layout

  def digest(params):  # uint32 [W]
    names, total = layout.rank_names, 0
    size = sum(x[0].size for x in jax.tree.leaves(params))
    first = jax.lax.axis_index(names).astype(jnp.uint32) * size
    for x in jax.tree.leaves(params):
      bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
      bits = bits.reshape(x.shape[0], -1)
      # Odd weights are invertible modulo 2^32, so one different element changes
      # the sum. The weights of all leaves and devices differ, so an exchange of
      # two elements changes it, too.
      weights = 2 * (first + jnp.arange(bits.shape[1], dtype=jnp.uint32)) + 1
      total += varying(jnp.sum(bits * weights[None], axis=1), *names)
      first += bits.shape[1]
    # Replicated parameters count once per device, equally for all workers.
    return jax.lax.psum(total, names)

  digests = jax.jit(
    jax.shard_map(
      digest,
      mesh=layout.mesh,
      in_specs=(layout.add_worker_dim(program.specs),),
      out_specs=P(layout.worker.name),
    ),
    out_shardings=layout.shardings(P()),
  )(params)
  for worker, value in enumerate(np.asarray(digests)):
    if value != digests[0]:
      raise ValueError(
        f"worker {worker} starts from other parameters than worker 0 (hashes "
        f"{int(value):08x}, {int(digests[0]):08x}); use the same config, seed "
        "and versions on all processes"
      )
