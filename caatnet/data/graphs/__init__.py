"""Graphs on disk, their generators, loaders and samplers."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "builders": ["communities", "rmat"],
  "csr": ["Graph", "open_graph"],
  "data": ["GraphData"],
  "sampling": ["Sampler"],
})
