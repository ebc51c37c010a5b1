"""Latency, preemption and fairness of a simulated server."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "study": ["run"],
})
