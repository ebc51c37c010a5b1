"""Preparation of benchmarks: config, random batch and environment."""

from typing import Any

import numpy as np

from caatnet.train.records import environment
from parallel.axes import Axis, make_mesh


def without_benchmark(config: Any) -> Any:
  """Returns a copy of a config without the section of the benchmark."""
  config = config.copy_and_resolve_references()
  with config.unlocked():
    del config["benchmark"]
  return config


def token_batch(config: Any) -> np.ndarray:
  """Draws a batch of examples of random tokens, ``[batch, positions + 1]``."""
  return np.random.default_rng(0).integers(
    config.model.vocab_size,
    size=(config.data.batch_size, config.data.seq_len + 1),
  )


def describe_environment() -> dict[str, Any]:
  """Returns date, versions, machine and commit of a run on one device."""
  return environment(make_mesh({"device": Axis("device", 1)}))
