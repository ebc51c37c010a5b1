"""Spanning trees whose most loaded link reaches the cut bound."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "trees": ["forest"],
})
