"""Search for 3D-parallel configurations, and for nano-batches of a step."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "plan": ["Candidate"],
  "space": ["Choices", "Configuration"],
})
