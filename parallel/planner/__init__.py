"""Search for the 3D-parallel configuration of a model on a cluster."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "plan": ["Candidate"],
  "space": ["Choices", "Configuration"],
})
