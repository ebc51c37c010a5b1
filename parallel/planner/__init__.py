"""Search for 3D-parallel configurations."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "plan": ["Candidate"],
  "space": ["Choices", "Configuration"],
})
