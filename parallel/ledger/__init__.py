"""Collectives, memory and overlap of lowered and compiled programs.

`read` and `assert_sends` take any jax program.
"""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "compiled": ["compare"],
  "expectations": ["assert_sends"],
  "ledger": ["Collective", "collectives"],
  "overlap": ["ScheduledProgram"],
  "reading": ["Executed", "Reading", "read", "read_all"],
  "roofline": ["Cost", "cost"],
  "targets": ["Target", "resolve"],
})
