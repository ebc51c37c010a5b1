"""Simulators of schedules and pipelines on a topology."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "routed": ["RoutedSchedule", "on_links"],
  "simulate": ["Timeline", "events", "lockstep", "lower_bound"],
  "trace": ["to_json"],
})
