"""Executes the notebooks of colabs/ and stores their output.

  python -m docs.notebooks
  python -m docs.notebooks --only=routes
  python -m docs.notebooks --first_cell    # executes nothing
  python -m docs.notebooks --check    # exits with 2 if a notebook is stale

All have the same first cell. Locally it uses the checkout. On Colab it installs
the package from the repository, whose address is ``url`` in setup.cfg, or from
a wheel or zip that the user uploads. Needs the extra ``colab``.
"""

import base64
import configparser
import hashlib
import importlib.metadata
import io
import os
import pathlib
import platform
from typing import Any

from absl import flags

from docs.points import ROOT
from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_string("only", "", "Name of one notebook; all if unset.")
flags.DEFINE_bool(
  "first_cell", False, "Replace the first cell only, without execution."
)
_FIRST_CELL = '''\
REPOSITORY = "{url}"

import importlib.util
import os
import pathlib
import subprocess
import sys

root = pathlib.Path.cwd()  # the repository, or this folder in it
root = root.parent if root.name == "colabs" else root
if "google.colab" in sys.modules:
  if importlib.util.find_spec("caatnet") is None:
    wanted = f"caatnet[plot,training] @ git+{{REPOSITORY}}"
    if not REPOSITORY:  # asks for a wheel, or a zip of the code
      from google.colab import files
      wanted = f"./{{next(iter(files.upload()))}}[plot,training]"
    pip = [sys.executable, "-m", "pip", "install", "-q", wanted]
    subprocess.run(pip, check=True)
  from caatnet import commands
  root = commands.root()
os.chdir(root)
sys.path.insert(0, str(root))'''


def first_cell(url: str) -> str:
  """Returns the first cell of all notebooks.

  Args:
    url: Address of the repository; "" to ask for a file.
  """
  return _FIRST_CELL.format(url=url)


def read_with_first_cell(path: pathlib.Path) -> Any:
  """Reads a notebook and updates its first cell, without executing it."""
  import nbformat

  config = configparser.ConfigParser()
  config.read(ROOT / "setup.cfg")
  notebook = nbformat.read(path, as_version=4)
  first = next(c for c in notebook.cells if c.cell_type == "code")
  first.source = first_cell(config["metadata"].get("url", ""))
  return notebook


def hash_sources(notebook: Any) -> str:
  """Returns a hash of all code cells of a notebook."""
  # Text cells do not affect outputs.
  cells = [c.source for c in notebook.cells if c.cell_type == "code"]
  return hashlib.sha256("\n\n".join(cells).encode()).hexdigest()


def is_stale(path: pathlib.Path) -> bool:
  """Returns whether a notebook's cells have changed since its execution."""
  import nbformat

  kept = nbformat.read(path, as_version=4)
  # Compared with the current first cell, and with the cells as stored.
  return kept.metadata.get("caatnet", {}).get("sources") != (
    hash_sources(read_with_first_cell(path))
  ) or hash_sources(kept) != hash_sources(read_with_first_cell(path))


def update_first_cell(path: pathlib.Path) -> Any:
  """Reads a notebook and updates its first cell, which affects no output.

  Raises:
    ValueError: Other cells have changed since the notebook was executed.
  """
  import nbformat

  kept = nbformat.read(path, as_version=4)
  if kept.metadata.get("caatnet", {}).get("sources") != hash_sources(kept):
    raise ValueError(
      f"{path.name} has changed since it was executed; run make notebooks"
    )
  notebook = read_with_first_cell(path)
  notebook.metadata["caatnet"]["sources"] = hash_sources(notebook)
  return notebook


def execute_notebook(path: pathlib.Path) -> Any:
  """Executes a notebook; returns it with outputs, hash and versions."""
  import nbclient

  notebook = read_with_first_cell(path)
  nbclient.NotebookClient(
    notebook,
    timeout=600,  # seconds per cell
    record_timing=False,  # times would differ at each execution
    resources={"metadata": {"path": str(path.parent)}},
    # A warning of progress bars would contain a path of this machine.
  ).execute(env=os.environ | {"PYTHONWARNINGS": "ignore:install"})
  for cell in notebook.cells:
    if "outputs" in cell:
      cell.outputs = _merge_streams(cell.outputs)
    for output in cell.get("outputs", []):
      if "image/png" in output.get("data", {}):
        output.data["image/png"] = _reduce_colours(output.data["image/png"])
  notebook.metadata["caatnet"] = {
    "sources": hash_sources(notebook),
    "versions": versions(),
  }
  return notebook


def _merge_streams(outputs: list[Any]) -> list[Any]:
  """Returns a cell's outputs with consecutive parts of a stream merged.

  The number of parts depends on timing. A progress bar that has ended leaves
  an empty output, which is omitted.
  """
  joined: list[Any] = []
  for output in outputs:
    if output.get("data", {}).get("text/plain") == "":
      continue
    name = output.get("name")  # only streams have one
    if joined and name is not None and joined[-1].get("name") == name:
      joined[-1].text += output.text
    else:
      joined.append(output)
  return joined


def _reduce_colours(png: str) -> str:
  """Reduces a PNG in base64 to 256 colours, which makes it much smaller."""
  from PIL import Image

  picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
  out = io.BytesIO()
  # This method keeps colours that occur in few pixels.
  method = Image.Quantize.MAXCOVERAGE
  picture.quantize(256, method, dither=Image.Dither.NONE).save(
    out, "PNG", optimize=True
  )
  return base64.b64encode(out.getvalue()).decode()


def versions() -> dict[str, str]:
  """Returns the versions that a notebook's numbers depend on."""
  jax = importlib.metadata.version("jax")
  return {"python": platform.python_version(), "jax": jax}


def main() -> None:
  """Executes the notebooks, or names those that are stale."""
  import nbformat

  folder = ROOT / "colabs"
  paths = sorted(folder.glob(f"{FLAGS.only or '*'}.ipynb"))
  if not paths:
    names = ", ".join(sorted(path.stem for path in folder.glob("*.ipynb")))
    raise ValueError(
      f"--only={FLAGS.only} must be one of the notebooks {names}"
    )
  if FLAGS.check:
    stale = [path.name for path in paths if is_stale(path)]
    if stale:
      raise ValueError(
        f"cells were changed after they were executed: {', '.join(stale)}; run "
        "make notebooks"
      )
    return
  make = update_first_cell if FLAGS.first_cell else execute_notebook
  for path in paths:
    nbformat.write(make(path), path)
    print(path.name)


if __name__ == "__main__":
  options.run(main, uses=("check",), required=(), devices=False)
