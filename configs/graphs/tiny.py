r"""Graph network on planted communities, for a laptop CPU.

  python -m launch.train --config=configs/graphs/tiny.py
  python -m launch.train --config=configs/graphs/tiny.py:diloco --cpu_devices=4
  python -m launch.train --config=configs/graphs/tiny.py \
    --config.model.layer=gcn --config.data.access=device --workdir=runs/gcn
  python -m launch.train --config=configs/graphs/tiny.py:diloco \
    --config.parallel.worker=1 --elastic=localhost:7000  # in a swarm

The run has two workers of two data-parallel ranks. The argument is an outer
loop of `caatnet/schema/outer.py`; with `,test` the run has a few steps.
All keys of outer loops and of `config.zero` have the same effect as for
language models. With the optional dependencies `graphs` (numba), sampling is
faster and gives the same trees.

Expected result, in a minute on two cores: an accuracy within three points of
Bayes' rule on the same trees, which is 0.85 and is also printed. Bayes' rule on
the node's own features alone has 0.39. A GCN, which divides a node's own
features by its degree, is within nine points of Bayes' rule.
"""

import ml_collections

from caatnet.schema.tree import defaults
from configs import classifiers


def get_config(arguments: str = "data_parallel") -> ml_collections.ConfigDict:
  """Returns the config of an outer loop and a size, as in `diloco,test`."""
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
