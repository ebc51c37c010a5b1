r"""Counts the memory transactions of a gather of feature rows from the host.

  python -m launch.simulate --config=configs/graphs/alignment.py
  python -m launch.simulate --config=configs/graphs/alignment.py \
    --config.features="(100,602)" --config.offset=64 --plot=alignment.png

A GPU that reads rows in host memory requests lines of 128 bytes. The circular
shift of arXiv 2103.03330 aligns the accesses of its warps to lines. Nothing is
timed; it takes a second. Expected result: with the shift, a row of 100 features
(400 bytes) needs 4.00 requests instead of 6.63, and a row of 602 features 19.75
instead of 36.63; for multiples of 32 features the number is unchanged.
"""

import ml_collections

from caatnet.schema.tree import defaults
from caatnet.studies.alignment.keys import Alignment


def get_config() -> ml_collections.ConfigDict:
  """Returns the study, for the widths of well-known datasets and others."""
  config = defaults(Alignment)
  return config
