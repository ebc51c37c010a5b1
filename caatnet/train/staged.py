"""Loss, gradients and scores of a model in pipeline stages.

Shape legend: G = stages of this device; D = data-parallel ranks of this device;
M = microbatches; B = examples of one microbatch.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from caatnet.models.protocol import PipelineParts, Score
from caatnet.program import Program
from caatnet.stages import Stages
from caatnet.train import microbatches
from caatnet.train.objective import Objective, divided, objective
from parallel.collectives import ranks_here
from parallel.pipeline.run import ModelFunctions, Pipeline, PipelineParams
from parallel.zero.gathered import Shard


def gradients(
  program: Program, params: Any, batch: Any, weights: Any = None
) -> tuple[Objective, Any]:
  """Computes the mean loss and gradients of a step's microbatches.

  Args:
    program: The model on a mesh with stages.
    params: Tree to differentiate: parameters, or a ZeRO partition's gradient
      sinks. Its arrays have the JAX type "varying" over all axes over which
      gradients are reduced later.
    batch: Tree of ``[M * B, ...]``, M microbatches of B examples; with a
      partition ``[D, M * B, ...]``, D = data-parallel ranks of this device.
    weights: With a partition, the gathered weights of this step; else None.

  Returns:
    The mean loss over microbatches and examples (with a partition, summed over
    D), and gradients with the layout of ``params``; with a count, their sums.
  """
  stages, parts = _stages(program), program.model.parts()
  count = stages.schedule.num_microbatches
  pipeline = Pipeline(
    stages.schedule, stages.axis, program.layout.ordered, stages.keeps
  )

  def loss_of(scores):
    return objective(scores["loss"], num_lead=0 if weights is None else 1)

  loss, grads = pipeline.gradients(
    _pipeline_functions(program, parts, weights, loss_of),
    _params(stages, parts, params), _chunks(stages, parts, weights),
    microbatches.split(batch, count, num_lead=0 if weights is None else 1),
  )
  divisor = loss.divisor(count)
  return loss.divided(divisor), divided(
    program, _merge_gradients(program, parts, grads), divisor
  )


def each_rank(f: Callable[[Any], Any], batch: Any) -> Any:
  """Runs a function for each data-parallel rank sequentially.

  With ``jax.vmap`` the update of a buffer would become a scatter, for which
  XLA:TPU copies the buffer.

  Args:
    f: A function of one rank's batch.
    batch: Tree of ``[D, ...]``, D = data-parallel ranks of this device.

  Returns:
    The results, stacked to ``[D, ...]``.
  """
  if jax.tree.leaves(batch)[0].shape[0] > 1:
    return lax.map(f, batch)
  one = f(jax.tree.map(lambda x: x[0], batch))
  return jax.tree.map(lambda x: x[None], one)


def scores(
  program: Program, params: Any, batch: Any, weights: Any = None
) -> dict[str, Score]:
  """Returns the scores of examples, see `Model.scores`.

  Args:
    program: The model on a mesh with stages.
    params: Parameters; with a partition, a tree whose leaves are None.
    batch: Tree of ``[B, ...]``, B = examples; with a partition ``[D, B, ...]``,
      D = data-parallel ranks of this device.
    weights: With a partition, the gathered weights; else None.
  """
  stages, parts = _stages(program), program.model.parts()
  pipeline = Pipeline(stages.evaluation, stages.axis, program.layout.ordered)
  found = pipeline.scores(
    _pipeline_functions(program, parts, weights, lambda scores: scores),
    _params(stages, parts, params), _chunks(stages, parts, weights),
    jax.tree.map(lambda x: x[None], batch),  # one microbatch
  )
  return jax.tree.map(lambda x: x[0], found)


def _stages(program: Program) -> Stages:
  stages = program.layout.stages
  assert stages is not None
  return stages


def _pipeline_functions(
  program: Program, parts: PipelineParts, weights: Any, judged: Any
) -> ModelFunctions:
  """Returns the model's functions in the form that `Pipeline` calls.

  Args:
    program: The model on a mesh with stages.
    parts: The parts of the model.
    weights: With a partition, the gathered weights of this step; else None.
    judged: Function from the last stage's scores to the pipeline's result.
  """
  shards, axis = program.layout.shards, _stages(program).axis
  access = program.layout.access

  # Parameters in the representation that `access` reads.
  def viewed(key, params, weights):
    if shards is None:
      return program.readable({key: params})[key]
    tensors = program.tensors[key]
    sinks = params
    if params is None:
      sinks = jax.tree.map(lambda _: None, tensors)
    return jax.tree.map(
      lambda tensor, weight, sink: Shard(weight, sink, tensor),
      tensors, weights, sinks,
    )

  def all_viewed(around):
    return {
      key: viewed(key, value, None if weights is None else weights[key])
      for key, value in around.items()
    }

  def of(stage, tree):  # broadcasts the result of one stage to all stages
    if parts.together:
      return tree
    here = (ranks_here(axis) == stage).any()
    return lax.psum(
      jax.tree.map(lambda x: jnp.where(here, x, jnp.zeros_like(x)), tree),
      axis.name,
    )

  def enter(around, batch):
    return of(0, parts.enter(all_viewed(around), batch, access))

  def part(params, weights, x):
    return parts.layers(viewed(parts.stack, params, weights), x, access)

  def judge(around, x, batch):
    found = program.checked(parts.judge(all_viewed(around), x, batch, access))
    return of(axis.size - 1, judged(found))

  return ModelFunctions(enter, part, judge)


def _chunks(stages: Stages, parts: PipelineParts, tree: Any) -> Any:
  """Returns a tree's layer arrays by pipeline chunk.

  They are ``[G, chunks, layers, ...]`` for the G stages of this device.
  """
  if tree is None:
    return None
  chunks = stages.schedule.num_chunks
  return jax.tree.map(
    lambda x: x.reshape(x.shape[0], chunks, -1, *x.shape[2:]),
    tree[parts.stack],
  )


def _params(
  stages: Stages, parts: PipelineParts, params: Any
) -> PipelineParams:
  around = {k: v for k, v in params.items() if k != parts.stack}
  return PipelineParams(_chunks(stages, parts, params), around)


def _merge_gradients(
  program: Program, parts: PipelineParts, grads: PipelineParams
) -> Any:
  """Merges gradients of stacked layers and of other parameters into one tree.

  Gradients of padding layers are set to zero, so that these layers remain the
  identity. Without this, biases of padding layers would get gradients.
  """
  stages = _stages(program)
  of_stages = stages.layers(program.model.stacks[parts.stack])
  there = jnp.asarray(of_stages >= 0)[ranks_here(stages.axis)]  # [G, layers]

  def join(x):  # [G, chunks, layers, ...]
    x = x.reshape(*there.shape, *x.shape[3:])
    if (of_stages >= 0).all():
      return x
    mask = there.reshape(*there.shape, *[1] * (x.ndim - 2))
    return jnp.where(mask, x, 0)

  return grads.around | {parts.stack: jax.tree.map(join, grads.parts)}
