"""Training step under ``shard_map``, with every collective explicit.

Workers have separate parameters and communicate in the outer loop only.
Transfers that the outer loop overlaps with a step's compute are issued before
the gradients (`caatnet.train.gradients`), which do not depend on them.
`make_gradient_step` ends before the optimizer's update, which
`caatnet.train.update` then runs on the host.

On several CPU devices all collectives of a step are ordered
(`collectives.order_after`): XLA:CPU runs independent collectives in any order,
and two devices with different orders deadlock until they are aborted.

A diverged worker that is masked out of an exchange gets a new inner optimizer
in that step, since the moments of its old optimizer have diverged, too.
"""

from collections.abc import Callable, Hashable
import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
import optax

from caatnet.program import Program, SplitParams
from caatnet.train import explicit_state
from caatnet.train.gradients import worker_gradients
from caatnet.train.inner import Metrics, make_clip, make_update
from caatnet.train.norms import parameter_names
from caatnet.train.state import (
  TrainState,
  reset_left_out,
  state_shardings,
  state_specs,
)
from parallel.collectives import each_lane, order_after
from parallel.outer.base import OuterLoop, Plan


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
    ``[workers, *levels, batch per rank, ...]`` (a dim per level of
    data-parallel ranks) and the numbers of the outer loop's plan. Metrics
    are float32 ``[workers]``: the loss, gradient norms in total and by
    parameter, and the outer loop's metrics.
  """
  layout = program.layout
  update = make_update(program, optimizer, clip_norm)

  def step(state: TrainState, batch: Any, numbers: Any):
    plan = Plan(variant, numbers)
    before, explicit = program.split(state.params)
    loss, (grads, statistics), carried = _all_gradients(
      program, outer, accumulation, state.params, state.outer, batch, plan
    )
    updates, opt_state, norms = update(grads, state.opt_state, before)
    updates = order_after(updates, (loss, norms), layout.ordered)
    with jax.named_scope("outer"):
      params, carried = outer.finish(before, updates, carried, plan)
    told = outer_metrics(outer, carried, state.outer)
    opt_state = reset_left_out(program, optimizer, opt_state, params, told)
    explicit = order_after(
      explicit, (params, carried), layout.ordered and bool(explicit)
    )
    explicit = explicit_state.updated(
      program, explicit, statistics, outer.averages_state(variant)
    )
    new_state = TrainState(
      state.step + 1, SplitParams(params, explicit).join(), opt_state, carried,
      state.key,
    )
    return new_state, {"loss": loss} | norms | told

  return _compiled(program, optimizer, outer, step, updates=True)


def make_gradient_step(
  program: Program,
  optimizer: optax.GradientTransformation,
  outer: OuterLoop,
  clip_norm: float,
  accumulation: int,
  variant: Hashable,
) -> Callable[..., tuple[Any, Metrics]]:
  """Returns a jitted function that computes a step's clipped gradients.

  Args:
    program: The model on a mesh.
    optimizer: The inner optimizer, which only defines the state's structure.
    outer: The outer loop, which may change gradients but not parameters.
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

  def step(state: TrainState, batch: Any, numbers: Any):
    loss, (grads, _), _ = _all_gradients(
      program, outer, accumulation, state.params, state.outer, batch,
      Plan(variant, numbers),
    )
    grads, norms = each_lane(clip, layout.worker, grads)
    return grads, {"loss": loss} | norms

  return _compiled(program, optimizer, outer, step, updates=False)


def _compiled(
  program: Program, optimizer: optax.GradientTransformation, outer: OuterLoop,
  step: Callable[..., tuple[Any, Metrics]], updates: bool,
) -> Callable[..., tuple[Any, Metrics]]:
  """Returns a jitted ``(state, batch, numbers) -> (result, metrics)``.

  Args:
    program: The model on a mesh.
    optimizer: The inner optimizer.
    outer: The outer loop.
    step: The function, which runs inside ``jax.shard_map``.
    updates: Whether the result is the next state, and the given state is
      donated. Otherwise the result has the layout of the parameters, and
      ``opt_state`` of the given state is empty.
  """
  layout = program.layout
  specs = state_specs(program, optimizer, outer)
  placed = state_shardings(program, optimizer, outer)
  if not updates:
    specs, placed = (x._replace(opt_state=()) for x in (specs, placed))
  metrics = _metric_specs(program, outer)
  mapped = jax.shard_map(
    step,
    mesh=layout.mesh,
    in_specs=(specs, layout.batch_spec, P()),
    out_specs=(specs if updates else specs.params, metrics),
  )
  return jax.jit(
    mapped,
    donate_argnums=0 if updates else (),
    in_shardings=(
      placed,
      layout.shardings(layout.batch_spec),
      layout.shardings(P()),
    ),
    out_shardings=(
      placed if updates else placed.params, layout.shardings(metrics)
    ),
  )


def _all_gradients(
  program: Program, outer: OuterLoop, accumulation: int, params: Any,
  state: Any, batch: Any, plan: Plan,
) -> tuple[jax.Array, SplitParams, Any]:
  """Computes the workers' losses and gradients, inside ``jax.shard_map``.

  Args:
    program: The model on a mesh.
    outer: The outer loop.
    accumulation: Microbatches per step.
    params: Stored parameters ``[W, ...]`` of the W workers on this device.
    state: State of the outer loop.
    batch: The workers' part of the batch.
    plan: The outer loop's plan of the step.

  Returns:
    Losses ``[W]``, gradients ``[W, ...]`` for the inner optimizers with the
    statistics of explicit state, and the outer loop's state.
  """
  layout = program.layout
  # Before the gradients, so that transfers overlap with their compute.
  with jax.named_scope("outer"):
    carried = outer.begin(program.split(params).trained, state, plan)
  batch = order_after(batch, carried, layout.ordered)
  # A partition's gathers do not read the batch, so params are ordered, too.
  params = order_after(
    params, carried, layout.ordered and layout.shards is not None
  )
  loss, grads = each_lane(
    functools.partial(worker_gradients, program, accumulation),
    layout.worker, params, batch,
  )
  trained, statistics = program.split(grads)
  with jax.named_scope("outer"):
    trained = outer.gradients(trained, carried)
  return loss, SplitParams(trained, statistics), carried


def _metric_specs(program: Program, outer: OuterLoop) -> dict[str, P]:
  """Returns a ``PartitionSpec`` for each metric of a step, ``[workers]``."""
  names = ["loss", "grad_norm"]
  names += [f"grad_norm/{g}" for g in parameter_names(program.trained_shapes)]
  first = jax.eval_shape(outer.init, program.trained_shapes)
  told = jax.eval_shape(functools.partial(outer_metrics, outer), first, first)
  return {name: P(program.layout.worker.name) for name in (*names, *told)}


def outer_metrics(outer: OuterLoop, after: Any, before: Any) -> Metrics:
  """Returns the outer loop's metrics of a step.

  Args:
    outer: The outer loop.
    after: State of the outer loop after the step.
    before: State of the outer loop before the step.

  Returns:
    Arrays ``[W]`` by name, one element per worker; "just_left_out" counts this
    step's exchanges that excluded the worker. {} for a loop without metrics.
  """
  told = outer.metrics(after)
  if not told:
    return {}
  left_out = told["left_out"] - outer.metrics(before)["left_out"]
  return told | {"just_left_out": left_out}
