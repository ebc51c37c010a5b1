"""Notebooks run unchanged, and are stored with their outputs."""

import base64
import datetime
import functools
import os
import re
import subprocess
import sys

import nbformat
import numpy as np
import pytest

from docs import notebooks

FOLDER = notebooks.ROOT / "colabs"
PATHS = sorted(FOLDER.glob("*.ipynb"))
# A third of the notebooks is executed each day: NOTEBOOKS=all, or the names of
# some with commas, selects others.
CHOSEN = os.environ.get("NOTEBOOKS", "")
EXECUTED = (
  [p for p in PATHS if CHOSEN == "all" or p.stem in CHOSEN.split(",")]
  if CHOSEN else PATHS[datetime.date.today().toordinal() % 3 :: 3]
)
NUMBER = re.compile(r"\d[\d,]*\.?\d*(?:e[-+]?\d+)?")


def outputs(notebook, kind):
  """Yields the outputs of a notebook's cells of a MIME type.

  Without stderr, where XLA reports slow compilations.
  """
  for cell in notebook.cells:
    for output in cell.get("outputs", []):
      if output.output_type == "stream":
        if kind == "text/plain" and output.name == "stdout":
          yield output.text
      elif kind in output.get("data", {}):
        yield output.data[kind]


@functools.cache
def kept(path):
  return nbformat.read(path, as_version=4)


@pytest.mark.quick
@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_stored_outputs_belong_to_the_cells(path):
  assert not notebooks.is_stale(path), "make notebooks"
  code = [cell for cell in kept(path).cells if cell.cell_type == "code"]
  # The title is a question, and the first working cell draws a picture.
  assert "?" in kept(path).cells[0].source.splitlines()[0]
  assert any("image/png" in o.get("data", {}) for o in code[1].outputs)
  assert kept(path).cells[-1].source.startswith("## What to conclude\n")
  for text in outputs(kept(path), "text/plain"):
    for head in re.findall("┏.*┓", text):
      assert head.count("┳") < 6, text  # at most six columns
  for picture in outputs(kept(path), "image/png"):
    assert 5_000 < len(base64.b64decode(picture)) < 100_000


def test_changed_cell_is_stale(tmp_path):
  for change in ("first", "last"):
    notebook = nbformat.read(PATHS[0], as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    code[0 if change == "first" else -1].source += "  # changed"
    path = tmp_path / f"{change}.ipynb"
    nbformat.write(notebook, path)
    assert notebooks.is_stale(path)


@pytest.mark.rotated
@pytest.mark.parametrize("path", EXECUTED, ids=lambda p: p.stem)
def test_notebook_runs_and_prints_the_stored_numbers(path):
  """Within 2%, if Python, whose library is the text, and jax are the same."""
  done = notebooks.execute_notebook(path)
  assert [*outputs(done, "image/png")]
  if done.metadata["caatnet"] != kept(path).metadata["caatnet"]:
    pytest.skip(f"made by {kept(path).metadata['caatnet']['versions']}")
  for now, before in zip(
    outputs(done, "text/plain"), outputs(kept(path), "text/plain"), strict=True
  ):
    values = [
      [float(n.replace(",", "")) for n in NUMBER.findall(text)]
      for text in (now, before)
    ]
    np.testing.assert_allclose(*values, rtol=0.02, atol=0.02)


PIP = """
import os, pathlib, shutil, sys
print("pip", *sys.argv[1:])
package = pathlib.Path(__file__).parents[1] / "caatnet"
(package / "_bundle").mkdir(parents=True)
shutil.copy(os.environ["COMMANDS"], package)
"""
COLAB = """
import sys, types
colab = types.ModuleType("google.colab")
colab.files = types.SimpleNamespace(upload=lambda: {"caatnet.zip": b""})
sys.modules |= {"google": types.ModuleType("google"), "google.colab": colab}
"""


@pytest.mark.parametrize(
  ("url", "wanted"),
  [
    ("https://a.b/c", "caatnet[plot,training] @ git+https://a.b/c"),
    ("", "./caatnet.zip[plot,training]"),  # the file that the user uploads
  ],
)
def test_first_cell_installs_on_colab(tmp_path, url, wanted):
  """In a Python without packages; its pip installs `caatnet.commands` only."""
  (tmp_path / "pip").mkdir()
  (tmp_path / "pip/__init__.py").touch()
  (tmp_path / "pip/__main__.py").write_text(PIP)
  cell = notebooks.first_cell(url)
  program = f"{COLAB}\n{cell}\nprint(root, os.getcwd(), sys.path[0])"
  environment = {
    "PYTHONPATH": str(tmp_path),
    "COMMANDS": str(notebooks.ROOT / "caatnet/commands.py"),
  }
  bundle = str(tmp_path / "caatnet/_bundle")
  for repeated in (False, True):  # the second run installs nothing
    result = subprocess.run(
      [sys.executable, "-S", "-c", program], cwd=tmp_path, text=True,
      check=False, capture_output=True, env=environment,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1] == f"{bundle} {bundle} {bundle}"
    assert [line for line in lines if line.startswith("pip")] == (
      [] if repeated else [f"pip install -q {wanted}"]
    )


def test_first_cell_can_be_replaced_alone(tmp_path):
  """Keeps outputs; a notebook whose other cells have changed is refused."""
  notebook = nbformat.read(PATHS[0], as_version=4)
  code = [cell for cell in notebook.cells if cell.cell_type == "code"]
  code[0].source = "root = 1"
  notebook.metadata["caatnet"]["sources"] = notebooks.hash_sources(notebook)
  path = tmp_path / "notebook.ipynb"
  nbformat.write(notebook, path)
  assert notebooks.update_first_cell(path) == kept(PATHS[0])
  code[-1].source += "  # changed"
  nbformat.write(notebook, path)
  with pytest.raises(ValueError, match=r"^notebook\.ipynb has changed"):
    notebooks.update_first_cell(path)
