"""Workers that join or leave a run, at the border of a round, when it resumes.

A checkpoint has the arrays of all workers. Read for fewer workers, the last
ones' part is dropped: these workers leave, with all that they have not told the
others. Read for more, the new workers' part is zero, and is filled in here:
they start from the outer parameters, with a new inner optimizer at the run's
place in its schedule (`OuterLoop.joined`).
"""

import itertools
from typing import Any

import jax

from caatnet.train.checkpoint.save import Checkpointer
from caatnet.train.experiment import Experiment
from caatnet.train.state import TrainState, with_schedule_of
from parallel.outer.base import of_joined


def check(experiment: Experiment, checkpointer: Checkpointer) -> str:
  """Checks whether the run may go on with as many workers as it now has.

  Args:
    experiment: The run.
    checkpointer: Its checkpoints.

  Returns:
    What changes, in a line for users; "" if nothing does.

  Raises:
    ValueError: The newest checkpoint is in the middle of a round.
  """
  step = checkpointer.latest_step()
  if step is None:
    return ""
  before, now = checkpointer.num_workers(step), _num_workers(experiment)
  if before == now:
    return ""
  later = itertools.count(step)
  border = next(s for s in later if experiment.outer.is_border(s))
  if border > step:
    raise ValueError(
      f"config.parallel.worker={now}: the checkpoint of step {step} has "
      f"{before} workers and is in the middle of a round; go on with {before} "
      f"and --config.train.checkpoint_every={border} to step {border}, where "
      "workers may join or leave"
    )
  who = ", ".join(map(str, range(min(before, now), max(before, now))))
  what = (
    "starts from the outer parameters" if now > before else
    "leaves, with what it has not sent"
  )
  return (
    f"{before} -> {now} at step {step}: worker {who} {what}; means under way "
    "arrive as planned"
  )


def joined(
  experiment: Experiment, params: Any, outer: Any, before: int
) -> tuple[Any, Any]:
  """Fills in the parameters and the outer state of workers that join.

  Args:
    experiment: The run.
    params: The workers' parameters, as they are stored.
    outer: The outer loop's state.
    before: The number of workers that the checkpoint has.

  Returns:
    Both, laid out as they were.
  """
  if before >= _num_workers(experiment):
    return params, outer
  return jax.jit(
    experiment.outer.joined, static_argnums=2,
    out_shardings=jax.tree.map(lambda x: x.sharding, (params, outer)),
  )(params, outer, before)


def state_of_all(
  experiment: Experiment, state: TrainState, before: int
) -> TrainState:
  """Fills in a training state for workers that join; see `joined`."""
  if before >= _num_workers(experiment):
    return state
  params, outer = joined(experiment, state.params, state.outer, before)

  def fill(opt_state, params):
    first = jax.tree.map(lambda x: x[before], params)
    new = experiment.optimizer.init(first)
    # The place in the schedule is that of the workers before.
    new = with_schedule_of(jax.tree.map(lambda x: x[0], opt_state), new)
    return of_joined(opt_state, new, before)

  shardings = jax.tree.map(lambda x: x.sharding, state.opt_state)
  device = jax.tree.map(
    lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")),
    state.opt_state,
  )
  opt_state = jax.device_put(jax.jit(fill)(device, params), shardings)
  return state._replace(params=params, outer=outer, opt_state=opt_state)


def _num_workers(experiment: Experiment) -> int:
  return experiment.program.layout.worker.size
