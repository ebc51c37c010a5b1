"""Residual add and RMSNorm in one kernel."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "api": ["add_norm"],
})
