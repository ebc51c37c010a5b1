"""Builders of experiments and their parts from configs."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "experiments": ["build", "from_folder"],
})
