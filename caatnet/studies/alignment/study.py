"""Study of alignment: a GPU's requests to host memory, row by row.

Rows of features are packed without padding, so most begin within a line of 128
bytes. `caatnet.studies.alignment.predictor` counts the lines and sectors that a
gather touches, with and without the circular shift of Min et al. (arXiv
2103.03330). `parallel.kernels.gather_rows.order` gives the bytes that a TPU's
DMA moves in blocks.

No measurement of the paper by row size was available for comparison.
``PUBLISHED`` lists statements of the paper and its companion: run times on
GPUs, which cannot be derived from a count of lines.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from caatnet.studies.alignment import predictor
from caatnet.studies.alignment.predictor import LINE_BYTES, SECTOR_BYTES
from parallel.base.naming import prefix_error_keys
from parallel.kernels.gather_rows import order

# (statement, row size that it refers to, source).
PUBLISHED = (
  ("training with several GPUs is 65 to 92% faster", "not stated by row size",
   "arXiv 2103.03330, abstract"),
  ("transfers take 47.1% less time on average", "not stated by row size",
   "arXiv 2101.07956, abstract"),
  ("rows are shifted", "256 bytes and more", "code, DGL's PR 3086"),
)
# DGL shifts rows of at least this many bytes (its PR 3086).
DGL_MIN_ROW_BYTES = 256


def run(config: Mapping[str, Any]) -> dict[str, Any]:
  """Computes the study.

  Args:
    config: Config like configs/graphs/alignment.py, as nested dicts.

  Returns:
    Plain data: "rows", one for each number of features, with requests of lines
    and sectors per row of a random gather; "curve", the fraction of requests
    that the shift avoids by row size.
  """
  rng = np.random.default_rng(config["seed"])
  ids = rng.integers(config["num_rows"], size=config["num_ids"])
  rows = [
    _count_row_requests(
      width, ids, config["offset"]
    ) for width in config["features"]
  ]
  sizes = np.arange(4, 4 * config["largest"] + 1, 4)  # bytes of float32 rows
  return {
    "study": "alignment",
    "published": [
      {"what": what, "row_size": size, "source": source}
      for what, size, source in PUBLISHED
    ],
    "num_ids": config["num_ids"],
    "offset": config["offset"],
    "rows": rows,
    "curve": {
      "row_bytes": sizes.tolist(),
      "lines_spared": [
        _avoided_fraction(int(size), LINE_BYTES) for size in sizes
      ],
      "sectors_spared": [
        _avoided_fraction(int(size), SECTOR_BYTES) for size in sizes
      ],
    },
  }


def _count_row_requests(
  width: int, ids: np.ndarray, offset: int
) -> dict[str, Any]:
  """Returns requests per row and padding of rows of ``width`` float32.

  Args:
    width: Number of features of a row.
    ids: Numbers of the rows to gather.
    offset: Byte address of row 0.
  """
  row_bytes = 4 * width
  with prefix_error_keys("config", ("features",)):
    shifted, plain = (
      predictor.count_requests(ids, row_bytes, offset, shifted=shift)
      for shift in (True, False)
    )
  padded = -(-row_bytes // LINE_BYTES) * LINE_BYTES  # rounded up to lines
  return {
    "features": width,
    "row_bytes": row_bytes,
    "lines": plain.lines / len(ids),
    "lines_shifted": shifted.lines / len(ids),
    "sectors": plain.sectors / len(ids),
    "sectors_shifted": shifted.sectors / len(ids),
    "lines_padded": padded // LINE_BYTES,
    "padding": padded / row_bytes - 1,
    "dgl_shifts": row_bytes >= DGL_MIN_ROW_BYTES,
    "tpu_bytes_per_byte": order.read_amplification(width, "tpu"),
  }


def _avoided_fraction(row_bytes: int, size: int) -> float:
  """Returns the mean fraction of requests that the circular shift avoids.

  `row_bytes` is the size of a row, `size` that of a requested block.
  """
  plain, shifted = (
    predictor.mean_blocks(row_bytes, size, shifted=shift)
    for shift in (False, True)
  )
  return 1 - shifted / plain
