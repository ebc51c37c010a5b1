"""Pipeline schedules as data: builders, checks, cost, simulation, execution."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "builders": ["BUILDERS", "Size", "build"],
  "cost": ["Cost"],
  "run": ["Functions", "Params", "Pipeline"],
  "simulate": ["Hops", "Timeline", "Work", "events"],
  "pipeline_schedule": ["Kind", "PipelineSchedule"],
})
