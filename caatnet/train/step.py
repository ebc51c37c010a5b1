"""One training step under ``shard_map``, every collective explicit.

Gradients are local to a data shard; one reduction per step over the data
axis, after accumulation; the optimizer runs on each rank's slice.

Shape legend: D = data lanes, M = microbatches, B = batch of one microbatch,
T = sequence length.
"""

from collections.abc import Callable
from typing import Any

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax

from caatnet.train.state import Program, TrainState
from parallel.collectives import all_reduce, varying

Metrics = dict[str, jax.Array]


def make_train_step(
  program: Program,
  optimizer: optax.GradientTransformation,
  clip_norm: float,
  accumulation: int = 1,
) -> Callable[[TrainState, jax.Array], tuple[TrainState, Metrics]]:
  """The jitted step; donates the state.

  Args:
    program: Model and mesh.
    optimizer: Elementwise in the parameters; clipping is done here, since the
      global norm of sliced parameters needs the tensor axis.
    clip_norm: Largest global gradient norm; 0 does not clip.
    accumulation: Microbatches per step.

  Returns:
    ``(state, tokens) -> (state, metrics)`` with tokens int ``[data shards,
    batch per shard, T + 1]`` and the metrics loss (mean nats per token) and
    grad_norm, in all and per parameter group.
  """
  graph, specs = program.graph, program.specs

  def step(state: TrainState, tokens: jax.Array):
    params = _varying_params(state.params, program)
    loss, grads = jax.vmap(
      lambda shard: _gradients(graph, params, shard, accumulation)
    )(tokens)
    loss = all_reduce(loss, program.data) / program.data.size
    grads = _reduce(grads, program)
    norms = _group_norms(grads, program)
    norm = jnp.sqrt(sum(jnp.square(n) for n in norms.values()))
    if clip_norm:
      factor = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))
      grads = jax.tree.map(lambda g: g * factor, grads)
    updates, opt_state = optimizer.update(
      grads, state.opt_state, state.params
    )
    params = optax.apply_updates(state.params, updates)
    metrics = {"loss": loss, "grad_norm": norm}
    metrics |= {f"grad_norm/{group}": n for group, n in norms.items()}
    new_state = TrainState(state.step + 1, params, opt_state, state.key)
    return new_state, metrics

  state_specs = program.state_specs(optimizer)
  groups = ("loss", "grad_norm") + tuple(
    f"grad_norm/{g}" for g in parameter_groups(specs)
  )
  mapped = jax.shard_map(
    step,
    mesh=program.mesh,
    in_specs=(state_specs, program.batch_spec),
    out_specs=(state_specs, {g: P() for g in groups}),
  )
  state_shardings = program.shardings(state_specs)
  return jax.jit(
    mapped,
    donate_argnums=0,
    in_shardings=(state_shardings, program.shardings(program.batch_spec)),
    out_shardings=(state_shardings, program.shardings(P())),
  )


def make_eval_step(program: Program) -> Callable[[Any, jax.Array], jax.Array]:
  """The jitted evaluation.

  Args:
    program: Model and mesh.

  Returns:
    ``(params, tokens) -> losses``: tokens int ``[data shards, batch per
    shard, T + 1]``, losses float32 ``[data shards, batch per shard, T]``.
  """
  graph = program.graph

  def evaluate(params, tokens):
    model = nnx.merge(graph, params)
    return jax.vmap(model.token_losses)(tokens)

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


def _group(path: tuple[Any, ...]) -> str:
  return "/".join(str(key.key) for key in path)


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
  gains) are cast over it, and ``_reduce`` sums their gradients there.
  """
  names = (program.data.name, program.tensor.name)
  return jax.tree.map(lambda p: varying(p, *names), params)


def _reduce(grads: Any, program: Program) -> Any:
  """Means over data shards ``[D, ...]``; sums replicated ones over ranks."""
  data, tensor = program.data, program.tensor

  def reduce(grad, spec):
    grad = all_reduce(grad, data) / data.size
    return grad if tensor.name in spec else lax.psum(grad, tensor.name)

  return jax.tree.map(reduce, grads, program.specs)


def _group_norms(grads: Any, program: Program) -> Metrics:
  """Norm per group, each logical parameter counted once. One reduction."""
  name = program.tensor.name
  sharded, replicated = {}, {}
  for (path, grad), spec in zip(
    jax.tree.leaves_with_path(grads),
    jax.tree.leaves(program.specs, is_leaf=lambda x: isinstance(x, P)),
    strict=True,
  ):
    square = jnp.sum(jnp.square(grad.astype(jnp.float32)))
    (sharded if name in spec else replicated)[_group(path)] = square
  summed = lax.psum(jnp.stack(list(sharded.values())), name)
  squares = dict(zip(sharded, summed, strict=True)) | replicated
  return {group: jnp.sqrt(square) for group, square in squares.items()}
