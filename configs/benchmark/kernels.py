"""Pallas kernels against XLA's programs of their references.

  python -m launch.benchmark --config=configs/benchmark/kernels.py

For each kernel the table has the bytes that it must move, its time, the
fraction of the bandwidth of a copy in the same run that this is, and the ratios
of its time to those of the reference, compiled as a whole and in one program
per stage. Times are medians over rounds in which all take turns, on random data
in several sets of buffers. On CPUs kernels are interpreted on small shapes:
results are checked and bytes counted, and no time is printed.

gather_rows reads rows of the host's memory: its copy is one from there, and the
reference, which cannot read there, has the table on the device.

For an accelerator that is not here, it counts the bytes of main memory that
programs with and without kernels read and write, from their compiled text:

  python -m launch.benchmark --config=configs/benchmark/kernels.py \
    --config.benchmark.target=gpu:h200:1x1
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config() -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.name = "kernels"
  config.benchmark = defaults("benchmark", "kernels")
  return config
