r"""Fault injection: peers are killed, stopped, disconnected and join.

  python -m launch.benchmark --config=configs/elastic/churn.py \
    --output=results/churn.json
  python -m launch.benchmark --config=configs/elastic/churn.py:short
  python -m launch.benchmark --config=configs/elastic/churn.py:soak
  python -m launch.benchmark --config=configs/elastic/churn.py:training
  python -m launch.benchmark --config=configs/elastic/churn.py:network

Workers are processes on this machine that learn a vector with noise. At random
times one of these events occurs:

- A worker is killed (kill -9), or stopped (SIGSTOP) for less or more than the
  heartbeat timeout.
- A worker loses a connection, or a connection no longer delivers data.
- A bit of a worker's state is flipped.
- A worker joins, either with a run that has not begun, or with a run that is
  ahead of the group; the second one is refused.
- The coordinator is killed and restarted.
- All processes are killed, and a new run starts from a checkpoint, with a
  worker that has no checkpoint.

An event is chosen at random from those that have occurred least often in the
current phase (between rounds, in an exchange, or while members connect and
fetch state).

The benchmark compares the digests of all revisions of all workers, replays the
coordinator's log, and compares the loss with that of a run with as many samples
and no events. More than benchmark.limit_s seconds without a committed round are
an error.

With `network`, workers are in network namespaces with round trips of 1 to 200
ms, and reachability is disturbed as well: ports are closed, a worker listens at
127.0.0.1 only, or packets of one direction are dropped. It needs root.

With `training`, workers train a small Llama by DiLoCo for the config's number
of steps, and the loss is compared with that of a swarm without events and with
the same number of samples. The other comparisons are the same.
"""

import ml_collections

from caatnet.benchmarks.elastic.keys import Churn
from caatnet.schema.tree import defaults
from configs.elastic import diloco


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the benchmark.

  Args:
    size: `all`, `short` (minutes), `soak` (an hour), `network`, `training` or
      `test`.
  """
  if size == "training":
    return _training()
  events = {"all": 220, "short": 60, "network": 100, "test": 6, "soak": 1}
  if size not in events:
    raise ValueError(
      f"churn.py:{size}: the sizes are {', '.join(events)}, training"
    )
  config = ml_collections.ConfigDict()
  config.name = "churn"
  config.benchmark = defaults(Churn)
  config.benchmark.events = events[size]
  if size != "all":
    config.benchmark.seeds = (0,)
  if size == "test":
    config.benchmark.workers, config.benchmark.parameters = 3, 10_000
  if size == "network":
    config.benchmark.network, config.benchmark.limit_s = True, 30.0
    config.benchmark.workers, config.benchmark.parameters = 4, 50_000
  if size == "soak":  # low load, since it shares the machine for an hour
    config.benchmark.minutes, config.benchmark.gap_s = 60.0, 5.0
    config.benchmark.samples, config.benchmark.pause_s = 4, 0.5
  return config


def _training() -> ml_collections.ConfigDict:
  config = diloco.get_config("diloco,test")
  config.name = "churn_training"
  config.data.validation_windows = 256
  config.outer.sync_every = 6
  config.train.num_steps = 720
  config.train.checkpoint_every = 60
  config.train.keep_checkpoints = 2
  config.elastic.alone_s = 60.0
  config.benchmark = defaults(Churn)
  config.benchmark.gap_s = 1.0
  # Longer timeouts, since eight programs compile on few cores at the start.
  config.benchmark.silence_s = 6.0
  config.benchmark.limit_s = 180.0
  return config
