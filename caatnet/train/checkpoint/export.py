"""Parameters to evaluate, read from a run's folder."""

import os
from typing import Any

from caatnet.train.checkpoint.reshard import to_whole
from caatnet.train.checkpoint.save import Checkpointer
from caatnet.train.elastic import membership
from caatnet.train.experiment import Experiment


def read_params(
  experiment: Experiment,
  workdir: str | os.PathLike[str],
  step: int | None = None,
) -> tuple[Any, int]:
  """Reads the parameters to evaluate, such as the mean over workers.

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
  stored, step = read_stored_params(experiment, workdir, step)
  return to_whole(experiment.program, stored), step


def read_stored_params(
  experiment: Experiment,
  workdir: str | os.PathLike[str],
  step: int | None = None,
) -> tuple[Any, int]:
  """Reads parameters like `read_params`, as shards of the ZeRO partition."""
  checkpointer = Checkpointer(workdir, experiment.program)
  abstract = experiment.abstract_state()
  params, outer, step, workers = checkpointer.restore_params(
    abstract.params, abstract.outer, step
  )
  checkpointer.close()
  params, outer = membership.init_new_workers(
    experiment, params, outer, workers
  )
  return experiment.make_export_params()(params, outer), step
