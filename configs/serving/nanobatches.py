r"""Decode step times with nano-batches, parts of a step that overlap.

  python -m launch.simulate --config=configs/serving/nanobatches.py \
    --plot=nanobatches.png
  python -m launch.simulate --config=configs/serving/nanobatches.py:figures
  python -m launch.simulate --config=configs/serving/nanobatches.py \
    --config.interference="(0.1,)" --config.max_pieces=2

The study predicts decode steps of Llama 2 70B on tensor ranks. The planner of
`parallel/plans/nanobatches/nanobatch.py` chooses number and sizes of the
nano-batches, whose order is fixed; if splitting does not help, it returns one.
Times of A100 and H100 are profiles of Vidur, times of other devices come from
rooflines. Published results of NanoFlow (arXiv 2408.12757) are predicted with
its published pipelines.

Not compared: kernels that overlap a product with its own all-reduce, as in Flux
(arXiv 2406.06858), and an all-reduce that is fused with the norm and runs
during the other half of the tokens, as in TokenWeave (arXiv 2505.11329).

Sizes: `all` takes seconds, `figures` has only the results of NanoFlow, `test`
has a few points of each curve.
"""

import ml_collections

from caatnet.schema.tree import defaults
from caatnet.studies.serving.nanobatches_keys import NanoBatches

_SIZES = ("all", "figures", "test")


def get_config(size: str = "all") -> ml_collections.ConfigDict:
  """Returns the study: `all`, `figures` without curves, or `test`."""
  if size not in _SIZES:
    raise ValueError(
      f"nanobatches.py:{size}: the sizes are {', '.join(_SIZES)}"
    )
  config = defaults(NanoBatches)
  if size == "test":
    config.machines = ("gpu:h100:1x8", "tpu:v5p:2x2x2")
    config.tokens, config.interference = (64, 512, 1024), (0.0, 0.5)
    config.joint_machines = ("gpu:a100-pcie:1x8",)
    config.joint_tokens, config.p, config.bits = (256,), (1.0, 0.25), (16, 8)
  if size == "figures":
    config.machines, config.joint_machines = (), ()
  return config
