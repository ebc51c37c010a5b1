"""One training step under ``shard_map``, every collective explicit.

Gradients are local to a data-parallel rank and reduced once per step, after
accumulation; a partition (`parallel.zero`) reduces some of the way at every
layer. The optimizer runs on what each rank has. Workers have their own
parameters and meet in the outer loop only.

Shape legend: D = data-parallel ranks of this device, all levels, M =
microbatches, B = examples of one microbatch.
"""

from collections.abc import Callable, Hashable
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax

from caatnet.program import Program, is_spec
from caatnet.train.state import (
  TrainState,
  outer_specs,
  state_shardings,
  state_specs,
)
from parallel.collectives import after, each_lane, varying
from parallel.outer.base import OuterLoop, Plan
from parallel.zero.gathered import Gathered, Shard

Metrics = dict[str, jax.Array]


def make_train_step(
  program: Program,
  optimizer: optax.GradientTransformation,
  outer: OuterLoop,
  clip_norm: float,
  accumulation: int = 1,
  variant: Hashable = (),
) -> Callable[..., tuple[TrainState, Metrics]]:
  """The jitted step; donates the state.

  Args:
    program: The model on a mesh.
    optimizer: Elementwise in the parameters; clipping is done here, since the
      global norm of sliced parameters needs the tensor axis.
    outer: What workers tell each other.
    clip_norm: Largest global gradient norm of a worker; 0 does not clip.
    accumulation: Microbatches per step.
    variant: ``Plan.variant`` of the steps that this one is for.

  Returns:
    ``(state, batch, numbers) -> (state, metrics)`` with a batch ``[workers,
    *levels, batch per rank, ...]``, numbers those of the plan, and metrics
    ``[workers]``: loss (mean over examples) and grad_norm, in all and per
    parameter group.
  """
  layout = program.layout
  worker, on_cpu = layout.worker, layout.on_cpu

  def update(grads, opt_state, params):  # of one worker
    groups = _group_norms(grads, program)
    norm = jnp.sqrt(sum(jnp.square(n) for n in groups.values()))
    if clip_norm:
      factor = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))
      grads = jax.tree.map(lambda g: g * factor, grads)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    norms = {f"grad_norm/{group}": n for group, n in groups.items()}
    return updates, opt_state, {"grad_norm": norm} | norms

  def step(state: TrainState, batch: Any, numbers: Any):
    plan = Plan(variant, numbers)
    with jax.named_scope("outer"):
      carried = outer.begin(state.params, state.outer, plan)
    batch = after(batch, carried, on_cpu)
    loss, grads = each_lane(
      functools.partial(_worker_gradients, program, accumulation),
      worker, state.params, batch,
    )
    with jax.named_scope("outer"):
      grads = outer.gradients(grads, carried)
    updates, opt_state, norms = each_lane(
      update, worker, grads, state.opt_state, state.params
    )
    updates = after(updates, (loss, norms), on_cpu)
    with jax.named_scope("outer"):
      params, carried = outer.finish(state.params, updates, carried, plan)
    new_state = TrainState(
      state.step + 1, params, opt_state, carried, state.key
    )
    return new_state, {"loss": loss} | norms

  specs = state_specs(program, optimizer, outer)
  groups = ("loss", "grad_norm") + tuple(
    f"grad_norm/{g}" for g in parameter_groups(program.specs)
  )
  metric_specs = {g: P(worker.name) for g in groups}
  mapped = jax.shard_map(
    step,
    mesh=layout.mesh,
    in_specs=(specs, layout.batch_spec, P()),
    out_specs=(specs, metric_specs),
  )
  shardings = state_shardings(program, optimizer, outer)
  on_device = layout.shardings(specs.opt_state)

  def offloaded(state: TrainState, batch: Any, numbers: Any):
    here = jax.device_put(state.opt_state, on_device)
    state, metrics = mapped(state._replace(opt_state=here), batch, numbers)
    there = jax.device_put(state.opt_state, shardings.opt_state)
    return state._replace(opt_state=there), metrics

  return jax.jit(
    offloaded if layout.offload else mapped,
    donate_argnums=0,
    in_shardings=(
      shardings,
      layout.shardings(layout.batch_spec),
      layout.shardings(P()),
    ),
    out_shardings=(shardings, layout.shardings(metric_specs)),
  )


