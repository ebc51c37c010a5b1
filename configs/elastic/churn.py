r"""Peers are killed, stopped, cut off and come, while they train.

  python -m launch.benchmark --config=configs/elastic/churn.py \
    --output=results/churn.json
  python -m launch.benchmark --config=configs/elastic/churn.py:short
  python -m launch.benchmark --config=configs/elastic/churn.py:soak
  python -m launch.benchmark --config=configs/elastic/churn.py:training

Workers are processes on this machine that learn a vector with noise. At drawn
times one of them is killed (kill -9), stopped for a shorter or a longer time
than a peer may be silent (SIGSTOP), loses a connection, has one over which
nothing arrives any more, has a wrong bit in its state, or joins; or the
coordinator is killed and started again; or all are killed, and a new run begins
from a checkpoint. What happens is drawn from the events that have happened
least often between rounds, in an exchange, or while members connect and fetch.

All revisions of all workers are compared by their digests, the coordinator's
log is replayed, and the loss is compared with that of the same number of
samples without any events. A time without a committed round that is longer than
benchmark.limit_s is an error.

With `training` workers train a small Llama by DiLoCo for as many steps as the
config says, and the loss is compared with that of a swarm without events that
trains on as many samples. What else is compared is the same.
"""

import ml_collections

from caatnet.config.schema.tree import defaults
from configs.elastic import diloco


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns `all`, `short` (minutes), `soak` (an hour), `training`, `test`."""
  if size == "training":
    return _training()
  events = {"all": 220, "short": 60, "test": 6, "soak": 1}
  if size not in events:
    raise ValueError(
      f"churn.py:{size}: the sizes are {', '.join(events)}, training"
    )
  config = ml_collections.ConfigDict()
  config.name = "churn"
  config.benchmark = defaults("benchmark", "churn")
  config.benchmark.events = events[size]
  if size != "all":
    config.benchmark.seeds = (0,)
  if size == "test":
    config.benchmark.workers, config.benchmark.parameters = 3, 10_000
  if size == "soak":  # it leaves this machine to others
    config.benchmark.minutes, config.benchmark.gap_s = 60.0, 5.0
    config.benchmark.samples, config.benchmark.pause_s = 4, 0.5
  return config


def _training() -> ml_collections.ConfigDict:
  config = diloco.get_config("diloco,test")
  config.name = "churn_training"
  config.data.validation_windows = 256
  config.outer.every = 6
  config.train.num_steps = 720
  config.train.checkpoint_every = 60
  config.train.keep_checkpoints = 2
  config.elastic.alone_s = 60.0
  config.benchmark = defaults("benchmark", "churn")
  config.benchmark.gap_s = 1.0
  # Eight programs start on a machine's few cores.
  config.benchmark.silence_s = 6.0
  config.benchmark.limit_s = 180.0
  return config
