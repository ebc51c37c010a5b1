r"""Counts what a gather of feature rows asks the host's memory for.

  python -m launch.simulate --config=configs/graphs/alignment.py
  python -m launch.simulate --config=configs/graphs/alignment.py \
    --config.features="(100,602)" --config.offset=64 --plot=alignment.png

A GPU that reads rows where they lie asks for lines of 128 bytes. With the
circular shift (arXiv 2103.03330) its warps begin where lines do. Nothing is
timed; it takes a second. Expected result: of rows of 100 features (400 bytes)
4.00 lines are asked for in place of 6.63, of 602 features 19.75 in place of
36.63, and of a multiple of 32 features as many as without.
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config() -> ml_collections.ConfigDict:
  """Returns the study, for the widths of well-known data sets and others."""
  config = defaults("study", "alignment")
  return config
