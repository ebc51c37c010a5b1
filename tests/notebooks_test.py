"""Preparation and execution of small notebooks."""

import base64
import hashlib
import importlib.metadata
import io
import platform

import pytest

from docs import notebooks

nbformat = pytest.importorskip("nbformat")
Image = pytest.importorskip("PIL.Image")


def notebook(*sources):
  """Returns a notebook of a title, a first cell and further code cells."""
  cells = [nbformat.v4.new_markdown_cell("# Title?")] + [
    nbformat.v4.new_code_cell(source) for source in ("first", *sources)
  ]
  return nbformat.v4.new_notebook(cells=cells)


def stored(path, made):
  nbformat.write(made, path)
  return path


def test_prepared_notebook_has_the_common_first_cell(tmp_path):
  path = stored(tmp_path / "a.ipynb", notebook("x = 1", "y = 2"))
  made = notebooks.read_with_first_cell(path)
  title, *code = [cell.source for cell in made.cells]
  assert (title, code[1:]) == ("# Title?", ["x = 1", "y = 2"])
  assert made.nbformat == 4
  compile(code[0], "cell", "exec")
  installation = code[0].partition("if \"google")[2].partition("os.chdir")[0]
  assert installation.count("\n") <= 10
  text = (notebooks.ROOT / "setup.cfg").read_text()
  url, = (line.removeprefix("url =").strip() for line in text.splitlines()
          if line.startswith("url ="))
  assert code[0] == notebooks.first_cell(url)


def test_hash_depends_on_the_text_and_order_of_code_cells_only():
  made = notebook("x = 1")
  expected = hashlib.sha256(b"first\n\nx = 1").hexdigest()
  assert notebooks.hash_sources(made) == expected
  made.cells[0].source = "# Another title"
  assert notebooks.hash_sources(made) == expected
  assert notebooks.hash_sources(notebook("y = 1")) != expected


@pytest.mark.parametrize("which", [
  "none", "cell", "first cell", "stored first cell", "hash"
])
def test_notebook_is_stale_if_any_code_has_changed(tmp_path, which):
  path = stored(tmp_path / "a.ipynb", notebook("x = 1"))
  made = notebooks.read_with_first_cell(path)
  made.metadata["caatnet"] = {"sources": notebooks.hash_sources(made)}
  if which == "cell":
    made.cells[2].source = "x = 2"
  elif which == "first cell":  # with its own hash
    made.cells[1].source = "root = 1"
    made.metadata["caatnet"]["sources"] = notebooks.hash_sources(made)
  elif which == "stored first cell":  # the hash is that of the common one
    made.cells[1].source = "root = 1"
  elif which == "hash":  # it was never executed
    del made.metadata["caatnet"]
  stored(path, made)
  assert notebooks.is_stale(path) == (which != "none")


def test_first_cell_is_replaced_in_executed_notebooks_only(tmp_path):
  made = notebook("x = 1")
  path = tmp_path / "a.ipynb"
  made.metadata["caatnet"] = {
    "sources": notebooks.hash_sources(made), "kept": 1
  }
  now = notebooks.update_first_cell(stored(path, made))
  assert (
    now.cells[1].source == notebooks.read_with_first_cell(path).cells[1].source
  )
  assert now.metadata["caatnet"] == {
    "sources": notebooks.hash_sources(now), "kept": 1
  }
  for wrong in ("", notebooks.hash_sources(notebook("x = 2"))):
    made.metadata["caatnet"]["sources"] = wrong
    with pytest.raises(ValueError, match=r"^a\.ipynb has changed since it was"):
      notebooks.update_first_cell(stored(path, made))


def stream(name, text):
  return nbformat.v4.new_output("stream", name=name, text=text)


def test_consecutive_parts_of_a_stream_are_joined():
  shown = nbformat.v4.new_output("display_data", data={"text/plain": "x"})
  parts = [stream("stdout", "a"), stream("stdout", "b"), stream("stderr", "c"),
           stream("stdout", "d"), shown, shown, stream("stdout", "e")]
  joined = notebooks._merge_streams(parts)
  assert [(o.get("name"), o.get("text")) for o in joined] == [
    ("stdout", "ab"), ("stderr", "c"), ("stdout", "d"), (None, None),
    (None, None), ("stdout", "e"),
  ]


def encoded(picture):
  out = io.BytesIO()
  picture.save(out, "PNG")
  return base64.b64encode(out.getvalue()).decode()


def test_pictures_are_reduced_to_256_colours():
  """A colour of few pixels remains among 4,096 shades of others."""
  picture = Image.new("RGBA", (64, 65))
  picture.putdata([(0, 4 * g, 4 * b, 255) for g in range(64)
                   for b in range(64)] + [(255, 0, 0, 255)] * 64)
  small = notebooks._reduce_colours(encoded(picture))
  made = Image.open(io.BytesIO(base64.b64decode(small)))
  assert (made.format, made.mode, made.size) == ("PNG", "P", (64, 65))
  colours = made.convert("RGB").getcolors()
  assert len(colours) == 256
  assert (64, (255, 0, 0)) in colours


def test_executed_notebook_has_outputs_hash_and_versions(tmp_path):
  """Cells run in the notebook's folder; pictures are small, streams whole."""
  pytest.importorskip("nbclient")
  path = stored(tmp_path / "a.ipynb", notebook(
    "import os, sys\nprint(os.path.samefile(os.getcwd(), ROOT))\n"
    "sys.stdout.flush(); print(os.environ['PYTHONWARNINGS'])",
    "from IPython.display import Image, display\nimport io\n"
    "from PIL import Image as I\nout = io.BytesIO()\n"
    "I.new('RGBA', (9, 9), 'red').save(out, 'PNG')\n"
    "display(Image(out.getvalue()))",
  ))
  made = nbformat.read(path, as_version=4)
  made.cells[2].source = made.cells[2].source.replace(
    "ROOT", repr(str(notebooks.ROOT))
  )
  made = notebooks.execute_notebook(stored(path, made))
  _, first, second, third = made.cells
  assert first.outputs == []
  (output,) = second.outputs
  assert output.text == "False\nignore:install\n"
  (output,) = third.outputs
  picture = base64.b64decode(output.data["image/png"])
  assert Image.open(io.BytesIO(picture)).mode == "P"
  assert made.metadata["caatnet"] == {
    "sources": notebooks.hash_sources(made),
    "versions": {"python": platform.python_version(),
                 "jax": importlib.metadata.version("jax")},
  }
  assert all("execution" not in cell.metadata for cell in made.cells)
