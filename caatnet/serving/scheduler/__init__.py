"""Continuous batching: admission, preemption and swapping of requests."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "scheduler": ["Limits", "Scheduler"],
})
