"""Builder of the model interface for lm-evaluation-harness."""

from collections.abc import Mapping
import os

from caatnet.config import inference
from caatnet.interop.responses import Responder
from caatnet.serving.generate import Generation
from caatnet.train import records, tokenizer
from parallel.base import files


def from_folder(
  workdir: str | os.PathLike[str],
  requested_mesh: Mapping[str, int] | None = None,
  overrides: str = "",
  step: int | None = None,
) -> tuple[Responder, int]:
  """Reads the model and the tokenizer of a run's folder.

  The default of ``inference.context`` is the sequence length of training, since
  truncated prompts would change the task. The first generation request
  allocates the key-value cache.

  Args:
    workdir: The run's folder.
    requested_mesh: Devices per axis; None for the default assignment.
    overrides: Keys of the config and values, ``"inference.batch=4 ..."``.
    step: The step of the checkpoint; None for the newest one.

  Returns:
    The interface to the model, and the step of the checkpoint.

  Raises:
    FileNotFoundError: If the folder holds no run, or no such checkpoint.
    ValueError: If the run has no language model, a file is damaged, or a value
      is not allowed.
  """
  tokens = tokenizer.load(workdir)
  data = records.read_config(files.parse_folder(workdir))["data"]
  made, params, step = inference.from_folder(
    workdir, requested_mesh,
    f"inference.context={data['seq_len']} {overrides}", step,
  )
  weights = made.weights(params)
  responder = Responder(
    made.scorer_of(weights),
    tokens,
    lambda asked: Generation(made.decoder_of(weights), asked, tokens).run(),
  )
  return responder, step
