"""Builds what answers lm-evaluation-harness by the model of a run."""

from collections.abc import Mapping
import os

from caatnet.config import inference
from caatnet.interop.answers import Answers
from caatnet.serving.generate import Generation
from caatnet.train import files, records, tokenizer


def from_folder(
  workdir: str | os.PathLike[str],
  requested_mesh: Mapping[str, int] | None = None,
  overrides: str = "",
  step: int | None = None,
) -> tuple[Answers, int]:
  """Reads the model and the tokenizer of a run's folder.

  The context is the length that the model was trained with, unless there is an
  override: cut contexts would be another task. The cache of generation, which
  takes memory, is made when there is something to generate.

  Args:
    workdir: The run's folder.
    requested_mesh: Devices per axis; None lets the sizes decide.
    overrides: Keys of the config and values, ``"inference.batch=4 ..."``.
    step: The step of the checkpoint; None for the newest one.

  Returns:
    What answers, and the step of the checkpoint.

  Raises:
    FileNotFoundError: The folder holds no run, or no such checkpoint.
    ValueError: The run has no language model, something in it is damaged, or a
      value does not fit.
  """
  tokens = tokenizer.load(workdir)
  data = records.read_config(files.folder(workdir))["data"]
  made, params, step = inference.from_folder(
    workdir, requested_mesh,
    f"inference.context={data['seq_len']} {overrides}", step,
  )
  weights = made.weights(params)
  answers = Answers(
    made.scorer_of(weights),
    tokens,
    lambda asked: Generation(made.decoder_of(weights), asked, tokens).run(),
  )
  return answers, step
