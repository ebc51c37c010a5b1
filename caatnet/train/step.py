"""Training step under ``shard_map``, with every collective explicit.

Gradients are local to a data-parallel rank and are reduced once per step, after
accumulation. A ZeRO partition (`parallel.zero`) reduces a part of the way at
every layer. Workers have separate parameters and communicate in the outer loop
only. Transfers that the outer loop overlaps with a step's compute are issued
before the gradients, which do not depend on them.

The inner optimizer works elementwise on each rank's slices. Clipping is done by
the step, since it needs the norm over all ranks' slices. `make_gradient_step`
ends before the optimizer's update, which `caatnet.train.update` then runs on
the host.

Moments in host memory are copied to the device and back one layer after
another (`caatnet.train.host_moments`), so that device memory holds those of few
layers at a time.

On several CPU devices all collectives of a step are ordered
(`collectives.after`): XLA:CPU runs independent collectives in any order, and
two devices with different orders deadlock until they are aborted.

A diverged worker that is masked out of an exchange gets a new inner optimizer
in that step, since the moments of the old one have diverged, too.

Shape legend: D = data-parallel ranks of this device, of all levels; M =
microbatches; B = examples of one microbatch.
"""

from collections.abc import Callable, Hashable
import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from caatnet.program import Program
from caatnet.train import host_moments, microbatches, staged
from caatnet.train.norms import group_norms, parameter_groups
from caatnet.train.state import (
  TrainState,
  outer_specs,
  restarted,
  state_shardings,
  state_specs,
)
from parallel.collectives import after, each_lane, varying
from parallel.outer.base import OuterLoop, Plan
from parallel.zero.gathered import Shard

Metrics = dict[str, jax.Array]


def make_train_step(
  program: Program,
  optimizer: optax.GradientTransformation,
  outer: OuterLoop,
  clip_norm: float,
  accumulation: int = 1,
  variant: Hashable = (),
) -> Callable[..., tuple[TrainState, Metrics]]:
  """Returns the jitted training step, which donates the state.

  Args:
    program: The model on a mesh.
    optimizer: The inner optimizer, elementwise, without clipping.
    outer: The outer loop, which defines communication between workers.
    clip_norm: The gradient norm of a worker above which gradients are clipped;
      0 disables clipping.
    accumulation: Microbatches per step.
    variant: The `Plan.variant` of the steps that the program executes.

  Returns:
    A function ``(state, batch, numbers) -> (state, metrics)`` with a batch
    ``[workers, *levels, batch per rank, ...]`` and the plan's numbers. Metrics
    are float32 ``[workers]``: the loss, gradient norms in total and by
    parameter, and the outer loop's metrics.
  """
  layout = program.layout
  update = make_update(program, optimizer, clip_norm)

  def step(state: TrainState, batch: Any, numbers: Any):
    plan = Plan(variant, numbers)
    loss, grads, carried = _all_gradients(
      program, outer, accumulation, state.params, state.outer, batch, plan
    )
    updates, opt_state, norms = update(grads, state.opt_state, state.params)
    updates = after(updates, (loss, norms), layout.ordered)
    with jax.named_scope("outer"):
      params, carried = outer.finish(state.params, updates, carried, plan)
    told = told_of(outer, carried, state.outer)
    opt_state = restarted(program, optimizer, opt_state, params, told)
    new_state = TrainState(
      state.step + 1, params, opt_state, carried, state.key
    )
    return new_state, {"loss": loss} | norms | told

  specs = state_specs(program, optimizer, outer)
  of_metrics = _metric_specs(program, outer)
  mapped = jax.shard_map(
    step,
    mesh=layout.mesh,
    in_specs=(specs, layout.batch_spec, P()),
    out_specs=(specs, of_metrics),
  )
  shardings = state_shardings(program, optimizer, outer)
  return jax.jit(
    mapped,
    donate_argnums=0,
    in_shardings=(
      shardings,
      layout.shardings(layout.batch_spec),
      layout.shardings(P()),
    ),
    out_shardings=(shardings, layout.shardings(of_metrics)),
  )


