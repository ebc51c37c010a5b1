"""One training step under ``shard_map``, every collective explicit.

Gradients are local to a data shard; one reduction per step over the data
axis, after accumulation; the optimizer runs on each rank's slice. Workers have
their own parameters and meet in the outer loop only.

Shape legend: D = data lanes, M = microbatches, B = batch of one microbatch,
T = sequence length.
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
from parallel.collectives import after, all_reduce, each_lane, varying
from parallel.outer.base import OuterLoop, Plan

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
    ``[workers, data shards, batch per shard, T + 1]``, numbers those of the
    plan, and the metrics ``[workers]``: loss (mean nats per token) and
    grad_norm, in all and per parameter group.
  """
  worker, on_cpu = program.worker, _on_cpu(program)

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
    if on_cpu:
      tokens = after(tokens, carried)
    loss, grads = each_lane(
      functools.partial(_worker_gradients, program, accumulation),
      worker, state.params, tokens,
    )
    with jax.named_scope("outer"):
      grads = outer.gradients(grads, carried)
    updates, opt_state, norms = each_lane(
      update, worker, grads, state.opt_state, state.params
    )
    if on_cpu:
      updates = after(updates, (loss, norms))
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
  state_shardings = program.shardings(state_specs)
  return jax.jit(
    mapped,
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
    ``[workers, data shards, batch per shard, T + 1]``, losses float32
    ``[workers, data shards, batch per shard, T]``.
  """
  graph = program.graph

  def evaluate(params, tokens):
    model = nnx.merge(graph, params)
    shards = tokens.reshape(-1, *tokens.shape[2:])
    losses = jax.vmap(model.token_losses)(shards)
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
  """Loss and gradients of one worker ``[D, M * B, T + 1]``, reduced."""
  data = program.data
  params = _varying_params(params, program)
  loss, grads = jax.vmap(
    lambda shard: _gradients(program.graph, params, shard, accumulation)
  )(tokens)
  if _on_cpu(program):
    grads = after(grads, (loss, grads))
  # Means over data shards [D, ...], then sums of replicated ones over ranks.
  loss, grads = jax.tree.map(
    lambda x: all_reduce(x, data) / data.size, (loss, grads)
  )
  if _on_cpu(program):
    grads = after(grads, (loss, grads))
  name = program.tensor.name
  return loss, jax.tree.map(
    lambda grad, spec: grad if name in spec else lax.psum(grad, name),
    grads, program.specs,
  )


def _on_cpu(program: Program) -> bool:
  return program.mesh.devices.flat[0].platform == "cpu"


def _gradients(
  graph: Any, params: Any, tokens: jax.Array, accumulation: int
) -> tuple[jax.Array, Any]:
  """Loss and gradients of one data shard ``[M * B, T + 1]``. No reduction."""

  def loss_fn(params, microbatch):
    return nnx.merge(graph, params).token_losses(microbatch).mean()

  value_and_grad = jax.value_and_grad(loss_fn)
  if accumulation == 1:
    return value_and_grad(params, tokens)
  microbatches = tokens.reshape(accumulation, -1, tokens.shape[-1])

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


def _varying_params(params: Any, program: Program) -> Any:
  """Casts so that differentiation inserts no reduction of its own.

  Sharded parameters vary over the tensor axis already; the others (norm
  gains) are cast over it, and ``_worker_gradients`` sums their gradients there.
  """
  names = (program.data.name, program.tensor.name)
  return jax.tree.map(lambda p: varying(p, *names), params)


def _group_norms(grads: Any, program: Program) -> Metrics:
  """Norm per group, each logical parameter counted once. One reduction."""
  name = program.tensor.name
  sharded, replicated = {}, {}
  for (path, grad), spec in zip(
    jax.tree.leaves_with_path(grads),
    jax.tree.leaves(program.specs, is_leaf=is_spec),
    strict=True,
  ):
    square = jnp.sum(jnp.square(grad.astype(jnp.float32)))
    (sharded if name in spec else replicated)[_group(path)] = square
  summed = lax.psum(jnp.stack(list(sharded.values())), name)
  squares = dict(zip(sharded, summed, strict=True)) | replicated
  return {group: jnp.sqrt(square) for group, square in squares.items()}
