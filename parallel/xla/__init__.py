"""Collectives, memory and overlap of lowered and compiled programs."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "compiled": ["compare"],
  "ledger": ["Collective", "collectives"],
  "overlap": ["ScheduledProgram"],
  "roofline": ["Cost", "cost"],
  "targets": ["Target", "resolve"],
})
