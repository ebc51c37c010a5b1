"""Predicted federated rounds over links, and the figures of a 5G testbed."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "study": ["run"],
})
