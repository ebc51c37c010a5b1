"""Notebooks run as they are."""

import pathlib

import nbclient
import nbformat
import pytest

COLABS = pathlib.Path(__file__).parents[1] / "colabs"


@pytest.mark.parametrize(
  "path", sorted(COLABS.glob("*.ipynb")), ids=lambda p: p.stem
)
def test_notebook_runs(path):
  notebook = nbformat.read(path, as_version=4)
  for cell in notebook.cells:
    assert not cell.get("outputs"), "commit notebooks without outputs"
  done = nbclient.NotebookClient(
    notebook, timeout=300, resources={"metadata": {"path": str(COLABS)}}
  ).execute()
  pictures = [
    output
    for cell in done.cells
    for output in cell.get("outputs", [])
    if "image/png" in output.get("data", {})
  ]
  assert pictures
