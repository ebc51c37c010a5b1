"""Registry of benchmarks by ``config.benchmark.name``."""

from caatnet.config.schema.benchmarks import (
  compiled,
  memory,
  models,
  searches,
  swarms,
)

BENCHMARKS = {
  "calibration": compiled.Calibration,
  "churn": swarms.Churn,
  "coded": models.Coded,
  "decoding": models.Decoding,
  "elastic_bits": swarms.ElasticBits,
  "engine": models.Engine,
  "experts": models.Experts,
  "experts_simulated": models.ExpertsSimulated,
  "foreign_programs": compiled.ForeignPrograms,
  "graphs": models.Graphs,
  "host_optimizer": memory.HostOptimizer,
  "kernels": compiled.Kernels,
  "lockstep": models.Lockstep,
  "membership": swarms.Membership,
  "moments": swarms.Moments,
  "nanobatches": models.Nanobatches,
  "paged_attention": compiled.PagedAttention,
  "placements": searches.Placements,
  "planner": searches.Planner,
  "planner_memory": searches.PlannerMemory,
  "planner_truth": searches.PlannerTruth,
  "programs": compiled.Programs,
  "ring": swarms.Ring,
  "ring_orders": swarms.RingOrders,
  "schedules": searches.Schedules,
  "server": models.Server,
  "serving": models.Serving,
  "pipeline_schedules": searches.PipelineSchedules,
  "train_step": models.TrainStep,
  "zero": models.ZeroStep,
}

