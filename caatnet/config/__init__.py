"""Builders of experiments and their parts from configs."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "experiments": ["build", "from_folder"],
})
