"""Pallas kernels compared with their references, compiled by XLA.

  python -m launch.benchmark --config=configs/benchmark/kernels.py

For each kernel the table has the bytes that it must move, its time, its
bandwidth as a fraction of that of a copy in the same run, and the ratio of its
time to that of the reference, compiled as a whole or as one program per
operation. Times are medians over rounds in which all variants alternate, on
random data in several sets of buffers. On CPUs, kernels are interpreted on
small shapes: results are checked and bytes are counted, but nothing is timed.

gather_rows reads rows from host memory, so its copy is from host memory; the
reference, which cannot read host memory, has the table on the device.

For an accelerator that is not present, the benchmark counts the bytes of device
memory that programs with and without kernels read and write, from their
compiled text:

  python -m launch.benchmark --config=configs/benchmark/kernels.py \
    --config.benchmark.target=gpu:h200:1x1
"""

import ml_collections

from caatnet.benchmarks.programs.keys import Kernels
from caatnet.schema.tree import defaults


def get_config() -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.name = "kernels"
  config.benchmark = defaults(Kernels)
  return config
