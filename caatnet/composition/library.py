"""Functions that add checkpoints of runs to a library, as experts."""

import os
import pathlib
from typing import Any

from etils import epath
import jax
import numpy as np

from caatnet.config import experiments
from caatnet.serving import differences
from caatnet.serving.experts import WHOLE_FORM, Library
from caatnet.serving.weights_file import WeightsFile
from caatnet.train import records, tokenizer
from caatnet.train.checkpoint import export, start
from caatnet.train.experiment import Experiment
from parallel.base import files

_BASE = "base"


def read_params(
  workdir: str | os.PathLike[str],
  step: int | None = None,
  experiment: Experiment | None = None,
) -> dict[str, Any]:
  """Returns a run's parameters as numpy arrays, as `Library.add` takes them.

  Args:
    workdir: Folder of a run, or of weights that launch.convert converted.
    step: Step of the checkpoint; None for the newest one.
    experiment: Experiment of the run, or of another run with the same model and
      outer loop; None to build it from the folder.

  Raises:
    FileNotFoundError: There is no such run or checkpoint.
    ValueError: A file is damaged.
  """
  experiment = experiment or experiments.from_folder(workdir)
  params, _ = export.read_params(experiment, workdir, step)
  return jax.tree.map(lambda x: np.asarray(x, np.float32), params)


def create(
  path: str | os.PathLike[str], workdir: str | os.PathLike[str],
  step: int | None = None,
) -> Library:
  """Creates a library whose first expert, "base", is a run's checkpoint.

  The library stores the config and the tokenizer of the run; all experts must
  have the same ones. An existing library is opened.

  Args:
    path: Directory of the library.
    workdir: Folder of the run.
    step: Step of the checkpoint; None for the newest one.
  """
  library = Library.create(path)
  folder = epath.Path(path)
  if not (folder / "config.json").exists():
    tokenizer.copy_to_run(folder, tokenizer.load(workdir))
    records.write_json(
      folder / "config.json", records.read_config(files.parse_folder(workdir))
    )
  if _BASE not in library.names:
    add_run(library, _BASE, workdir, step, origin="base",
            description="trained on all kinds of text")
  return library


def add_run(
  library: Library,
  name: str,
  workdir: str | os.PathLike[str],
  step: int | None = None,
  *,
  form: str = WHOLE_FORM,
  rank: int = 8,
  replace: bool = False,
  experiment: Experiment | None = None,
  **options: str,
) -> str:
  """Adds a run's checkpoint to a library that `create` has created.

  Args:
    library: The library.
    name: Name of the expert.
    workdir: Folder of a run, or of weights that launch.convert converted.
    step: Step of the checkpoint; None for the newest one.
    form: Form of the stored parameters, in `caatnet.serving.experts.FORMS`.
    rank: Rank of the form "low_rank".
    replace: Whether to replace the expert of this name instead.
    experiment: Argument of `read_params`.
    **options: "kind", "description" and "origin" of `Library.add`.

  Returns:
    The revision of the expert.

  Raises:
    FileNotFoundError: There is no such run or checkpoint.
    ValueError: The run has another model or tokenizer, or a file is damaged.
  """
  ours = records.read_config(epath.Path(library.path))
  theirs = records.read_config(files.parse_folder(workdir))
  start.check_model(f"expert {name!r}: {workdir}", theirs, ours)
  params = read_params(workdir, step, experiment)
  if form != WHOLE_FORM:
    params = differences.encode(params, library.read(_BASE)[1](), form, rank)
  tokens = tokenizer.load(workdir)
  identity = tokens.identity if tokens.files else ""
  write = library.replace if replace else library.add
  return write(
    name, params, form=form, base=_BASE, tokenizer=identity, **options
  )


def put(
  library: Library, name: str, replaces: bool, path: str, kind: str,
  description: str,
) -> None:
  """Adds an expert from a run's folder or a safetensors file, or replaces it.

  Args:
    library: The library.
    name: Name of the expert.
    replaces: Whether to replace an existing expert of this name.
    path: The folder, or a file with all parameters.
    kind: Kind of text; "" for none or, with ``replaces``, the old one. Of the
      experts of a kind, the router prefers those with the origin "fine-tuned".
    description: Description; "" for none or, with ``replaces``, the old one.

  Raises:
    FileNotFoundError: There is no such run.
    ValueError: The parameters or the tokenizer are not those of the library.
  """
  given = {"kind": kind, "description": description}
  options = {key: text for key, text in given.items() if text}
  if not os.path.isfile(path):
    add_run(library, name, path, replace=replaces, **options)
    return
  file = WeightsFile(pathlib.Path(path))
  header = file.header()
  form = header.metadata.get("form", WHOLE_FORM)
  if form != WHOLE_FORM:
    raise ValueError(f"{path} has the form {form!r}; it must be {WHOLE_FORM!r}")
  content, _ = file.content(header.size_bytes)
  write = library.replace if replaces else library.add
  write(
    name, header.views(content),
    tokenizer=header.metadata.get("tokenizer", ""), **options
  )
