"""Reductions over links between peers, and bandwidth measurement."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "bandwidth": ["Rings", "rounds"],
  "link_collectives": ["all_reduce", "gather"],
})
