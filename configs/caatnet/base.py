"""Base config of language models with all sections, for other configs.

Hyperparameters are those of the CAAT-Net paper (arXiv 2506.19645) and its
official code: AdamW with betas 0.9 and 0.95, weight decay 0.1, clipping at
norm 1, warm-up, and a cosine decay to a tenth of the peak learning rate.
"""

import ml_collections

from caatnet.schema.tree import defaults


def get_config() -> ml_collections.ConfigDict:
  """Returns a complete config with the sizes of ``tiny``."""
  config = defaults("run")
  config.model = defaults("model", "transformer")
  config.sync = defaults("sync")
  config.parallel = defaults("parallel")
  config.pipeline = defaults("pipeline")
  config.outer = defaults("outer", "data_parallel")
  config.zero = defaults("zero")
  config.memory = defaults("memory")
  config.data = defaults("data", "text")
  config.optimizer = defaults("optimizer", "adamw")
  config.train = defaults("train")
  config.inference = defaults("inference")
  return config
