"""Partial all-reduce over a ring, fused with residual add and RMSNorm."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "api": ["ring_partial_all_reduce"],
})
