r"""Graphs to be written: drawn ones, and those of others.

  python -m launch.graph --config=configs/graphs/source.py:communities \
    --output=FOLDER
  python -m launch.graph --config=configs/graphs/source.py:npz \
    --output=FOLDER --config.graph.path=graph.npz
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config(source: str = "rmat") -> ml_collections.ConfigDict:
  """Returns a source of graphs with its keys."""
  config = ml_collections.ConfigDict()
  config.name = f"graph_{source}"
  config.graph = defaults("graph", source)
  return config
