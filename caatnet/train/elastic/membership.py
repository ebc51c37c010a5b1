"""Change of the number of workers when a run resumes between two rounds.

A checkpoint has the arrays of all workers. If it is read for fewer workers, the
last workers are dropped with their updates that have not been exchanged. If it
is read for more workers, the arrays of new workers are zero and are filled here
(`ElasticAdapter.joined`): new workers start from the outer parameters, with a
new inner optimizer at the run's schedule step.
"""

import itertools
from typing import Any

import jax

from caatnet.program import SplitParams
from caatnet.train.checkpoint.save import Checkpointer
from caatnet.train.experiment import Experiment
from caatnet.train.state import TrainState, with_schedule_of
from parallel.outer.joining import elastic_adapter, set_joining_values


def check(experiment: Experiment, checkpointer: Checkpointer) -> str:
  """Checks whether the run may resume with its current number of workers.

  Args:
    experiment: The run.
    checkpointer: The checkpoints of the run.

  Returns:
    A line for users about the change; "" if the number is unchanged.

  Raises:
    ValueError: If the number has changed and the newest checkpoint is in the
      middle of a round.
  """
  step = checkpointer.latest_step()
  if step is None:
    return ""
  before, now = checkpointer.num_workers(step), _num_workers(experiment)
  if before == now:
    return ""
  later, joining = itertools.count(step), elastic_adapter(experiment.outer)
  border = next(s for s in later if joining.is_round_boundary(s))
  if border > step:
    raise ValueError(
      f"config.parallel.worker={now}: the checkpoint of step {step} has "
      f"{before} workers and is in the middle of a round; continue with "
      f"{before} and --config.train.checkpoint_every={border} to step "
      f"{border}, where workers may join or leave"
    )
  who = ", ".join(map(str, range(min(before, now), max(before, now))))
  what = (
    "starts from the outer parameters" if now > before else
    "leaves, and its unsent updates are lost"
  )
  return (
    f"{before} -> {now} at step {step}: worker {who} {what}; means that have "
    "been sent are applied as planned"
  )


def init_new_workers(
  experiment: Experiment, params: Any, outer: Any, before: int
) -> tuple[Any, Any]:
  """Fills in the parameters and the outer state of new workers.

  Args:
    experiment: The run.
    params: The workers' stored parameters.
    outer: The outer loop's state.
    before: The number of workers of the checkpoint.

  Returns:
    Parameters and outer state, with unchanged shardings.
  """
  if before >= _num_workers(experiment):
    return params, outer
  leaves, tree = jax.tree.flatten((params, outer))

  # One program per array: within one program, the all-reduces of arrays with
  # different shardings would have no order
  # (`parallel.collectives.order_after`).
  def fill(params, outer, number):
    trained, explicit = experiment.program.split(params)
    adapter = elastic_adapter(experiment.outer)
    trained, outer = adapter.joined(trained, outer, before)
    # New workers begin with the explicit state of worker 0.
    explicit = jax.tree.map(lambda x: x.at[before:].set(x[0]), explicit)
    found = SplitParams(trained, explicit).join(), outer
    return jax.tree.leaves(found)[number]

  return tree.unflatten(
    jax.jit(fill, static_argnums=2, out_shardings=x.sharding)(
      params, outer, number
    )
    for number, x in enumerate(leaves)
  )


def init_new_states(
  experiment: Experiment, state: TrainState, before: int
) -> TrainState:
  """Fills in the training state of new workers; see `init_new_workers`."""
  if before >= _num_workers(experiment):
    return state
  params, outer = init_new_workers(
    experiment, state.params, state.outer, before
  )

  def fill(opt_state, params):
    first = jax.tree.map(lambda x: x[before], params)
    new = experiment.optimizer.init(first)
    # The schedule continues from the step of the previous workers.
    new = with_schedule_of(jax.tree.map(lambda x: x[0], opt_state), new)
    return set_joining_values(opt_state, new, before)

  shardings = jax.tree.map(lambda x: x.sharding, state.opt_state)
  device = jax.tree.map(
    lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")),
    state.opt_state,
  )
  trained = experiment.program.split(params).trained
  opt_state = jax.device_put(jax.jit(fill)(device, trained), shardings)
  return state._replace(params=params, outer=outer, opt_state=opt_state)


def _num_workers(experiment: Experiment) -> int:
  return experiment.program.layout.worker.size
