r"""Federated learning of scikit-learn's digits, server and clients on a CPU.

  python -m launch.federate --config=configs/federated/tiny.py
  python -m launch.federate --config=configs/federated/tiny.py:text
  python -m launch.federate --config=configs/federated/tiny.py \
    --config.federated.split=dirichlet --config.federated.uplink=int8

On several machines, the server runs with `--role=server --host=0.0.0.0
--port=7100`, and client K with `--role=client --client=K --server=HOST:7100`.

The argument is a model: convolutional, squeezenet (SqueezeNet 1.0, digits
enlarged to 32 x 32 x 3) or text (a transformer; each client has a package of
Python's standard library); with `,test` the run has three rounds of two steps.
"""

import ml_collections

from caatnet.schema.tree import defaults
from configs import classifiers
from configs.caatnet import tiny


def get_config(arguments: str = "convolutional") -> ml_collections.ConfigDict:
  """Returns the config of a model and a size, as in `text,test`."""
  model, _, size = arguments.partition(",")
  if model not in ("convolutional", "squeezenet", "text") or (
    size not in ("", "test")
  ):
    raise ValueError(
      f"tiny.py:{arguments}: the argument must be convolutional, squeezenet or "
      "text, optionally followed by ',test'"
    )
  if model == "text":
    config = tiny.get_config("test" if size else "demo")
    config.outer = defaults("outer", "data_parallel")
    config.data.batch_size = 8
  else:
    config, _, _ = classifiers.config(
      "data_parallel,test" if size else "data_parallel", "images",
      defaults("model", model), defaults("data", "images"),
    )
    config.data.batch_size = 32
  config.name = f"federated_{model}"
  config.parallel.worker = config.parallel.data = config.parallel.tensor = 1
  config.optimizer = defaults("optimizer", "sgd")
  config.optimizer.learning_rate = 0.1
  config.optimizer.warmup_steps = 0
  config.federated = defaults("federated")
  if model == "squeezenet":
    config.data.shape, config.data.enlarge = (32, 32, 3), True
    config.optimizer.learning_rate = 0.02
  if model == "text":
    config.federated.split = "packages"
    config.optimizer = defaults("optimizer", "adamw")
    config.optimizer.warmup_steps = 0
  if size:
    config.federated.clients = config.federated.per_round = 2
    config.federated.rounds, config.federated.local_steps = 3, 2
    if model == "convolutional":
      config.model.widths = (8,)
      config.model.blocks = 1
  return config