def make_gradient_step(
  program: Program,
  optimizer: optax.GradientTransformation,
  outer: OuterLoop,
  clip_norm: float,
  accumulation: int,
  variant: Hashable,
) -> Callable[..., tuple[Any, Metrics]]:
  """Returns the jitted part of a training step before the update.

  Args:
    program: The model on a mesh.
    optimizer: The inner optimizer, which only defines the state's structure.
    outer: The outer loop, which must only change gradients.
    clip_norm: The gradient norm above which gradients are clipped; 0 disables
      clipping.
    accumulation: Microbatches per step.
    variant: The `Plan.variant` of the steps that the program executes.

  Returns:
    A function ``(state, batch, numbers) -> (clipped gradients, metrics)``, with
    the arguments and metrics of `make_train_step`, except that
    ``state.opt_state`` is empty. It donates nothing.
  """
  layout = program.layout
  clip = make_clip(program, clip_norm)

  def step(params: Any, outer_state: Any, batch: Any, numbers: Any):
    loss, grads, _ = _all_gradients(
      program, outer, accumulation, params, outer_state, batch,
      Plan(variant, numbers),
    )
    grads, norms = each_lane(clip, layout.worker, grads)
    return grads, {"loss": loss} | norms

  specs = state_specs(program, optimizer, outer)
  of_outputs = specs.params, _metric_specs(program, outer)
  mapped = jax.shard_map(
    step, mesh=layout.mesh,
    in_specs=(specs.params, specs.outer, layout.batch_spec, P()),
    out_specs=of_outputs,
  )
  return jax.jit(
    lambda state, batch, numbers: mapped(
      state.params, state.outer, batch, numbers
    ),
    in_shardings=(
      state_shardings(program, optimizer, outer)._replace(opt_state=()),
      layout.shardings(layout.batch_spec),
      layout.shardings(P()),
    ),
    out_shardings=layout.shardings(of_outputs),
  )


def _all_gradients(
  program: Program, outer: OuterLoop, accumulation: int, params: Any,
  state: Any, batch: Any, plan: Plan,
) -> tuple[jax.Array, Any, Any]:
  """Computes the workers' losses and gradients, inside ``jax.shard_map``.

  Args:
    program: The model on a mesh.
    outer: The outer loop.
    accumulation: Microbatches per step.
    params: The workers' stored parameters ``[W, ...]``.
    state: State of the outer loop.
    batch: The workers' part of the batch.
    plan: The outer loop's plan of the step.

  Returns:
    Losses ``[W]``, gradients ``[W, ...]`` for the inner optimizers, and the
    outer loop's state.
  """
  layout = program.layout
  # Before the gradients, so that transfers overlap with their compute.
  with jax.named_scope("outer"):
    carried = outer.begin(params, state, plan)
  batch = after(batch, carried, layout.ordered)
  # A partition's gathers do not read the batch.
  params = after(params, carried, layout.ordered and layout.shards is not None)
  loss, grads = each_lane(
    functools.partial(worker_gradients, program, accumulation),
    layout.worker, params, batch,
  )
  with jax.named_scope("outer"):
    grads = outer.gradients(grads, carried)
  return loss, grads, carried


def make_update(
  program: Program, optimizer: optax.GradientTransformation, clip_norm: float
) -> Callable[[Any, Any, Any], tuple[Any, Any, Metrics]]:
  """Returns the clipped update of all workers, inside ``jax.shard_map``.

  Args:
    program: The model on a mesh.
    optimizer: The inner optimizer, elementwise, without clipping.
    clip_norm: The gradient norm of a worker above which gradients are clipped;
      0 disables clipping.

  Returns:
    A function ``(gradients, optimizer state, parameters) -> (updates, optimizer
    state, norms of the gradients)`` of ``[W, ...]``.
  """
  layout = program.layout
  measure = functools.partial(_norms, program, clip_norm)

  # Clipping is a part of it, so that the update of a part can overwrite the
  # gradients themselves, instead of a clipped copy of all.
  def of_worker(factor, grads, opt_state, params):
    return optimizer.update(_scaled(grads, factor), opt_state, params)

  def at_once(grads, opt_state, params):
    factor, norms = measure(grads)
    return *of_worker(factor, grads, opt_state, params), norms

  # XLA:CPU copies moments whose dim of workers is removed and restored, and
  # updates them in place if `vmap` keeps it.
  in_place = layout.on_cpu and layout.worker.lanes == 1

  def of_workers(factor, grads, opt_state, params):
    arguments = factor, grads, opt_state, params
    if in_place:
      return jax.vmap(of_worker)(*arguments)
    return each_lane(of_worker, layout.worker, *arguments)

  def update(grads, opt_state, params):
    on_device = layout.moments == "device"
    if on_device and not in_place:
      return each_lane(at_once, layout.worker, grads, opt_state, params)
    factor, norms = each_lane(measure, layout.worker, grads)
    if on_device:
      return *of_workers(factor, grads, opt_state, params), norms
    changed = host_moments.apply(
      program,
      lambda changed, params: of_workers(factor, *changed, params),
      (grads, opt_state), params,
    )
    return *changed, norms

  return update


