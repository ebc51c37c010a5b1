"""A language model with every section; other configs change a few keys.

The hyper-parameters are those of the CAAT-Net study (arXiv 2506.19645 and its
official code): AdamW (0.9, 0.95), weight decay 0.1, clipping at 1, warm-up and
cosine to a tenth.
"""

import ml_collections

from configs import sections


def get_config() -> ml_collections.ConfigDict:
  """A complete configuration; the sizes are those of ``tiny``."""
  config = ml_collections.ConfigDict()
  config.name = "base"
  config.seed = 0
  # Norms and codecs: "auto" (Pallas on TPUs and GPUs where it takes the
  # sizes), "reference" (jnp), or "interpret": the TPU's kernels on any
  # machine, slowly.
  config.kernels = "auto"
  config.model = sections.transformer()
  config.sync = sections.sync()
  config.parallel = sections.parallel()
  config.outer = sections.outer("data_parallel")
  config.zero = sections.zero()
  config.data = sections.text()
  config.optimizer = sections.adamw()
  config.train = sections.train()
  return config
