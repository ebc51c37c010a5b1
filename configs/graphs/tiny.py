r"""A graph network on planted communities, for a laptop CPU.

  python -m launch.train --config=configs/graphs/tiny.py
  python -m launch.train --config=configs/graphs/tiny.py:diloco --cpu_devices=4
  python -m launch.train --config=configs/graphs/tiny.py \
    --config.model.layer=gcn --config.data.access=device --workdir=runs/gcn

It has two workers of two data-parallel ranks. The argument names the outer
loop, one of those in `configs/sections.py`; `test` after a comma makes a few
steps only. All keys of outer loops and of `config.zero` work as for language
models. The extra `graphs` (numba) samples faster, and draws the same.

Expected result, in a minute on two cores: an accuracy within three points of
Bayes' rule on the same trees, which is printed beside it and is 0.85; by a
node's own features alone no rule is right more often than 0.39. A GCN, which
divides a node's own features by its degree, comes within nine points.
"""

import ml_collections

from configs import graph_sections, sections


def get_config(arguments: str = "data_parallel") -> ml_collections.ConfigDict:
  """Returns an outer loop at a size, `demo` or `test`, as in `diloco,test`."""
  algorithm, _, size = arguments.partition(",")
  if algorithm not in sections.OUTER or size not in ("", "demo", "test"):
    raise ValueError(
      f"tiny.py:{arguments}: an outer loop ({', '.join(sections.OUTER)}), and "
      "after a comma demo or test"
    )
  config = ml_collections.ConfigDict()
  config.name = f"graphs_{algorithm}"
  config.seed = 0
  config.kernels = "auto"
  config.model = graph_sections.graph()
  config.parallel = sections.parallel()
  config.parallel.worker = 2
  config.parallel.data = 2
  config.parallel.tensor = 1
  config.outer = sections.outer(algorithm)
  config.zero = sections.zero()
  config.data = graph_sections.graphs()
  config.optimizer = sections.adamw()
  if algorithm == "dc_s3gd":
    config.optimizer = sections.sgd()
  config.optimizer.learning_rate = 0.1 if algorithm == "dc_s3gd" else 0.01
  config.train = sections.train()
  config.train.num_steps = 1500
  config.train.eval_every = 500
  if "every" in config.outer:
    config.outer.every = 10
  if size == "test":
    config.model.width = 8
    config.data.fanouts = (3, 2)
    config.data.batch_size = 32
    config.data.validation_nodes = 200
    config.optimizer.warmup_steps = 2
    config.train.num_steps = 12
    config.train.eval_every = 6
    config.train.checkpoint_every = 4
    if "every" in config.outer:
      config.outer.every = 5  # streaming has five fragments
    if algorithm == "sparseloco":
      config.outer.chunk, config.outer.top_k = 64, 8
  return config