def make_clip(
  program: Program, clip_norm: float
) -> Callable[[Any], tuple[Any, Metrics]]:
  """Returns a function that clips gradients, inside ``jax.shard_map``.

  Args:
    program: The model on a mesh.
    clip_norm: The gradient norm of a worker above which gradients are clipped;
      0 disables clipping.

  Returns:
    A function of one worker's gradients that returns clipped gradients, and
    the norms before clipping.
  """

  def clip(grads):
    factor, norms = _norms(program, clip_norm, grads)
    return _scaled(grads, factor), norms

  return clip


def _norms(
  program: Program, clip_norm: float, grads: Any
) -> tuple[jax.Array | None, Metrics]:
  """Returns the factor that clips gradients, None for none, and their norms."""
  groups = group_norms(grads, program)
  norm = jnp.sqrt(sum(jnp.square(n) for n in groups.values()))
  # 1e-12 keeps the quotient finite if all gradients are 0.
  factor = (
    jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12)) if clip_norm
    else None
  )
  norms = {f"grad_norm/{group}": n for group, n in groups.items()}
  return factor, {"grad_norm": norm} | norms


def _scaled(grads: Any, factor: jax.Array | None) -> Any:
  """Returns gradients times a factor, unchanged if it is None."""
  if factor is None:
    return grads
  return jax.tree.map(lambda g: g * factor, grads)


def _metric_specs(program: Program, outer: OuterLoop) -> dict[str, P]:
  """Returns a ``PartitionSpec`` for each metric of a step, ``[workers]``."""
  names = ["loss", "grad_norm"]
  names += [f"grad_norm/{g}" for g in parameter_groups(program.specs)]
  first = jax.eval_shape(outer.init, program.stored_shapes)
  told = jax.eval_shape(functools.partial(told_of, outer), first, first)
  return {name: P(program.layout.worker.name) for name in (*names, *told)}


def told_of(outer: OuterLoop, after: Any, before: Any) -> Metrics:
  """Returns the outer loop's metrics of a step.

  Args:
    outer: The outer loop.
    after: State of the outer loop after the step.
    before: State of the outer loop before the step.

  Returns:
    Arrays ``[W]`` by name; with "just_left_out", the exchanges of this step
    that masked the worker out. Empty if the outer loop has no metrics.
  """
  told = outer.metrics(after)
  if not told:
    return {}
  left_out = told["left_out"] - outer.metrics(before)["left_out"]
  return told | {"just_left_out": left_out}


def make_export(
  program: Program, outer: OuterLoop
) -> Callable[[Any, Any], Any]:
  """Returns the jitted function that computes the parameters to evaluate.

  Args:
    program: The model on a mesh.
    outer: The outer loop, whose ``export_params`` returns them.

  Returns:
    A function ``(params, outer state) -> params``; the result has no worker
    dim.
  """
  layout = program.layout
  return jax.jit(
    jax.shard_map(
      outer.export_params,
      mesh=layout.mesh,
      in_specs=(layout.per_worker(program.specs), outer_specs(program, outer)),
      out_specs=program.specs,
    )
  )


def make_eval_step(program: Program) -> Callable[[Any, Any], Metrics]:
  """Returns the jitted evaluation of a batch.

  Args:
    program: The model on a mesh.

  Returns:
    A function ``(params, batch) -> scores``. Parameters have no worker dim; the
    batch is ``[workers, *levels, batch per rank, ...]``. Scores are float32
    arrays with the same leading dims.
  """
  layout, num_dims = program.layout, len(program.layout.batch_dims)

  def evaluate(params, batch):
    workers, *lanes, size = jax.tree.leaves(batch)[0].shape[: num_dims + 1]
    # All workers evaluate the same parameters. These have one shard per lane of
    # the data levels and no worker dim, so the batch becomes [D, W * B, ...].
    def joined(x):
      x = jnp.moveaxis(x, 0, num_dims - 1)
      return x.reshape(-1, workers * size, *x.shape[num_dims + 1 :])

    def apart(x):
      x = x.reshape(*lanes, workers, size, *x.shape[2:])
      return jnp.moveaxis(x, num_dims - 1, 0)

    batch = jax.tree.map(joined, batch)
    return jax.tree.map(apart, _scores(program, params, batch, num_lead=1))

  mapped = jax.shard_map(
    evaluate,
    mesh=layout.mesh,
    in_specs=(program.specs, layout.batch_spec),
    out_specs=layout.batch_spec,
  )

  def replicated(params, batch):
    leaves, tree = jax.tree.flatten(mapped(params, batch))
    lead = leaves[0].shape[: num_dims + 1]
    # Gathered as one array: the gathers of several arrays over several axes
    # would be unordered (`parallel.collectives.after`).
    joined = jnp.concatenate([x.reshape(*lead, -1) for x in leaves], axis=-1)
    joined = lax.with_sharding_constraint(joined, layout.shardings(P()))
    sizes = [math.prod(x.shape[num_dims + 1 :]) for x in leaves]
    parts = jnp.split(joined, np.cumsum(sizes)[:-1].tolist(), axis=-1)
    return tree.unflatten(
      part.reshape(x.shape) for part, x in zip(parts, leaves, strict=True)
    )

  # Replicated, so that every process can read all scores.
  return jax.jit(
    replicated, out_shardings=layout.shardings(P()),
    compiler_options=layout.compiler_options(),
  )


