"""One training step under ``shard_map``, every collective explicit.

Gradients are local to a data-parallel rank and reduced once per step, after
accumulation; a partition (`parallel.zero`) reduces some of the way at every
layer. The optimizer runs on what each rank has. Workers have their own
parameters and meet in the outer loop only.

Shape legend: D = data-parallel ranks of this device, all levels, M =
microbatches, B = batch of one microbatch, T = sequence length.
"""

from collections.abc import Callable, Hashable
import functools
from typing import Any

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax

from caatnet.train.state import Program, TrainState, is_spec
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
  outer_program: Hashable = (),
) -> Callable[..., tuple[TrainState, Metrics]]:
  """The jitted step; donates the state.

  Args:
    program: Model and mesh.
    optimizer: Elementwise in the parameters; clipping is done here, since the
      global norm of sliced parameters needs the tensor axis.
    outer: What workers tell each other.
    clip_norm: Largest global gradient norm of a worker; 0 does not clip.
    accumulation: Microbatches per step.
    outer_program: ``Plan.program`` of the steps that this one is for.

  Returns:
    ``(state, tokens, numbers) -> (state, metrics)`` with tokens int
    ``[workers, *levels, batch per rank, T + 1]``, numbers those of the
    plan, and the metrics ``[workers]``: loss (mean nats per token) and
    grad_norm, in all and per parameter group.
  """
  worker, on_cpu = program.worker, program.on_cpu

  def update(grads, opt_state, params):  # of one worker
    groups = _group_norms(grads, program)
    norm = jnp.sqrt(sum(jnp.square(n) for n in groups.values()))
    if clip_norm:
      factor = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))
      grads = jax.tree.map(lambda g: g * factor, grads)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    norms = {f"grad_norm/{group}": n for group, n in groups.items()}
    return updates, opt_state, {"grad_norm": norm} | norms

  def step(state: TrainState, tokens: jax.Array, numbers: Any):
    plan = Plan(outer_program, numbers)
    with jax.named_scope("outer"):
      carried = outer.begin(state.params, state.outer, plan)
    tokens = after(tokens, carried, on_cpu)
    loss, grads = each_lane(
      functools.partial(_worker_gradients, program, accumulation),
      worker, state.params, tokens,
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

  state_specs = program.state_specs(optimizer, outer)
  groups = ("loss", "grad_norm") + tuple(
    f"grad_norm/{g}" for g in parameter_groups(program.specs)
  )
  metric_specs = {g: P(worker.name) for g in groups}
  mapped = jax.shard_map(
    step,
    mesh=program.mesh,
    in_specs=(state_specs, program.batch_spec, P()),
    out_specs=(state_specs, metric_specs),
  )
  state_shardings = program.state_shardings(optimizer, outer)
  on_device = program.shardings(state_specs.opt_state)

  def offloaded(state: TrainState, tokens: jax.Array, numbers: Any):
    here = jax.device_put(state.opt_state, on_device)
    state, metrics = mapped(state._replace(opt_state=here), tokens, numbers)
    there = jax.device_put(state.opt_state, state_shardings.opt_state)
    return state._replace(opt_state=there), metrics

  return jax.jit(
    offloaded if program.offload else mapped,
    donate_argnums=0,
    in_shardings=(
      state_shardings,
      program.shardings(program.batch_spec),
      program.shardings(P()),
    ),
    out_shardings=(state_shardings, program.shardings(metric_specs)),
  )


def make_evaluated(
  program: Program, outer: OuterLoop
) -> Callable[[Any, Any], Any]:
  """The jitted choice of what is evaluated.

  Args:
    program: Model and mesh.
    outer: Knows which parameters stand for the run.

  Returns:
    ``(params, outer state) -> params`` without worker dim.
  """
  return jax.jit(
    jax.shard_map(
      outer.evaluated,
      mesh=program.mesh,
      in_specs=(program.per_worker(program.specs), program.outer_specs(outer)),
      out_specs=program.specs,
    )
  )


def make_eval_step(program: Program) -> Callable[[Any, jax.Array], jax.Array]:
  """The jitted evaluation.

  Args:
    program: Model and mesh.

  Returns:
    ``(params, tokens) -> losses``: params without worker dim, tokens int
    ``[workers, *levels, batch per rank, T + 1]``, losses float32
    ``[workers, *levels, batch per rank, T]``.
  """

  def evaluate(params, tokens):
    ranks = tokens.reshape(-1, *tokens.shape[-2:])
    losses = _token_losses(program, params, ranks)
    return losses.reshape(*tokens.shape[:-1], -1)

  return jax.jit(
    jax.shard_map(
      evaluate,
      mesh=program.mesh,
      in_specs=(program.specs, program.batch_spec),
      out_specs=program.batch_spec,
    ),
    out_shardings=program.shardings(P()),
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


def _worker_gradients(
  program: Program, accumulation: int, params: Any, tokens: jax.Array
) -> tuple[jax.Array, Any]:
  """Loss and gradients of one worker ``[*levels, M * B, T + 1]``, reduced."""
  tokens = tokens.reshape(-1, *tokens.shape[-2:])  # [D, ...]
  names = tuple(axis.name for axis in program.data)
  if program.shards is None:
    # Cast so that differentiation inserts no reduction of its own.
    params = jax.tree.map(
      lambda p: varying(p, *names, program.tensor.name), params
    )
    losses, grads = jax.vmap(
      lambda rank: _accumulated(
        lambda params, batch: _token_losses(program, params, batch).mean(),
        params, rank, accumulation,
      )
    )(tokens)
    losses, grads = after((losses, grads), (losses, grads), program.on_cpu)
    loss, grads = jax.tree.map(
      lambda x: lax.psum(jnp.sum(x, axis=0), names), (losses, grads)
    )
  else:
    loss, grads = _partitioned_gradients(program, params, tokens, accumulation)
  loss, grads = jax.tree.map(
    lambda x: x / program.num_data_ranks, (loss, grads)
  )
  grads = after(grads, (loss, grads), program.on_cpu)
  # Sums of replicated parameters' gradients over tensor ranks.
  name = program.tensor.name
  return loss, jax.tree.map(
    lambda grad, spec: grad if name in spec else lax.psum(grad, name),
    grads, program.specs,
  )


def _partitioned_gradients(
  program: Program, params: Any, tokens: jax.Array, accumulation: int
) -> tuple[jax.Array, Any]:
  """Sums over data-parallel ranks, of gradients as they are stored."""
  shards, name = program.shards, program.tensor.name
  with jax.named_scope("zero"):
    weights = shards.working(params, program.tensors)
  tokens = after(tokens, weights, program.on_cpu)
  weights = jax.tree.map(lambda x: varying(x, name), weights)
  sinks = jax.tree.map(lambda x: varying(shards.sink(x), name), params)

  def loss_of(sinks, tokens):
    losses = _token_losses(program, weights, tokens, sinks)
    return jnp.sum(losses.mean(axis=(1, 2)))

  loss, grads = _accumulated(loss_of, sinks, tokens, accumulation)

  loss, grads = after((loss, grads), (loss, grads), program.on_cpu)
  loss = lax.psum(loss, shards.names)
  grads = after(grads, loss, program.on_cpu)
  with jax.named_scope("zero"):
    return loss, shards.finish(grads)


def _token_losses(
  program: Program, params: Any, tokens: jax.Array, sinks: Any = None
) -> jax.Array:
  """Losses ``[..., B, T]`` of one worker's parameters on this device.

  Args:
    program: Model and mesh.
    params: As stored; of a partition with sinks, the weights of a step.
    tokens: ``[..., B, T + 1]``; one dim D where there is a partition.
    sinks: See ``Gathered``; None: nothing is differentiated.
  """
  shards = program.shards
  if shards is None:
    losses = nnx.merge(program.graph, params).token_losses
    for _ in range(tokens.ndim - 2):
      losses = jax.vmap(losses)
    return losses(tokens)
  if sinks is None:
    params = shards.working(params, program.tensors)
    sinks = jax.tree.map(lambda _: None, program.tensors)
  params = jax.tree.map(
    lambda tensor, weight, sink: Shard(weight, sink, tensor),
    program.tensors, params, sinks,
  )
  model = nnx.merge(program.graph, params)
  return model.token_losses(tokens, Gathered(shards, program.prefetch))


def _accumulated(
  loss_of: Callable[[Any, jax.Array], jax.Array],
  params: Any,
  tokens: jax.Array,
  accumulation: int,
) -> tuple[jax.Array, Any]:
  """Mean loss and gradients over microbatches of ``[..., M * B, T + 1]``."""
  value_and_grad = jax.value_and_grad(loss_of)
  if accumulation == 1:
    return value_and_grad(params, tokens)
  *ranks, _, length = tokens.shape
  microbatches = jnp.moveaxis(
    tokens.reshape(*ranks, accumulation, -1, length), -3, 0
  )

  def add(total, microbatch):
    return jax.tree.map(jnp.add, total, value_and_grad(params, microbatch)), ()

  start = jax.eval_shape(value_and_grad, params, microbatches[0])
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
    stacked = after(stacked, total, program.on_cpu)
    summed = lax.psum(stacked, names) if names else stacked
    total |= dict(zip(of_groups, summed, strict=True))
  return {group: jnp.sqrt(square) for group, square in total.items()}
