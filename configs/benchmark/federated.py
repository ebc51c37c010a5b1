r"""Federated rounds over emulated links: measured, and predicted from others.

  python -m launch.benchmark --config=configs/benchmark/federated.py \
    --output=results/federated_rounds.json

Server and clients of configs/federated/tiny.py run on this machine, as root in
network namespaces with shaped links, each client with a fifth of a processor.
Each case is predicted by `caatnet.federated.predict` from the records of
caatnet/federated/links.py, from each client's compute times in the rounds of a
run without emulated links, and from the time of a message before its first
byte, fitted on three models of other sizes. Aim: the round, and each phase
above 5% of it, within 10%.

A run is added to `config.benchmark.results` after its measurement, and existing
ones are not repeated. `federated.py:test` has one case.
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the benchmark: `all`, or `test` for one small case."""
  if size not in ("all", "test"):
    raise ValueError(f"federated.py:{size}: the sizes are all and test")
  config = ml_collections.ConfigDict()
  config.name = "federated_rounds"
  config.benchmark = defaults("benchmark", "federated_rounds")
  if size == "test":
    config.benchmark.results = ""
    config.benchmark.models = ("configs/federated/tiny.py:convolutional,test",)
    config.benchmark.fitted = ()
    config.benchmark.interfaces, config.benchmark.clients = ("wifi",), (2,)
    config.benchmark.rounds, config.benchmark.cpu_quota = 2, 0.0
  return config