def _merge_dims(tree: Any, number: int) -> Any:
  """Merges the first ``number`` dims of every leaf into one."""
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[number:]), tree)


def worker_gradients(
  program: Program, accumulation: int, params: Any, batch: Any
) -> tuple[jax.Array, Any]:
  """Computes one worker's loss and gradients, reduced over its ranks.

  Args:
    program: The model on a mesh.
    accumulation: M, microbatches per step.
    params: The worker's stored parameters.
    batch: The worker's part of the batch, ``[*lanes of levels, M * B, ...]``.

  Returns:
    The mean loss over the worker's examples, float32 scalar, and its gradients
    with the layout of the stored parameters.
  """
  layout = program.layout
  batch = _merge_dims(batch, len(layout.data))  # [D, M * B, ...]
  names = tuple(axis.name for axis in layout.data)
  if layout.shards is None:
    # By type, parameters are invariant over data-parallel ranks and, unless
    # they are sliced, over tensor ranks. If a function combines an invariant
    # with a varying value, JAX casts it to varying, and the transpose of the
    # cast is an all-reduce per parameter, layer and microbatch. With the cast
    # here, before differentiation, gradients remain local to this device and
    # are reduced once below.
    params = jax.tree.map(lambda p: varying(p, *layout.rank_names), params)

    if layout.stages is not None:
      losses, grads = staged.each_rank(
        lambda rank: staged.gradients(program, params, rank), batch
      )
    else:
      losses, grads = jax.vmap(
        lambda rank: _accumulated(
          lambda params, batch: _scores(program, params, batch)["loss"].mean(),
          params, rank, accumulation,
        )
      )(batch)
    # All leaves depend on all others, so the reductions over the data axes
    # follow the last reduction of the backward over the tensor axis.
    losses, grads = after((losses, grads), (losses, grads), layout.ordered)
    # [D, ...] -> [...]: over lanes, then over devices.
    loss, grads = jax.tree.map(
      lambda x: lax.psum(jnp.sum(x, axis=0), names), (losses, grads)
    )
  else:
    loss, grads = _partitioned_gradients(program, params, batch, accumulation)
  loss, grads = jax.tree.map(
    lambda x: x / layout.num_data_ranks, (loss, grads)
  )
  grads = after(grads, (loss, grads), layout.ordered)
  return loss, _summed_copies(program, grads)


def _summed_copies(program: Program, grads: Any) -> Any:
  """Sums gradients over the ranks that hold copies of a parameter.

  All tensor ranks and stages read a replicated parameter, such as a norm's
  gain, so its gradient is the sum over them. A slice is read by one rank only,
  so its gradient is not summed.
  """
  names = [axis.name for axis in program.layout.model_axes]
  ordered = program.layout.ordered
  # Axes of a sum -> results.
  sums: dict[tuple[str, ...], list[jax.Array]] = {}

  def summed(grad, spec):
    over = tuple(name for name in names if name not in spec)
    if not over:
      return grad
    others = [x for axes, results in sums.items() if axes != over
              for x in results]
    grad = after(grad, others, ordered)
    sums.setdefault(over, []).append(lax.psum(grad, over))
    return sums[over][-1]

  grads = jax.tree.map(summed, grads, program.specs)
  # The sums of norms over other axes follow.
  return after(grads, grads, ordered and len(sums) > 1)


