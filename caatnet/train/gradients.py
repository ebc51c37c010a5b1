"""Loss and gradients of one worker, inside ``jax.shard_map``.

Gradients are local to a data-parallel rank and are reduced once per step, after
accumulation. With a ZeRO partition (`parallel.zero`), they are also partly
reduced at every layer.

Shape legend: D = data-parallel ranks of this device (lanes), of all levels; M =
microbatches; B = examples of one microbatch.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from caatnet.models.checks import is_parameter
from caatnet.models.protocol import Score
from caatnet.program import Program
from caatnet.train import microbatches, staged
from caatnet.train.objective import Objective, divided, objective
from parallel.collectives import order_after, varying
from parallel.zero.gathered import Shard


def worker_gradients(
  program: Program, accumulation: int, params: Any, batch: Any
) -> tuple[jax.Array, Any]:
  """Computes one worker's loss and gradients, reduced over its ranks.

  Args:
    program: The model on a mesh.
    accumulation: M, microbatches per step.
    params: The worker's stored parameters.
    batch: The worker's part of the batch, ``[*levels, M * B, ...]``, with a dim
      per level for the data-parallel ranks of this device; B = examples of one
      microbatch.

  Returns:
    The mean loss over the worker's examples, float32 scalar, and its gradients
    with the layout of the stored parameters.
  """
  layout = program.layout
  batch = jax.tree.map(  # [D, M * B, ...]
    lambda x: x.reshape(-1, *x.shape[len(layout.data) :]), batch
  )
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
          program,
          lambda params, batch: objective(
            scores(program, params, batch)["loss"]
          ),
          params, rank, accumulation,
        )
      )(batch)
    # Every leaf is made to depend on all others, so the reductions over the
    # data axes follow the backward's last reduction over the tensor axis.
    losses, grads = order_after(
      (losses, grads), (losses, grads), layout.ordered
    )
    # [D, ...] -> [...]: over lanes, then over devices.
    loss = jax.tree.map(lambda x: lax.psum(jnp.sum(x, axis=0), names), losses)
    grads = jax.tree.map(
      lambda x, spec: lax.psum(
        jnp.sum(x, axis=0), tuple(name for name in names if name not in spec)
      ), grads, program.specs,
    )
  else:
    loss, grads = _partitioned_gradients(program, params, batch, accumulation)
  divisor = loss.divisor(layout.num_data_ranks, last=True)
  loss = loss.divided(divisor).loss
  grads = divided(program, grads, divisor)
  grads = order_after(grads, (loss, grads), layout.ordered)
  return loss, _reduce_replicated_grads(program, grads)


def _reduce_replicated_grads(program: Program, grads: Any) -> Any:
  """Sums gradients over the ranks that hold copies of a parameter.

  All tensor ranks and stages read a replicated parameter, such as a norm's
  gain, so its gradient is the sum over all of them. A slice of a parameter is
  read by one rank only, so its gradient is not summed. Statistics of explicit
  state, which devices with the same examples report equally, are averaged.
  """
  names = [axis.name for axis in program.layout.model_axes]
  ordered = program.layout.ordered
  # Axes of an all-reduce -> its results.
  sums: dict[tuple[str, ...], list[jax.Array]] = {}

  def summed(p, grad, spec):
    over = tuple(name for name in names if name not in spec)
    if not over:
      return grad
    others = [x for axes, results in sums.items() if axes != over
              for x in results]
    grad = order_after(grad, others, ordered)
    reduction = lax.pmean if p.update else lax.psum
    sums.setdefault(over, []).append(reduction(grad, over))
    return sums[over][-1]

  grads = jax.tree.map(
    summed, program.model.parameters, grads, program.specs,
    is_leaf=is_parameter,
  )
  # Orders the all-reduces of gradient norms, over other axes, after these sums.
  return order_after(grads, grads, ordered and len(sums) > 1)


def _partitioned_gradients(
  program: Program, params: Any, batch: Any, accumulation: int
) -> tuple[Objective, Any]:
  """Computes loss and gradients of a worker with a ZeRO partition.

  Args:
    program: The model on a mesh, with a partition.
    params: The stored shards of the worker's parameters.
    batch: ``[D, M * B, ...]``, D = data-parallel ranks of this device, B =
      examples of one microbatch.
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
  batch = order_after(batch, weights, layout.ordered)
  # Cast for the same reason as in `worker_gradients`. Differentiation is with
  # respect to the sinks, which receive the gradients of the gathered weights
  # (`parallel.zero.gathered`).
  weights = jax.tree.map(lambda x: varying(x, *names), weights)
  sinks = jax.tree.map(
    lambda tensor, x: varying(shards.sink(x, tensor), *names),
    program.tensors, params,
  )

  def loss_of(sinks, batch):
    return objective(scores(program, weights, batch, 1, sinks)["loss"], 1)

  if layout.stages is not None:
    loss, grads = staged.gradients(program, sinks, batch, weights)
  else:
    loss, grads = _accumulated(
      program, loss_of, sinks, batch, accumulation, num_lead=1
    )
  loss, grads = order_after((loss, grads), (loss, grads), layout.ordered)
  loss = jax.tree.map(lambda x: lax.psum(x, shards.names), loss)
  grads = order_after(grads, loss, layout.ordered)
  with jax.named_scope("zero"):
    return loss, shards.finish(grads, program.tensors)


def scores(
  program: Program,
  params: Any,
  batch: Any,
  num_lead: int = 0,
  sinks: Any = None,
) -> dict[str, Score]:
  """Computes the model's scores on this device, for one worker.

  Args:
    program: The model on a mesh.
    params: The stored parameters; with ``sinks``, the weights gathered for the
      step.
    batch: Tree of ``[D, B, ...]``, or without a partition also ``[B, ...]``,
      with D = data-parallel ranks of this device and B = examples.
    num_lead: The number of dims before B, 1 or 0.
    sinks: Arrays whose gradients are those of a partition's weights
      (`parallel.zero.gathered`); None without differentiation.
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
  assert num_lead == 1  # `GatheredAccess` maps the functions over D itself
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
  program: Program,
  loss_of: Callable[[Any, Any], Objective],
  params: Any,
  batch: Any,
  accumulation: int,
  num_lead: int = 0,
) -> tuple[Objective, Any]:
  """Averages loss and gradients over the microbatches of a batch.

  Args:
    program: The model on a mesh.
    loss_of: A function ``(params, microbatch) -> objective``.
    params: First argument of ``loss_of``, which is differentiated.
    batch: Tree of ``[..., M * B, ...]`` with ``num_lead`` dims before the
      examples, B per microbatch.
    accumulation: M, the number of microbatches.
    num_lead: The number of dims before the examples.

  Returns:
    The mean loss, and the mean gradients with respect to ``params``; with a
    count, their sums.
  """

  def value_and_grad(params, batch):
    def loss(params):
      found = loss_of(params, batch)
      return found.loss, found

    grads, found = jax.grad(loss, has_aux=True)(params)
    return found, grads

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
  (found, grads), _ = lax.scan(add, zeros, parts)
  divisor = found.divisor(accumulation)
  return found.divided(divisor), divided(program, grads, divisor)
