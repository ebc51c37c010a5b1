"""Notebooks run as they are, and are kept with what they print and draw."""

import base64
import functools
import os
import re
import subprocess
import sys

import nbformat
import numpy as np
import pytest

from caatnet.show import notebooks

FOLDER = notebooks.ROOT / "colabs"
PATHS = sorted(FOLDER.glob("*.ipynb"))
NUMBER = re.compile(r"\d[\d,]*\.?\d*(?:e[-+]?\d+)?")


def outputs(notebook, kind):
  """What a notebook's cells printed or drew, by MIME type.

  Not what is on stderr, where XLA says what took it long.
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
def test_what_is_kept_is_of_these_cells(path):
  assert not notebooks.is_stale(path), "python -m launch.notebooks"
  code = [cell for cell in kept(path).cells if cell.cell_type == "code"]
  # A question, a picture with the first cell that does something.
  assert "?" in kept(path).cells[0].source.splitlines()[0]
  assert any("image/png" in o.get("data", {}) for o in code[1].outputs)
  for picture in outputs(kept(path), "image/png"):
    assert 5_000 < len(base64.b64decode(picture)) < 100_000


def test_a_changed_cell_is_stale(tmp_path):
  for change in ("first", "last"):
    notebook = nbformat.read(PATHS[0], as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    code[0 if change == "first" else -1].source += "  # changed"
    path = tmp_path / f"{change}.ipynb"
    nbformat.write(notebook, path)
    assert notebooks.is_stale(path)


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_notebook_runs_and_prints_what_is_kept(path):
  """To 2%, if Python, whose library is the text, and jax are the same."""
  done = notebooks.executed(path)
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


def test_on_colab_the_first_cell_clones_and_installs(tmp_path):
  """From a repository of its own; another pip says what it is asked for."""
  origin, there = tmp_path / "origin", tmp_path / "content"
  for folder in (origin, there, tmp_path / "pip"):
    folder.mkdir()
  (tmp_path / "pip/__init__.py").touch()
  (tmp_path / "pip/__main__.py").write_text(
    "import os, sys; print('pip', *sys.argv[1:], os.getcwd())"
  )
  identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
  for words in (
    ["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "x"]
  ):
    subprocess.run(["git", *words], cwd=origin, check=True)
  cell = notebooks.FIRST_CELL.format(url=origin)
  program = (
    "import sys, types; sys.modules['google.colab'] = types.ModuleType('c')\n"
    f"{cell}\nprint(root, sys.path[0])"
  )
  clone = str(there / "caatnet")
  for _ in range(2):  # the second time there is nothing to clone
    result = subprocess.run(
      [sys.executable, "-c", program], cwd=there, text=True, check=False,
      capture_output=True, env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
      f"pip install -q -e .[plot] {clone}", f"{clone} {clone}"
    ]
    assert (there / "caatnet/.git").is_dir()
