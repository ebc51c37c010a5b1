"""Checkpoints that are independent of the mesh."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "reshard": ["to_stored", "to_whole"],
  "save": ["Checkpointer"],
})
