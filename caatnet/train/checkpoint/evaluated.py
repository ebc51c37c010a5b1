"""Reads from a run's folder the parameters that stand for the run."""

import os
from typing import Any

from caatnet.train.checkpoint.reshard import to_whole
from caatnet.train.checkpoint.save import Checkpointer
from caatnet.train.elastic import membership
from caatnet.train.experiment import Experiment


def read(
  experiment: Experiment,
  workdir: str | os.PathLike[str],
  step: int | None = None,
) -> tuple[Any, int]:
  """Reads the parameters that the outer loop says stand for a run.

  Args:
    experiment: The run.
    workdir: Its folder.
    step: The step of the checkpoint; None for the newest one.

  Returns:
    The parameters of one worker, whole, and the step of the checkpoint.

  Raises:
    FileNotFoundError: There is no such checkpoint.
    ValueError: It is damaged, or one of another program.
  """
  stored, step = read_stored(experiment, workdir, step)
  return to_whole(experiment.program, stored), step


def read_stored(
  experiment: Experiment,
  workdir: str | os.PathLike[str],
  step: int | None = None,
) -> tuple[Any, int]:
  """Reads the same parameters as `read`, as the partition stores them."""
  checkpointer = Checkpointer(workdir, experiment.program)
  abstract = experiment.abstract_state()
  params, outer, step, workers = checkpointer.restore_params(
    abstract.params, abstract.outer, step
  )
  checkpointer.close()
  params, outer = membership.joined(experiment, params, outer, workers)
  return experiment.make_evaluated()(params, outer), step
