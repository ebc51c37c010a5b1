"""Client of the comparison with Flower that trains a model of a config.

Flower's client process also needs jax and the packages of this project.
"""

import json

import jax
import ml_collections
import numpy as np

from caatnet.benchmarks.foreign import flower_client
from caatnet.config import federated
from caatnet.federated import splits
from caatnet.train.evaluate import make_evaluate


class Model(flower_client.Recorded):
  """Local training of `caatnet.federated.local`; one array of parameters."""

  def __init__(self, number: int, num: int, options: dict) -> None:
    """Builds the model.

    Args:
      number: Id of the client.
      num: Number of clients.
      options: "config", a config of ``launch.federate`` as JSON; "steps";
        "seed"; "folder" for records.
    """
    super().__init__(number, options)
    config = ml_collections.ConfigDict(json.loads(options["config"]))
    config.seed = options["seed"]
    section = config.federated
    section.clients = section.per_round = num
    section.local_steps = options["steps"]
    section.validate = section.test = False  # `test` evaluates
    built = federated.build(config)
    self._vectors, self._trainer = built.vectors, built.trainer(number)
    self.num_examples = self._trainer.examples
    experiment = built.experiment
    self._validation = splits.of_client(
      experiment.data, section.split, number, num, section.alpha, config.seed
    ).validation
    self._tree = jax.jit(built.vectors.tree)
    self._evaluate = make_evaluate(
      experiment.program, experiment.data.batch_size
    )

  def get_parameters(self, config: dict) -> list[np.ndarray]:
    return [self._vectors.initial()]

  def train(self, parameters: list, server_round: int) -> list:
    (vector,) = parameters
    done = self._trainer.train(vector, server_round - 1, lambda: False)
    return [done.params]

  def test(self, parameters: list) -> tuple[float, float, int]:
    (vector,) = parameters
    found = self._evaluate(self._tree(vector), self._validation).means
    num = len(jax.tree.leaves(self._validation)[0])
    return float(found["loss"]), float(found["accuracy"]), num
