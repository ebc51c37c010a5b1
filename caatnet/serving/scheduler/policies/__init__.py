"""Scheduling policies: admission order and preemption order of requests."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "base": ["Policy"],
  "registry": ["make"],
})
