r"""DiLoCo among workers that come and go: each is a process of its own.

  python -m launch.coordinator --port=7000 --least=2
  python -m launch.train --config=configs/elastic/diloco.py \
    --elastic=localhost:7000                         # once for each worker

The argument names the outer loop: diloco, local_sgd, fedavg, streaming, eager,
dc_s3gd, sparseloco, or data_parallel, where all speak in each step; `test`
after a comma makes a few steps of a smaller model. A batch is that of one
worker. A worker that is killed is started again by the same command, in the
same folder, and goes on with what the others share.
"""

import ml_collections

from caatnet.config.schema.tree import defaults
from configs.caatnet import tiny


def get_config(arguments: str = "diloco") -> ml_collections.ConfigDict:
  """Returns an outer loop at a size, `demo` or `test`, as in `diloco,test`."""
  algorithm, _, size = arguments.partition(",")
  config = tiny.get_config(size or "demo")
  config.name = f"elastic_{algorithm}"
  config.parallel.tensor = 1
  config.data.batch_size = 4
  config.outer = defaults("outer", algorithm)
  config.elastic = defaults("elastic")
  if size == "test":
    config.data.batch_size = 2
    if "every" in config.outer:
      config.outer.every = 3
  if algorithm == "streaming":
    config.outer.codec = "e3m0"
    config.outer.overlap = (2,) if size == "test" else (5,)
  return config