def make_evaluated(
  program: Program, outer: OuterLoop
) -> Callable[[Any, Any], Any]:
  """The jitted choice of what is evaluated.

  Args:
    program: The model on a mesh.
    outer: Knows which parameters stand for the run.

  Returns:
    ``(params, outer state) -> params`` without worker dim.
  """
  layout = program.layout
  return jax.jit(
    jax.shard_map(
      outer.evaluated,
      mesh=layout.mesh,
      in_specs=(layout.per_worker(program.specs), outer_specs(program, outer)),
      out_specs=program.specs,
    )
  )


def make_eval_step(program: Program) -> Callable[[Any, Any], Metrics]:
  """The jitted evaluation.

  Args:
    program: The model on a mesh.

  Returns:
    ``(params, batch) -> scores``: params without worker dim, batch
    ``[workers, *levels, batch per rank, ...]``, and the model's scores,
    float32 with the same leading dims.
  """
  layout = program.layout

  num_dims = len(layout.batch_dims)

  def evaluate(params, batch):
    dims = jax.tree.leaves(batch)[0].shape[:num_dims]
    ranks = _merge_dims(batch, num_dims)
    scores = _scores(program, params, ranks, num_lead=1)
    return jax.tree.map(lambda x: x.reshape(*dims, *x.shape[1:]), scores)

  return jax.jit(
    jax.shard_map(
      evaluate,
      mesh=layout.mesh,
      in_specs=(program.specs, layout.batch_spec),
      out_specs=layout.batch_spec,
    ),
    out_shardings=layout.shardings(P()),
  )


def parameter_groups(params: Any) -> list[str]:
  """The names by which metrics and errors speak of parameters."""
  return sorted(
    {_group(path) for path, _ in jax.tree.leaves_with_path(params)}
  )


def global_norm(tree: Any, program: Program) -> jax.Array:
  """Norm of one worker's gradients, or of a tree like them, on all ranks."""
  groups = _group_norms(tree, program).values()
  return jnp.sqrt(sum(jnp.square(norm) for norm in groups))


def _group(path: tuple[Any, ...]) -> str:
  return "/".join(str(key.key) for key in path)


def _merge_dims(tree: Any, number: int) -> Any:
  """The first ``number`` dims of every leaf as one."""
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[number:]), tree)


def _worker_gradients(
  program: Program, accumulation: int, params: Any, batch: Any
) -> tuple[jax.Array, Any]:
  """Loss and gradients of one worker ``[*levels, M * B, ...]``, reduced."""
  layout = program.layout
  batch = _merge_dims(batch, len(layout.data))  # [D, M * B, ...]
  names = tuple(axis.name for axis in layout.data)
  if layout.shards is None:
    # Cast so that differentiation inserts no reduction of its own.
    params = jax.tree.map(
      lambda p: varying(p, *names, layout.tensor.name), params
    )
    losses, grads = jax.vmap(
      lambda rank: _accumulated(
        lambda params, batch: _scores(program, params, batch)["loss"].mean(),
        params, rank, accumulation,
      )
    )(batch)
    losses, grads = after((losses, grads), (losses, grads), layout.on_cpu)
    loss, grads = jax.tree.map(
      lambda x: lax.psum(jnp.sum(x, axis=0), names), (losses, grads)
    )
  else:
    loss, grads = _partitioned_gradients(program, params, batch, accumulation)
  loss, grads = jax.tree.map(
    lambda x: x / layout.num_data_ranks, (loss, grads)
  )
  grads = after(grads, (loss, grads), layout.on_cpu)
  # Sums of replicated parameters' gradients over tensor ranks.
  name = layout.tensor.name
  return loss, jax.tree.map(
    lambda grad, spec: grad if name in spec else lax.psum(grad, name),
    grads, program.specs,
  )


