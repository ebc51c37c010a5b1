"""Federated rounds here and in Flower: the same client, in turns.

  python -m launch.benchmark --config=configs/benchmark/flower.py
  python -m launch.benchmark --config=configs/benchmark/flower.py:test

The first run installs flwr into an environment of its own (300 MB). Server and
clients are processes in a network namespace, for which `unshare -rn` must be
permitted; emulated links need root. A row is added to
`config.benchmark.results` after its measurement, and existing ones are not
repeated. The argument test is two clients with a small network, without links
and SqueezeNet.
"""

import ml_collections

from caatnet.config.schema.tree import defaults
from configs.federated import tiny


def get_config(size: str = "") -> ml_collections.ConfigDict:
  if size not in ("", "test"):
    raise ValueError(f"flower.py:{size}: the argument is test, or none")
  config = tiny.get_config("squeezenet")
  config.name = "flower"
  config.benchmark = defaults("benchmark", "flower")
  if size:
    config.benchmark.results = ""
    config.benchmark.clients = config.benchmark.idle = (2,)
    config.benchmark.links = config.benchmark.with_model = ()
    config.benchmark.seeds, config.benchmark.rounds = (0,), 5
    config.benchmark.width = 20
  return config
