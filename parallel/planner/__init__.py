"""Search for a 3D configuration of a model on a cluster."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "plan": ["Candidate"],
  "space": ["Choices", "Configuration"],
})
