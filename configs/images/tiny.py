r"""Residual convolutional network on scikit-learn's digits, for a laptop CPU.

  python -m launch.train --config=configs/images/tiny.py
  python -m launch.train --config=configs/images/tiny.py:dc_s3gd --cpu_devices=4

The run has two workers of two data-parallel ranks. The argument is an outer
loop of `caatnet/schema/outer.py`; with `,test` the run has a few steps. All
keys of outer loops and of `config.zero` have the same effect as for language
models. DC-S3GD was published for convolutional networks (arXiv 1911.02516).

Expected result: a validation accuracy above 95%, in a minute on two cores.
"""

import ml_collections

from caatnet.schema.tree import defaults
from configs import classifiers


def get_config(arguments: str = "data_parallel") -> ml_collections.ConfigDict:
  """Returns the config of an outer loop and a size, as in `diloco,test`."""
  config, _, is_test = classifiers.config(
    arguments, "images", defaults("model", "convolutional"),
    defaults("data", "images"),
  )
  config.pipeline = defaults("pipeline")
  if is_test:
    config.model.widths = (8, 16)
  else:
    config.train.num_steps = 300
  return config
