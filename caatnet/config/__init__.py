"""Builders from configs to objects."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "experiments": ["build", "from_folder"],
})
