"""Parameters to evaluate, read from a run's folder."""

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
  """Reads the parameters that the outer loop defines for evaluation.

  Args:
    experiment: The run.
    workdir: The folder of the run.
    step: The step of the checkpoint; None for the newest one.

  Returns:
    Whole parameters without a worker dim, and the step of the checkpoint.

  Raises:
    FileNotFoundError: If there is no such checkpoint.
    ValueError: If it is damaged, or does not match the experiment.
  """
  stored, step = read_stored(experiment, workdir, step)
  return to_whole(experiment.program, stored), step


def read_stored(
  experiment: Experiment,
  workdir: str | os.PathLike[str],
  step: int | None = None,
) -> tuple[Any, int]:
  """Reads the same parameters as `read`, as the ZeRO partition stores them."""
  checkpointer = Checkpointer(workdir, experiment.program)
  abstract = experiment.abstract_state()
  params, outer, step, workers = checkpointer.restore_params(
    abstract.params, abstract.outer, step
  )
  checkpointer.close()
  params, outer = membership.joined(experiment, params, outer, workers)
  return experiment.make_export()(params, outer), step
