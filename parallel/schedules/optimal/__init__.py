"""Spanning trees whose most loaded link reaches the cut bound."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "trees": ["forest"],
})
