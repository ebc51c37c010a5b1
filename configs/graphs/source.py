r"""Sources of graphs for launch.graph: generators, and files to convert.

  python -m launch.graph --config=configs/graphs/source.py:communities \
    --output=FOLDER
  python -m launch.graph --config=configs/graphs/source.py:npz \
    --output=FOLDER --config.graph.path=graph.npz
"""

import ml_collections

from caatnet.schema.tree import defaults


def get_config(source: str = "rmat") -> ml_collections.ConfigDict:
  """Returns the config of a source, a name in ``config.graph.source``."""
  config = ml_collections.ConfigDict()
  config.name = f"graph_{source}"
  config.graph = defaults("graph", source)
  return config
