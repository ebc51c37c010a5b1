r"""Step times predicted from three profiled configurations, with intervals.

  python -m launch.benchmark --config=configs/benchmark/calibration.py \
    --cpu_devices=4 --output=results/calibration.json
  python -m launch.compile --config=caatnet/tiny --target=cpu:4 \
    --config.parallel.tensor=4 --cluster=runs/calibration_cluster.json

Rates of a virtual device and its links are fitted to profiles of three
configurations. The step model of `launch.compile` then predicts step times of
random configurations, which differ in p, partition, pipeline schedule, outer
loop, ranks, mesh and batch. The errors of 20 configurations correct the median
and give the intervals of 100 others, by split conformal prediction. The tables
have the rates with their residuals, the errors of the predictions, the fraction
of intervals that contain the measured time (in total and by group), and the
spread of repeated measurements. The file of the rates describes the family of
the 20 configurations. For a step outside of the family, such as one of another
model, `launch.compile` widens the interval and names the keys that differ.

A line is added to `config.benchmark.results` after each configuration, and a
later run continues with the rates of the first run. It takes an estimated 45
minutes on two cores, on which no other process should run;
`GLIBC_TUNABLES=glibc.malloc.hugetlb=1` reduces the spread. Virtual devices
share the processor, so times of collectives are not those of a network.

`:test` takes about a minute with three small configurations, too few for finite
intervals.
"""

import ml_collections

from caatnet.benchmarks.programs.keys import Calibration
from caatnet.schema.tree import defaults
from configs.caatnet import base


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the benchmark: `all` or `test`."""
  if size not in ("all", "test"):
    raise ValueError(f"calibration.py:{size}: the sizes are all and test")
  config = base.get_config()
  config.name = "calibration"
  config.model.width = 256
  config.model.ffn_width = 688
  config.model.num_layers = 4
  config.data.seq_len = 128
  config.data.batch_size = 8  # of the profiled steps
  config.benchmark = defaults(Calibration)
  if size == "test":
    config.model.width, config.model.ffn_width = 32, 48
    config.model.num_layers, config.data.seq_len = 2, 16
    given = config.benchmark
    given.results = given.cluster = ""
    given.devices, given.profiled = 2, (("parallel.tensor=2", "tensor:2"),)
    given.held_out, given.tested, given.batch_sizes = 1, 1, (8,)
    given.blocks, given.block_s = 2, 0.01
  return config
