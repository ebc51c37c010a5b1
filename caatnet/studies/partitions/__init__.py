"""Memory and communication of ZeRO partitions."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "study": ["run"],
})
