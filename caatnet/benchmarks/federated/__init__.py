"""Federated runs over emulated links, and their predicted times."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "emulation": ["Emulation", "emulated"],
})
