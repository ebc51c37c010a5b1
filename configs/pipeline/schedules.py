r"""Compares pipeline schedules: bubble, memory, bytes and time.

  python -m launch.simulate --config=configs/pipeline/schedules.py \
    --plot=schedules.png
  python -m launch.simulate --config=configs/pipeline/schedules.py \
    --config.link.bandwidth=ethernet_10g --config.link.latency_s=0.01
  python -m launch.simulate --config=configs/pipeline/schedules.py \
    --config.work.factors='(1.0, 1.0, 1.0, 1.5)'    # the last stage is slower
  python -m launch.simulate --config=configs/pipeline/schedules.py \
    --config.pipeline.schedule=zb_h1 --export=zb_h1.perfetto-trace

Nothing is trained; it takes a second. Expected result: with 4 stages and 8
microbatches, 1F1B takes 352 ms and ZB-H1 286 ms, with equal peak activations.
If all stages synchronise at each tick (lockstep), 1F1B takes 428 ms and GPipe
357 ms, since in 1F1B nearly every tick has a whole backward on some stage.
With split backwards, ticks have equal lengths: ZB-H1 takes 304 ms.
"""

import ml_collections

from caatnet.schema.tree import defaults
from caatnet.studies.pipeline.keys import Pipeline


def get_config(size: str = "small") -> ml_collections.ConfigDict:
  """Returns the study: "small" (4 stages, 8 microbatches) or "test" (2, 4)."""
  sizes = {"small": (4, 8), "test": (2, 4)}
  if size not in sizes:
    raise ValueError(
      f"configs/pipeline/schedules.py:{size}: the sizes are "
      f"{', '.join(sizes)}"
    )
  config = defaults(Pipeline)
  config.pipeline.stages, config.pipeline.microbatches = sizes[size]
  return config
