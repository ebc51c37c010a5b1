r"""Compares timetables of a pipeline: bubble, memory, bytes and time.

  python -m launch.simulate --config=configs/pipeline/timetables.py \
    --plot=timetables.png
  python -m launch.simulate --config=configs/pipeline/timetables.py \
    --config.link.bandwidth=ethernet_10g --config.link.latency_s=0.01
  python -m launch.simulate --config=configs/pipeline/timetables.py \
    --config.work.factors='(1.0, 1.0, 1.0, 1.5)'    # the last stage is slower
  python -m launch.simulate --config=configs/pipeline/timetables.py \
    --config.pipeline.timetable=zb_h1 --export=zb_h1.json   # a Chrome trace

Nothing is trained; it takes a second. Expected result: with 4 stages and 8
microbatches 1F1B takes 352 ms and ZB-H1 286 ms, with as many activations on the
fullest stage. Where all stages wait for each tick (lockstep), 1F1B takes 428 ms
and GPipe 357 ms: of 1F1B, nearly every tick has a whole backward on some stage.
Backwards in halves make ticks equal: ZB-H1 takes 304 ms.
"""

import ml_collections


def get_config(size: str = "small") -> ml_collections.ConfigDict:
  """Returns 4 stages and 8 microbatches, or for "test" 2 and 4."""
  sizes = {"small": (4, 8), "test": (2, 4)}
  if size not in sizes:
    raise ValueError(
      f"configs/pipeline/timetables.py:{size}: the sizes are "
      f"{', '.join(sizes)}"
    )
  config = ml_collections.ConfigDict()
  config.name = "timetables"
  config.study = "pipeline"
  # Names of builders in parallel/pipeline/builders.py.
  config.timetables = (
    "gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "looped", "zb_h1",
    "zb_h2",
  )
  config.pipeline = ml_collections.ConfigDict()
  config.pipeline.stages, config.pipeline.microbatches = sizes[size]
  # Parts of a stage, for timetables that take several.
  config.pipeline.chunks = 2
  # The timetable that --export writes as a Chrome trace.
  config.pipeline.timetable = "1f1b"
  # Seconds of a microbatch on a stage, all its chunks together: its forward,
  # the cotangents of inputs, and those of weights. By factors each stage takes
  # longer; () for equal stages.
  config.work = ml_collections.ConfigDict()
  config.work.forward_s = 0.01
  config.work.input_s = 0.01
  config.work.weight_s = 0.01
  config.work.factors = ()
  # Whether a backward, or each half of one, computes the forward again first.
  config.work.recompute = False
  # Links between stages: bytes per second and seconds, or a kind of link of
  # parallel/hardware/links.py ("infiniband_ndr"). Without overlap a stage
  # waits while it sends.
  config.link = ml_collections.ConfigDict()
  config.link.bandwidth = "infiniband_ndr"
  config.link.latency_s = "5e-6"
  config.link.overlap = True
  # Bytes of a microbatch: of the activations that go from part to part, and of
  # all that a stage stores of it, all its chunks together.
  config.boundary_bytes = 64 * 2**20
  config.activation_bytes = 2 * 2**30
  return config