def _partitioned_gradients(
  program: Program, params: Any, batch: Any, accumulation: int
) -> tuple[jax.Array, Any]:
  """Computes loss and gradients of a worker with a ZeRO partition.

  Args:
    program: The model on a mesh, with a partition.
    params: The stored shards of the worker's parameters.
    batch: ``[D, M * B, ...]``.
    accumulation: M, microbatches per step.

  Returns:
    Loss and gradients, summed over data-parallel ranks; gradients have the
    layout of the stored shards.
  """
  layout = program.layout
  shards = layout.shards
  names = tuple(axis.name for axis in layout.model_axes)
  # Gathered once per step, not per microbatch, from the shards of the optimizer
  # to those of the weights, which may be cut over fewer data levels.
  with jax.named_scope("zero"):
    weights = shards.working(params, program.tensors)
  batch = after(batch, weights, layout.ordered)
  # Cast for the same reason as in `worker_gradients`. Differentiation is with
  # respect to the sinks, which receive the gradients of the gathered weights
  # (`parallel.zero.gathered`).
  weights = jax.tree.map(lambda x: varying(x, *names), weights)
  sinks = jax.tree.map(lambda x: varying(shards.sink(x), *names), params)

  def loss_of(sinks, batch):
    losses = _scores(program, weights, batch, 1, sinks)["loss"]
    # Mean over each rank's examples, then the sum over ranks: [D, ...] -> [].
    return jnp.sum(losses.mean(axis=tuple(range(1, losses.ndim))))

  if layout.stages is not None:
    loss, grads = staged.gradients(program, sinks, batch, weights)
  else:
    loss, grads = _accumulated(loss_of, sinks, batch, accumulation, num_lead=1)
  loss, grads = after((loss, grads), (loss, grads), layout.ordered)
  loss = lax.psum(loss, shards.names)
  grads = after(grads, loss, layout.ordered)
  with jax.named_scope("zero"):
    return loss, shards.finish(grads)


def _scores(
  program: Program,
  params: Any,
  batch: Any,
  num_lead: int = 0,
  sinks: Any = None,
) -> Metrics:
  """Computes the model's scores on this device, for one worker.

  Args:
    program: The model on a mesh.
    params: The stored parameters; with sinks, the weights of the step.
    batch: Tree of ``[D, B, ...]``, as a partition requires, or ``[B, ...]``.
    num_lead: The number of dims before B, 1 or 0.
    sinks: Gradient sinks of a partition, see `parallel.zero.gathered`; None
      without differentiation.
  """
  model, shards = program.model, program.layout.shards
  if shards is None:
    if program.layout.stages is not None:
      return staged.each_rank(
        lambda batch: staged.scores(program, params, batch), batch
      )

    def score(batch):
      return program.checked(
        model.scores(program.readable(params), batch, program.layout.access)
      )

    return (jax.vmap(score) if num_lead else score)(batch)
  assert num_lead == 1  # `Gathered` maps the model's functions over D itself
  if sinks is None:
    params = shards.working(params, program.tensors)
    sinks = jax.tree.map(lambda _: None, program.tensors)
    if program.layout.stages is not None:
      return staged.scores(program, sinks, batch, params)
  params = jax.tree.map(
    lambda tensor, weight, sink: Shard(weight, sink, tensor),
    program.tensors, params, sinks,
  )
  return program.checked(model.scores(params, batch, program.layout.access))


def _accumulated(
  loss_of: Callable[[Any, Any], jax.Array],
  params: Any,
  batch: Any,
  accumulation: int,
  num_lead: int = 0,
) -> tuple[jax.Array, Any]:
  """Averages loss and gradients over the microbatches of a batch.

  Args:
    loss_of: A function ``(params, microbatch) -> loss``.
    params: First argument of ``loss_of``, which is differentiated.
    batch: Tree of ``[..., M * B, ...]`` with ``num_lead`` dims before the
      examples.
    accumulation: M, the number of microbatches.
    num_lead: The number of dims before the examples.

  Returns:
    The mean loss, and the mean gradients with respect to ``params``.
  """
  value_and_grad = jax.value_and_grad(loss_of)
  if accumulation == 1:
    return value_and_grad(params, batch)
  parts = microbatches.split(batch, accumulation, num_lead)

  def add(total, microbatch):
    return jax.tree.map(jnp.add, total, value_and_grad(params, microbatch)), ()

  first = jax.tree.map(lambda x: x[0], parts)
  start = jax.eval_shape(value_and_grad, params, first)
  # The carry of a scan must keep its type. Gradients vary over mesh axes, so
  # the initial zeros must, too.
  zeros = jax.tree.map(
    lambda x: varying(
      jnp.zeros(x.shape, x.dtype), *x.manual_axis_type.varying
    ),
    start,
  )
  total, _ = lax.scan(add, zeros, parts)
  return jax.tree.map(lambda x: x / accumulation, total)
