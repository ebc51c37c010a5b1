r"""A graph network on planted communities, for a laptop CPU.

  python -m launch.train --config=configs/graphs/tiny.py
  python -m launch.train --config=configs/graphs/tiny.py:diloco --cpu_devices=4
  python -m launch.train --config=configs/graphs/tiny.py \
    --config.model.layer=gcn --config.data.access=device --workdir=runs/gcn
  python -m launch.train --config=configs/graphs/tiny.py:diloco \
    --config.parallel.worker=1 --elastic=localhost:7000  # in a swarm

It has two workers of two data-parallel ranks. The argument names the outer
loop, one of those in `caatnet/config/schema/outer.py`; `test` after a comma
makes a few steps only. All keys of outer loops and of `config.zero` work as for
language models. The extra `graphs` (numba) samples faster, and draws the same.

Expected result, in a minute on two cores: an accuracy within three points of
Bayes' rule on the same trees, which is printed beside it and is 0.85; by a
node's own features alone no rule is right more often than 0.39. A GCN, which
divides a node's own features by its degree, comes within nine points.
"""

import ml_collections

from caatnet.config.schema.tree import defaults
from configs import classifiers


def get_config(arguments: str = "data_parallel") -> ml_collections.ConfigDict:
  """Returns an outer loop at a size, `demo` or `test`, as in `diloco,test`."""
  config, algorithm, is_test = classifiers.config(
    arguments, "graphs", defaults("model", "graph"), defaults("data", "graphs")
  )
  if algorithm != "dc_s3gd":
    config.optimizer.learning_rate = 0.01
  if is_test:
    config.model.width = 8
    config.data.fanouts = (3, 2)
    config.data.validation_nodes = 200
  else:
    config.train.num_steps = 1500
    config.train.eval_every = 500
  return config
