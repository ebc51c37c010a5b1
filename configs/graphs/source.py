r"""Graphs to be written: drawn ones, and those of others.

  python -m launch.graph --config=configs/graphs/source.py:communities \
    --output=FOLDER
  python -m launch.graph --config=configs/graphs/source.py:npz \
    --output=FOLDER --config.graph.path=graph.npz
"""

import ml_collections

_DRAWN = {"num_features": 128, "num_classes": 8, "signal": 1.0, "seed": 0}
_KEYS = {
  # 2^scale nodes; the probabilities of three quarters of the matrix of edges.
  "rmat": _DRAWN | {
    "scale": 16, "num_edges": 1_000_000, "quarters": (0.57, 0.19, 0.19),
  },
  # Neighbours are of the same community with the probability inside.
  "communities": _DRAWN | {
    "num_nodes": 65_536, "mean_degree": 15.0, "inside": 0.6,
  },
  # A text file of pairs of nodes, and .npy files.
  "edges": {"path": "", "features": "", "labels": "", "undirected": False},
  "npz": {"path": "", "undirected": False},
  # A folder that the package ogb has unpacked.
  "ogb": {"path": "", "undirected": False},
}


def get_config(source: str = "rmat") -> ml_collections.ConfigDict:
  """Returns a source of graphs with its keys."""
  if source not in _KEYS:
    raise ValueError(f"source.py:{source}: one of {', '.join(_KEYS)}")
  config = ml_collections.ConfigDict()
  config.name = f"graph_{source}"
  config.graph = ml_collections.ConfigDict({"source": source} | _KEYS[source])
  return config
