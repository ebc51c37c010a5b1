"""Training: experiment, training step, loop, checkpoints and metrics."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "evaluate": ["make_evaluate", "put_batch"],
  "experiment": ["Experiment"],
  "loop": ["TrainResult", "train"],
  "records": ["environment", "read_config", "read_metrics"],
  "state": ["TrainState"],
  "sweep": ["expand", "read_csv", "run_point"],
  "traffic": ["communication_per_step", "lower_steps"],
})
