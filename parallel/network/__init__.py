"""Simulators of collective schedules on a topology, and inference bounds."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "routed": ["RoutedSchedule", "on_links"],
  "simulate": ["Timeline", "events", "lockstep", "lower_bound"],
})
