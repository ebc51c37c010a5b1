r"""Federated learning with a client of Flower, a NumPyClient (docs/flower.md).

  python -m launch.federate --config=configs/federated/numpy.py
  python -m launch.federate --config=configs/federated/numpy.py \
    --config.federated.numpy_client=my_app/client_app.py:client_fn

The default client trains logistic regression on scikit-learn's digits. With
`numpy.py:test` the run has three rounds of two clients.
"""

import ml_collections

from caatnet.schema.tree import defaults


def get_config(size: str = "") -> ml_collections.ConfigDict:
  if size not in ("", "test"):
    raise ValueError(f"numpy.py:{size}: the argument is test, or none")
  config = defaults("run")
  config.name = "federated_numpy"
  config.federated = defaults("federated")
  config.federated.numpy_client = "docs/examples/numpy_client.py:client_fn"
  config.federated.split = "own"
  config.federated.test = False
  if size:
    config.federated.clients = config.federated.per_round = 2
    config.federated.rounds, config.federated.local_steps = 3, 2
  return config
