r"""A residual convolutional network on scikit-learn's digits, for a laptop CPU.

  python -m launch.train --config=configs/images/tiny.py
  python -m launch.train --config=configs/images/tiny.py:dc_s3gd --cpu_devices=4

It has two workers of two data-parallel ranks. The argument names the outer
loop, one of those in `configs/sections.py`; `test` after a comma makes a few
steps only. All keys of outer loops and of `config.zero` work as for language
models. DC-S3GD was published for convolutional networks (arXiv 1911.02516).

Expected result: over 95% of the held-out digits are right, in a minute on two
cores.
"""

import ml_collections

from configs import sections


def get_config(arguments: str = "data_parallel") -> ml_collections.ConfigDict:
  """Returns an outer loop at a size, `demo` or `test`, as in `diloco,test`."""
  algorithm, _, size = arguments.partition(",")
  if algorithm not in sections.OUTER or size not in ("", "demo", "test"):
    raise ValueError(
      f"tiny.py:{arguments}: an outer loop ({', '.join(sections.OUTER)}), and "
      "after a comma demo or test"
    )
  config = ml_collections.ConfigDict()
  config.name = f"images_{algorithm}"
  config.seed = 0
  config.kernels = "auto"
  config.model = sections.convolutional()
  config.parallel = sections.parallel()
  config.parallel.worker = 2
  config.parallel.data = 2
  config.parallel.tensor = 1
  config.pipeline = sections.pipeline()
  config.outer = sections.outer(algorithm)
  config.zero = sections.zero()
  config.data = sections.images()
  config.optimizer = sections.adamw()
  if algorithm == "dc_s3gd":
    config.optimizer = sections.sgd()
    config.optimizer.learning_rate = 0.1
  config.train = sections.train()
  config.train.num_steps = 300
  if "every" in config.outer:
    config.outer.every = 10
  if size == "test":
    config.model.widths = (8, 16)
    config.data.batch_size = 32
    config.optimizer.warmup_steps = 2
    config.train.num_steps = 12
    config.train.eval_every = 6
    config.train.checkpoint_every = 4
    if "every" in config.outer:
      config.outer.every = 5  # streaming has five fragments
    if algorithm == "sparseloco":
      config.outer.chunk, config.outer.top_k = 64, 8
  return config
