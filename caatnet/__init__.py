"""Models, data, training, inference, serving and studies."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "program": ["Layout", "Program"],
  "stages": ["Stages"],
})
