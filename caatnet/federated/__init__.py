"""Federated learning: a server that does not train, and its clients."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "server": ["Rules", "Server", "step"],
})
