"""Network topologies: graphs of ranks, switches and directed links."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "builders": [
    "BUILDERS", "dgx", "fat_tree", "leaf_spine", "mesh", "ring", "torus",
  ],
  "files": ["read_json"],
  "graph": ["Link", "Topology"],
  "text": ["parse", "quantity"],
})
