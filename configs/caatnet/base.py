"""A language model with all sections; other configs change a few keys.

The hyper-parameters are those of the CAAT-Net paper (arXiv 2506.19645) and its
official code: AdamW (0.9, 0.95), weight decay 0.1, clipping at 1, warm-up, and
a cosine down to a tenth.
"""

import ml_collections

from configs import sections


def get_config() -> ml_collections.ConfigDict:
  """Returns a complete config with the sizes of ``tiny``."""
  config = ml_collections.ConfigDict()
  config.name = "base"
  config.seed = 0
  # How norms and codecs are computed: "pallas" (by kernels on TPUs and GPUs,
  # where these take the sizes), "auto" (the same without those that make a
  # model slower: parallel/kernels/evidence.py), "reference" (jnp), or
  # "interpret" (by the TPU's kernels on any machine, slowly).
  config.kernels = "auto"
  config.model = sections.transformer()
  config.sync = sections.sync()
  config.parallel = sections.parallel()
  config.pipeline = sections.pipeline()
  config.outer = sections.outer("data_parallel")
  config.zero = sections.zero()
  config.data = sections.text()
  config.optimizer = sections.adamw()
  config.train = sections.train()
  config.inference = sections.inference()
  return config
