"""Coordinator, state machine and journal of a swarm."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "coordinator": ["Rules"],
  "history": ["Log"],
  "journal": ["Journal"],
  "revision": ["Revision"],
  "service": ["Service", "Timing"],
})
