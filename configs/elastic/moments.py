r"""Initial optimizer moments of joining workers: zero or another worker's.

  python -m launch.benchmark --config=configs/elastic/moments.py --cpu_devices=1

Eight workers train by DiLoCo on one device. After each round a random worker is
replaced by a new one. It starts from the common parameters, as all workers do
after a round, and its moments are zero, with matching bias correction, or those
of another worker, the donor. Everything else is equal for a seed.

Expected result: log/2026-11-23-elastic-newcomer-moments.md.
"""

import ml_collections

from caatnet.config.schema.tree import defaults
from configs.elastic import diloco


def get_config() -> ml_collections.ConfigDict:
  """Returns 8 workers, 120 rounds of 6 steps, and 3 seeds."""
  config = diloco.get_config("diloco,test")
  del config.elastic
  config.name = "elastic_moments"
  config.parallel.worker = 8
  config.data.batch_size = 16  # over all workers
  config.data.validation_windows = 256
  config.outer.sync_every = 6
  config.train.num_steps = 720
  config.benchmark = defaults("benchmark", "moments")
  return config
