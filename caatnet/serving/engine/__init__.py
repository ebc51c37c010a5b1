"""Steps of a scheduler, executed or simulated."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "engine": ["Engine"],
})
