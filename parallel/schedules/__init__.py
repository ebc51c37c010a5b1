"""Collective schedules as data: construction, proof and execution."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "builders": ["BUILDERS", "build", "named"],
  "pipeline": ["pipelined"],
  "run": ["executor"],
  "schedule": ["Schedule", "Transfer"],
})
