"""Registry of benchmarks by ``config.benchmark.name``."""

from caatnet.config.schema.benchmarks import (
  compiled,
  memory,
  models,
  searches,
  swarms,
)

BENCHMARKS = {
  "calibrated_links": swarms.CalibratedLinks,
  "calibration": compiled.Calibration,
  "churn": swarms.Churn,
  "decoding": models.Decoding,
  "elastic_bits": swarms.ElasticBits,
  "engine": models.Engine,
  "experts": models.Experts,
  "experts_simulated": models.ExpertsSimulated,
  "federated_cell": swarms.FederatedCell,
  "federated_rounds": swarms.FederatedRounds,
  "flower": compiled.Flower,
  "foreign_programs": compiled.ForeignPrograms,
  "graphs": models.Graphs,
  "host_optimizer": memory.HostOptimizer,
  "kernels": compiled.Kernels,
  "membership": swarms.Membership,
  "moments": swarms.Moments,
  "nanobatches": models.Nanobatches,
  "peers": models.Peers,
  "placements": searches.Placements,
  "planner": searches.Planner,
  "planner_memory": searches.PlannerMemory,
  "programs": compiled.Programs,
  "ring": swarms.Ring,
  "ring_orders": swarms.RingOrders,
  "schedules": searches.Schedules,
  "server": models.Server,
  "serving": models.Serving,
  "train_step": models.TrainStep,
}

