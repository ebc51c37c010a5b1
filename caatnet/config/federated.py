"""Builder of a federated run from a config."""

import dataclasses
import json
from typing import Any

import jax
import ml_collections
import numpy as np

from caatnet.config import experiments
from caatnet.federated import arithmetic, flower, splits, vector_codec
from caatnet.federated.client import Codecs, Trainer
from caatnet.federated.local import LocalTrainer, ParamsFlattener
from caatnet.federated.server import Rules
from caatnet.schema import fields, tree
from caatnet.schema.federated import Federated
from caatnet.train.experiment import Experiment
from parallel.base.naming import prefix_error_keys
from parallel.plans.hardware import client_links as links


@dataclasses.dataclass(frozen=True)
class Federation:
  """Components of a federated run.

  Attributes:
    config: The whole config as plain data, for ``config.json``.
    experiment: Model, data and inner optimizer of a client; None if clients run
      ``numpy_client``.
    section: ``config.federated``.
    vectors: Conversion of parameters to one vector and back.
    rules: Options of the server's rounds.
    arithmetic: The server's computations on vectors.
    uplink: Codec of clients' updates.
    downlink: Codec of differences between revisions of the model.
    links: Emulated link of each client; () for none.
  """

  config: dict[str, Any]
  experiment: Experiment | None
  section: Federated
  vectors: ParamsFlattener | flower.ArrayFlattener
  rules: Rules
  arithmetic: arithmetic.VectorArithmetic
  uplink: vector_codec.VectorCodec
  downlink: vector_codec.VectorCodec
  links: tuple[links.Link, ...]

  def trainer(self, client: int) -> Trainer:
    """Reads the data of a client and returns its trainer."""
    some, experiment = self.section, self.experiment
    if experiment is None:
      return flower.NumPyTrainer(
        flower.load(some.numpy_client, client, some.clients), client,
        {"local_steps": some.local_steps, "proximal_mu": some.proximal},
        some.validate,
      )
    with prefix_error_keys("config.federated", fields.keys(Federated)):
      examples = splits.client_examples(
        experiment.data, some.split, client, some.clients, some.alpha,
        experiment.seed,
      )
    return LocalTrainer(
      experiment, examples, client, some.local_steps, some.proximal,
      some.validate, some.test,
    )

  def codecs(self, client: int) -> Codecs:
    """Returns a client's functions to encode updates and decode models."""
    key = jax.random.fold_in(jax.random.key(self.rules.seed), client)

    def encode(delta: np.ndarray, round: int) -> bytes:
      return self.uplink.encode(delta, jax.random.fold_in(key, round))

    return Codecs(encode, self.downlink.decode)


def build(config: ml_collections.ConfigDict, client: int = 0) -> Federation:
  """Checks a config and builds its federated run.

  Args:
    config: A config with the sections of ``configs/federated/tiny.py``.
    client: With ``numpy_client``, id of the client whose initial parameters
      define the shapes and, on the server, the initial model.

  Raises:
    ValueError: If a value is not allowed; the message has the key.
  """
  if "federated" not in config:
    raise ValueError(
      "config.federated is missing: launch.federate needs a config such as "
      "configs/federated/tiny.py"
    )
  tree.check(config)
  section: Federated = tree.parse_section("federated", config.federated)
  if section.numpy_client:
    vectors = _numpy_vectors(config, section, client)
    return _federation(config, section, None, vectors)
  rest = ml_collections.ConfigDict(config)
  with rest.unlocked():
    del rest.federated
    # The learning rate decays over all local steps.
    rest.train.num_steps = section.rounds * section.local_steps
  if config.outer.algorithm != "data_parallel" or config.parallel.worker != 1:
    raise ValueError(
      f"config.outer.algorithm={config.outer.algorithm!r} and config.parallel."
      f"worker={config.parallel.worker} must be 'data_parallel' and 1: clients "
      "are set by config.federated.clients"
    )
  experiment = experiments.build(rest)
  return _federation(config, section, experiment, ParamsFlattener(experiment))


def _numpy_vectors(
  config: ml_collections.ConfigDict, section: Federated, number: int
) -> flower.ArrayFlattener:
  """Returns a flattener with the initial parameters of a client."""
  if "model" in config or section.split != "own" or section.test:
    raise ValueError(
      f"config.federated.numpy_client={section.numpy_client!r} needs a config "
      "without a model, split='own' and test=False, such as "
      "configs/federated/numpy.py"
    )
  client = flower.load(section.numpy_client, number, section.clients)
  return flower.make_flattener(client, number)


def _federation(
  config: ml_collections.ConfigDict, section: Federated,
  experiment: Experiment | None,
  vectors: ParamsFlattener | flower.ArrayFlattener,
) -> Federation:
  """Builds codecs, links and the server's rules and arithmetic."""
  with prefix_error_keys("config.federated", fields.keys(Federated)):
    rules = Rules(
      digest=vectors.digest, seed=config.seed, **{
        f.name: getattr(section, f.name) for f in dataclasses.fields(Rules)
        if f.name not in ("digest", "seed")
      },
    )
    uplink = vector_codec.make(
      section.uplink, section.stochastic, section.top_k
    )
    of_clients = (
      links.assign_links(
        section.links, section.clients
      ) if section.links else ()
    )
  downlink = vector_codec.make(section.downlink)
  return Federation(
    json.loads(config.to_json()), experiment, section, vectors, rules,
    arithmetic.VectorArithmetic(
      arithmetic.optimizer(
        section.optimizer, section.learning_rate, section.momentum,
        section.beta_2, section.eps,
      ),
      downlink, section.outlier_factor,
    ),
    uplink, downlink, of_clients,
  )
