"""Graphs written by launch.graph."""

import pytest

from caatnet.config import sections
from caatnet.config.graph import SOURCES
from caatnet.data.graphs.csr import open_graph
from configs.graphs import source


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_builds_with_its_keys(tmp_path, name):
  config = source.get_config(name).graph
  small = {"scale": 4, "num_edges": 9, "num_nodes": 30, "num_features": 2}
  for key in set(small) & set(config):
    config[key] = small[key]
  arguments = "graph", SOURCES, config, tmp_path
  if name in ("rmat", "communities"):
    graph = sections.build_selected(*arguments)
    assert open_graph(tmp_path).num_edges == graph.num_edges
  else:  # sources that need the path of a file
    with pytest.raises(ValueError, match=r"config\.graph\.|is missing"):
      sections.build_selected(*arguments)


def _command(launch, output):
  return launch(
    "graph", "--config=configs/graphs/source.py:rmat", f"--output={output}",
    "--config.graph.scale=5", "--config.graph.num_edges=40",
  )


def test_existing_graph_is_not_overwritten(launch, tmp_path):
  output = tmp_path / "graph"
  first = _command(launch, output)
  assert first.returncode == 0, first.stderr
  assert f"--config.data.path={output}" in first.stdout
  before = open_graph(output)
  again = _command(launch, output)
  assert again.returncode == 2
  assert "exists; remove it" in again.stderr
  assert open_graph(output).meta == before.meta


def test_graph_is_complete_or_absent(launch, tmp_path):
  """Ignores the partial folder of a killed writer."""
  output = tmp_path / "graph"
  left = tmp_path / ".graph.partial"
  left.mkdir()
  (left / "indices.npy").write_bytes(b"half")
  assert _command(launch, output).returncode == 0
  assert open_graph(output).num_edges
  assert [path.name for path in tmp_path.iterdir()] == ["graph"]
