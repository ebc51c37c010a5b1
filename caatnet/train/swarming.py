"""How a worker finds its swarm, and its samples."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from caatnet.data.protocol import Dataset
from caatnet.train.apart import Programs
from caatnet.train.evaluate import put_batch
from caatnet.train.experiment import Experiment
from caatnet.train.peer import PREFIX
from caatnet.train.state import TrainState
from parallel.elastic.agent import Settings
from parallel.elastic.handshake import Address, Security
from parallel.elastic.swarm import Swarm

_CONFIG = f"{PREFIX}config"


def joined_to(
  address: Address, security: Security, programs: Programs, state: TrainState
) -> Swarm:
  """Returns a worker's place in a swarm, to be entered by `with`."""
  shared = programs.shared(state.outer)
  settings = Settings(samples=programs.num_samples)
  return Swarm(address, security, shared, settings=settings)


def reader(
  experiment: Experiment, dataset: Dataset
) -> Callable[[list[int]], Any]:
  """Returns a function that reads the examples of some numbers as a batch."""

  def read(numbers: list[int]) -> Any:
    examples = [dataset.examples[number] for number in numbers]
    rows = jax.tree.map(lambda *x: np.stack(x), *examples)
    return put_batch(experiment.program.layout, rows)

  return read
