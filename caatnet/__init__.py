"""Models, data, training, inference, serving and studies."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "program": ["Layout", "Program"],
  "stages": ["Stages"],
})
