"""Predictions, one package per study."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "registry": ["SUBJECTS", "Study", "find"],
})
