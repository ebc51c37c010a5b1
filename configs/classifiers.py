"""Config that small runs of image and graph classifiers share."""

import ml_collections

from caatnet.schema.tree import choices, defaults


def config(
  arguments: str, name: str, model: ml_collections.ConfigDict,
  data: ml_collections.ConfigDict,
) -> tuple[ml_collections.ConfigDict, str, bool]:
  """Returns a config with two workers of two data-parallel ranks, for a CPU.

  Args:
    arguments: An outer loop, optionally followed by a comma and demo or test.
    name: Prefix of the run's name.
    model: The section of the model.
    data: The section of the data.

  Returns:
    The config, the name of its outer loop, and whether its size is "test": a
    few steps of small batches.
  """
  algorithm, _, size = arguments.partition(",")
  loops = choices("outer")
  if algorithm not in loops or size not in ("", "demo", "test"):
    raise ValueError(
      f"tiny.py:{arguments}: use an outer loop ({', '.join(loops)}), possibly "
      "followed by ',demo' or ',test'"
    )
  config = defaults("run")
  config.name = f"{name}_{algorithm}"
  config.model = model
  config.parallel = defaults("parallel")
  config.parallel.worker = 2
  config.parallel.data = 2
  config.parallel.tensor = 1
  config.outer = defaults("outer", algorithm)
  config.zero = defaults("zero")
  config.memory = defaults("memory")
  config.data = data
  config.optimizer = defaults("optimizer", "adamw")
  if algorithm == "dc_s3gd":
    config.optimizer = defaults("optimizer", "sgd")
    config.optimizer.learning_rate = 0.1
  config.train = defaults("train")
  if "sync_every" in config.outer:
    config.outer.sync_every = 10
  if size == "test":
    config.data.batch_size = 32
    config.optimizer.warmup_steps = 2
    config.train.num_steps = 12
    config.train.eval_every = 6
    config.train.checkpoint_every = 4
    if "sync_every" in config.outer:
      config.outer.sync_every = 5  # streaming has five fragments
    if algorithm == "sparseloco":
      config.outer.chunk, config.outer.top_k = 64, 8
  return config, algorithm, size == "test"
