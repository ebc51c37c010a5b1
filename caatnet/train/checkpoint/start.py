"""Start of a run from another run's parameters: config.train.init_from.

Tensor ranks sum only a fraction p of the channels (config.sync.p). Parameters
are dense matrices cut over ranks, whatever p is, so a run with any p can start
from a run with p = 1. A channel that is then no longer summed has on each rank
only this rank's summand.
"""

from collections.abc import Mapping
from typing import Any

from etils import epath

from caatnet.data.tokenizers import Tokenizer
from caatnet.train import records, tokenizer
from caatnet.train.checkpoint.save import Checkpointer
from caatnet.train.experiment import Experiment
from caatnet.train.state import TrainState
from parallel.base import files
from parallel.plans.axis_kinds import AXES

# Keys of ``config.model`` that do not change the function of the parameters.
_IGNORED_MODEL_KEYS = ("dtype", "remat", "unroll", "attention", "init_std")


def check(
  experiment: Experiment, workdir: epath.Path, tokens: Tokenizer | None
) -> None:
  """Checks that a run can start from the parameters of ``init_from``.

  A run that already has a checkpoint does not read them, so it is not checked.

  Args:
    experiment: The run.
    workdir: The folder of the run, which may not exist yet.
    tokens: The run's tokenizer; None if its data are not text.

  Raises:
    FileNotFoundError: If the other folder holds no run.
    ValueError: If the other run has another model or another number of tensor
      ranks (the message names all keys), another tokenizer, or workers with
      different parameters.
  """
  if not experiment.train.init_from:
    return
  if Checkpointer(workdir, experiment.program).steps():
    return
  folder, key = _source_folder(experiment)
  if not (folder / "config.json").exists():
    raise FileNotFoundError(f"{key} holds no run (config.json)")
  theirs, ours = records.read_config(folder), experiment.config
  check_model(key, theirs, ours)
  other = tokens and tokenizer.load(folder)
  if other and other.identity != tokens.identity:
    raise ValueError(
      f"{key} has the tokenizer {tokenizer.summary(other)}, but this run has "
      f"{tokenizer.summary(tokens)}; set config.data.tokenizer to the same one"
    )
  algorithm = theirs["outer"]["algorithm"]
  if algorithm != "data_parallel":
    raise ValueError(
      f"{key} has config.outer.algorithm={algorithm!r}: its workers have "
      "different parameters; launch.convert writes the ones for evaluation"
    )


def check_model(
  where: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> None:
  """Checks that two runs have equal models and numbers of tensor ranks.

  Args:
    where: Name of the other run in the message.
    theirs: Config of the other run.
    ours: Config of this run.

  Raises:
    ValueError: The models or the numbers of tensor ranks differ; the message
      names all keys.
  """
  differences = [
    f"config.{name}={there!r} there, {here!r} here"
    for name, there, here in _pair_config_values(theirs, ours)
    if there != here
  ]
  if differences:
    raise ValueError(
      f"{where} has other parameters: {'; '.join(differences)}. launch.convert "
      "writes published weights for any --ranks"
    )


def start_state(experiment: Experiment) -> tuple[TrainState, dict[str, Any]]:
  """Returns the state before the first step, from another run's parameters.

  Args:
    experiment: The run, which has passed `check`.

  Returns:
    The state, and the origin of its parameters as plain data.

  Raises:
    FileNotFoundError: If there is no checkpoint.
    ValueError: If the checkpoint is damaged.
  """
  folder, _ = _source_folder(experiment)
  checkpointer = Checkpointer(folder, experiment.program)
  abstract = experiment.abstract_state()
  params, _, step, _ = checkpointer.restore_params(abstract.params, {})
  checkpointer.close()
  sync = records.read_config(folder).get("sync", {})
  facts = {"folder": str(folder), "step": step, "sync": sync}
  return experiment.init_state(params), facts


def _source_folder(experiment: Experiment) -> tuple[epath.Path, str]:
  """Returns the other run's folder, and its name in messages."""
  key, path = "config.train.init_from", experiment.train.init_from
  return files.parse_folder(path, flag=key), f"{key}={path}"


def _pair_config_values(
  theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
  """Returns (key, theirs, ours) of config keys that two runs must share."""
  model, our_model = theirs["model"], ours["model"]
  keys = sorted((model.keys() | our_model.keys()) - {*_IGNORED_MODEL_KEYS})
  found = [(f"model.{key}", model.get(key), our_model.get(key)) for key in keys]
  axes = [
    kind.name for kind in AXES
    if kind.parameters == "slices" and not kind.resizable
  ]
  return found + [
    (f"parallel.{axis}", *(
      config["parallel"].get(axis, 1) for config in (theirs, ours)
    )) for axis in axes
  ]
