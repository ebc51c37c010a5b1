"""A run that starts with the parameters of another one: config.train.init_from.

Parameters are dense ones cut into ranks, so those of a run at p = 1 are as good
a start at any p. Where channels are private, each rank then has only its own
part of what was a sum.
"""

from collections.abc import Mapping
from typing import Any

from etils import epath

from caatnet.data.tokenizers import Tokenizer
from caatnet.train import files, records, tokenizer
from caatnet.train.checkpoint.save import Checkpointer
from caatnet.train.experiment import Experiment
from caatnet.train.state import TrainState

# Keys of ``config.model`` on which its function does not depend.
_FREE = ("dtype", "remat", "unroll", "attention", "init_std")


def check(
  experiment: Experiment, workdir: epath.Path, tokens: Tokenizer | None
) -> None:
  """Refuses parameters that do not fit a run, unless it has begun already.

  Args:
    experiment: The run.
    workdir: Its folder, which need not exist.
    tokens: The run's tokenizer; None if its data are no text.

  Raises:
    FileNotFoundError: The other folder holds no run.
    ValueError: The other run has another model or other ranks (the message
      names all keys), another tokenizer, or workers that differ.
  """
  if not experiment.train.init_from:
    return
  if Checkpointer(workdir, experiment.program).steps():
    return
  folder, key = _folder(experiment)
  if not (folder / "config.json").exists():
    raise FileNotFoundError(f"{key} holds no run (config.json)")
  theirs, ours = records.read_config(folder), experiment.config
  differences = [
    f"config.{name}={there!r} there, {here!r} here"
    for name, there, here in _compared(theirs, ours)
    if there != here
  ]
  if differences:
    raise ValueError(
      f"{key} has other parameters: {'; '.join(differences)}. launch.convert "
      "cuts published weights for any --ranks, and writes them"
    )
  other = tokens and tokenizer.load(folder)
  if other and other.identity != tokens.identity:
    raise ValueError(
      f"{key} has the tokenizer {tokenizer.described(other)}, this run "
      f"{tokenizer.described(tokens)}; see config.data.tokenizer"
    )
  algorithm = theirs["outer"]["algorithm"]
  if algorithm != "data_parallel":
    raise ValueError(
      f"{key} has config.outer.algorithm={algorithm!r}: no worker's parameters "
      "stand for the run; those that do are what launch.convert writes"
    )


def start_state(experiment: Experiment) -> tuple[TrainState, dict[str, Any]]:
  """Makes the state before the first step from another run's parameters.

  Args:
    experiment: The run, which `check` has found to fit.

  Returns:
    The state, and where its parameters come from as plain data.

  Raises:
    FileNotFoundError: There is no checkpoint.
    ValueError: The checkpoint is damaged.
  """
  folder, _ = _folder(experiment)
  checkpointer = Checkpointer(folder, experiment.program)
  abstract = experiment.abstract_state()
  params, _, step, _ = checkpointer.restore_params(abstract.params, {})
  checkpointer.close()
  sync = records.read_config(folder).get("sync", {})
  facts = {"folder": str(folder), "step": step, "sync": sync}
  return experiment.init_state(params), facts


def _folder(experiment: Experiment) -> tuple[epath.Path, str]:
  """Returns the other run's folder, and what messages call it."""
  key, path = "config.train.init_from", experiment.train.init_from
  return files.folder(path, flag=key), f"{key}={path}"


def _compared(
  theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
  """Lists what must be equal: its key, and its value in both configs."""
  model, our_model = theirs["model"], ours["model"]
  keys = sorted((model.keys() | our_model.keys()) - {*_FREE})
  found = [(f"model.{key}", model.get(key), our_model.get(key)) for key in keys]
  tensor = (config["parallel"]["tensor"] for config in (theirs, ours))
  return [*found, ("parallel.tensor", *tensor)]
