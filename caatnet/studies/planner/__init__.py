"""Search for a 3D configuration on a cluster."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "study": ["run"],
})