def _partitioned_gradients(
  program: Program, params: Any, batch: Any, accumulation: int
) -> tuple[jax.Array, Any]:
  """Sums over data-parallel ranks, of gradients as they are stored."""
  layout = program.layout
  shards, name = layout.shards, layout.tensor.name
  with jax.named_scope("zero"):
    weights = shards.working(params, program.tensors)
  batch = after(batch, weights, layout.on_cpu)
  weights = jax.tree.map(lambda x: varying(x, name), weights)
  sinks = jax.tree.map(lambda x: varying(shards.sink(x), name), params)

  def loss_of(sinks, batch):
    losses = _scores(program, weights, batch, 1, sinks)["loss"]
    return jnp.sum(losses.mean(axis=tuple(range(1, losses.ndim))))

  loss, grads = _accumulated(loss_of, sinks, batch, accumulation, num_lead=1)

  loss, grads = after((loss, grads), (loss, grads), layout.on_cpu)
  loss = lax.psum(loss, shards.names)
  grads = after(grads, loss, layout.on_cpu)
  with jax.named_scope("zero"):
    return loss, shards.finish(grads)


def _scores(
  program: Program,
  params: Any,
  batch: Any,
  num_lead: int = 0,
  sinks: Any = None,
) -> Metrics:
  """The model's scores by one worker's parameters on this device.

  Args:
    program: The model on a mesh.
    params: As stored; of a partition with sinks, the weights of a step.
    batch: Leaves ``[D, B, ...]`` with a lead of 1, which a partition needs, or
      ``[B, ...]`` with a lead of 0.
    num_lead: Dims before B.
    sinks: See ``Gathered``; None: nothing is differentiated.
  """
  model, shards = program.model, program.layout.shards
  if shards is None:
    def score(batch):
      return model.scores(params, batch)

    return (jax.vmap(score) if num_lead else score)(batch)
  assert num_lead == 1
  if sinks is None:
    params = shards.working(params, program.tensors)
    sinks = jax.tree.map(lambda _: None, program.tensors)
  params = jax.tree.map(
    lambda tensor, weight, sink: Shard(weight, sink, tensor),
    program.tensors, params, sinks,
  )
  access = Gathered(shards, program.layout.prefetch)
  return model.scores(params, batch, access)


def _accumulated(
  loss_of: Callable[[Any, Any], jax.Array],
  params: Any,
  batch: Any,
  accumulation: int,
  num_lead: int = 0,
) -> tuple[jax.Array, Any]:
  """Mean loss and gradients over microbatches of a batch.

  Args:
    loss_of: ``(params, microbatch) -> loss``.
    params: What is differentiated.
    batch: Leaves ``[..., M * B, ...]`` with ``num_lead`` dims in front.
    accumulation: M.
    num_lead: Dims before the examples.
  """
  value_and_grad = jax.value_and_grad(loss_of)
  if accumulation == 1:
    return value_and_grad(params, batch)

  def split(x):  # the microbatches first, for the scan
    lead, rest = x.shape[:num_lead], x.shape[num_lead + 1 :]
    parts = x.reshape(*lead, accumulation, -1, *rest)
    return jnp.moveaxis(parts, num_lead, 0)

  microbatches = jax.tree.map(split, batch)

  def add(total, microbatch):
    return jax.tree.map(jnp.add, total, value_and_grad(params, microbatch)), ()

  first = jax.tree.map(lambda x: x[0], microbatches)
  start = jax.eval_shape(value_and_grad, params, first)
  zeros = jax.tree.map(
    lambda x: varying(
      jnp.zeros(x.shape, x.dtype), *x.manual_axis_type.varying
    ),
    start,
  )
  total, _ = lax.scan(add, zeros, microbatches)
  return jax.tree.map(lambda x: x / accumulation, total)


def _group_norms(grads: Any, program: Program) -> Metrics:
  """Norm per group, each logical parameter counted once.

  One reduction for all groups that are cut along the same axes.
  """
  squares: dict[tuple[str, ...], Metrics] = {}
  for (path, grad), spec in zip(
    jax.tree.leaves_with_path(grads),
    jax.tree.leaves(program.specs, is_leaf=is_spec),
    strict=True,
  ):
    names = tuple(name for name in spec if name)
    square = jnp.sum(jnp.square(grad.astype(jnp.float32)))
    squares.setdefault(names, {})[_group(path)] = square
  total = {}
  for names, of_groups in squares.items():
    stacked = jnp.stack(list(of_groups.values()))
    stacked = after(stacked, total, program.layout.on_cpu)
    summed = lax.psum(stacked, names) if names else stacked
    total |= dict(zip(of_groups, summed, strict=True))
  return {group: jnp.sqrt(square) for group, square in total.items()}
