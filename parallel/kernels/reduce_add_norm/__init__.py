"""Sum over ranks, residual add and RMSNorm in one kernel."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "api": ["reduce_add_norm"],
})
