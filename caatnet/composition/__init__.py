"""Compositions of experts: training of router and experts, and evaluation."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "library": ["add_run", "create", "read_params"],
  "routing": ["accuracy", "train_router"],
  "training": ["run"],
})
