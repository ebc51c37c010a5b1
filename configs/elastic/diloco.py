r"""DiLoCo with elastic membership: each worker is a separate process.

  python -m launch.coordinator --port=7000 --least=2
  python -m launch.train --config=configs/elastic/diloco.py \
    --elastic=localhost:7000                         # once for each worker

The argument is the outer loop: diloco, local_sgd, fedavg, streaming, eager,
dc_s3gd, sparseloco, or data_parallel, which communicates in each step; with
`,test` the run has a few steps of a smaller model. The batch size is per
worker. After a worker is killed, the same command in the same folder restarts
it; it resumes from the swarm's shared state.
"""

import ml_collections

from caatnet.schema.tree import defaults
from configs.caatnet import tiny


def get_config(arguments: str = "diloco") -> ml_collections.ConfigDict:
  """Returns the config of an outer loop and a size, as in `diloco,test`."""
  algorithm, _, size = arguments.partition(",")
  config = tiny.get_config(size or "demo")
  config.name = f"elastic_{algorithm}"
  config.parallel.tensor = 1
  config.data.batch_size = 4
  config.outer = defaults("outer", algorithm)
  config.elastic = defaults("elastic")
  if size == "test":
    config.data.batch_size = 2
    if "sync_every" in config.outer:
      config.outer.sync_every = 3
  if algorithm == "streaming":
    config.outer.codec = "e3m0"
    config.outer.overlap = (2,) if size == "test" else (5,)
  return config
