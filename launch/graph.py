r"""Converts or generates a graph, and writes it as a folder for launch.train.

  python -m launch.graph --config=configs/graphs/source.py:rmat \
    --output=FOLDER --config.graph.scale=20 --config.graph.num_edges=16000000
  python -m launch.graph --config=configs/graphs/source.py:edges \
    --output=FOLDER --config.graph.path=edges.txt \
    --config.graph.features=features.npy --config.graph.labels=labels.npy
  python -m launch.graph --config=configs/graphs/source.py:ogb \
    --output=FOLDER --config.graph.path=dataset/ogbn_products

It needs memory for the nodes' degrees and a chunk of edges, in addition to the
page cache. The last line of output is a training command for the graph.
"""

import pathlib

from absl import flags
from rich.console import Console
from rich.text import Text

from launch import options

FLAGS = flags.FLAGS


def main() -> None:
  from caatnet import commands
  from caatnet.config import sections
  from caatnet.config.graph import SOURCES
  from caatnet.data.graphs.csr import open_graph
  from caatnet.show import tables
  from parallel.base import files

  config = FLAGS.config
  if "graph" not in config:
    raise ValueError(
      "--config must have a graph, as configs/graphs/source.py has"
    )
  if not FLAGS.output:
    raise ValueError("--output is required: the folder to write the graph to")
  output = pathlib.Path(FLAGS.output).expanduser()
  with files.atomic_folder(output) as folder, Console(stderr=True).status(
    Text(f"writing {output}")
  ):
    sections.build_selected("graph", SOURCES, config.graph, folder)
  graph = open_graph(output)
  size = sum(f.stat().st_size for f in graph.folder.iterdir())
  tables.print_table(
    f"{graph.meta['name']} in {graph.folder}",
    ["nodes", "edges", "features", "classes", "train", "validation", "GB"],
    [[
      f"{graph.num_nodes:,}", f"{graph.num_edges:,}",
      f"{graph.features.shape[1]:,}", f"{graph.meta['num_classes']:,}",
      f"{len(graph.nodes('train')):,}", f"{len(graph.nodes('validation')):,}",
      f"{size / 1e9:.2f}",
    ]],
  )
  print(commands.rewrite_commands(
    "train on it: python -m launch.train --config=configs/graphs/tiny.py "
    f"--config.data.path={graph.folder} "
    f"--config.data.num_features={graph.features.shape[1]} "
    f"--config.data.num_classes={graph.meta['num_classes']}"
  ))


if __name__ == "__main__":
  options.run(
    main, uses=("config", "output"), devices=False, writes=("output/",),
    helps={"output": "Folder to write."},
  )
