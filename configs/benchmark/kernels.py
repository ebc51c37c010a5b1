"""Pallas kernels against XLA's own fusion of their specification.

  python -m launch.benchmark --config=configs/benchmark/kernels.py

Per kernel: the bytes that it must move, its time, the fraction of the copy
bandwidth of the same run that this is, and the ratio of its time to XLA's
compiled reference and to the reference in one program per stage. Medians over
rounds in which all take turns, on random data in rotated buffers. On CPUs
kernels are interpreted on small shapes: numbers are checked and bytes counted,
no time is printed.

For an accelerator that is not here, the bytes of main memory that programs with
and without kernels read and write, from their compiled text:

  python -m launch.benchmark --config=configs/benchmark/kernels.py \
    --config.benchmark.target=gpu:h200:1x1
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.name = "kernels"
  config.benchmark = ml_collections.ConfigDict()
  config.benchmark.name = "kernels"
  config.benchmark.ops = (
    "add_norm", "add_norm_backward", "reduce_add_norm", "encode", "mean",
    "nesterov",
  )
  # What to compile for, as launch.compile's --target; "": run on what is here.
  config.benchmark.target = ""
  config.benchmark.rounds = 20
  # Sets of operands that calls take in turn.
  config.benchmark.buffers = 4
  return config
