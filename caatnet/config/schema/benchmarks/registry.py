"""Registry of benchmarks by ``config.benchmark.name``."""

from caatnet.config.schema.benchmarks import (
  compiled,
  models,
  searches,
  swarms,
)

BENCHMARKS = {
  "calibration": compiled.Calibration,
  "churn": swarms.Churn,
  "decoding": models.Decoding,
  "graphs": models.Graphs,
  "kernels": compiled.Kernels,
  "membership": swarms.Membership,
  "peers": models.Peers,
  "planner": searches.Planner,
  "programs": compiled.Programs,
  "ring": swarms.Ring,
  "schedules": searches.Schedules,
  "server": models.Server,
  "serving": models.Serving,
  "train_step": models.TrainStep,
}

