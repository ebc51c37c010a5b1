"""Attention over a paged key-value cache."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "api": ["paged_attention"],
})
