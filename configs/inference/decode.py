r"""Bounds of prefill and decode times of 7B and 70B, with partial sync.

  python -m launch.simulate --config=configs/inference/decode.py
  python -m launch.simulate --config=configs/inference/decode.py \
    --config.batch='(16,)' --config.context=8192 --plot=decode.png
  python -m launch.simulate --config=configs/inference/decode.py \
    --config.machines="('gpu:h100:1x4', 'tpu:v5p:4x4x4')" --json

Nothing is compiled; it takes seconds. Times of collectives are predicted with
and without latency. The latency was measured between H100s and is also used for
H200s, which have the same links. For A100s and TPUs it is an assumption, which
is in the last table. Expected result: a decode step of 32 sequences with the
70B model on eight H200s takes 9.1 to 11.1 ms with latency and 4.5 ms without.
Partial synchronisation with p = 0.5 saves 4 to 19% with latency and 4% without;
synchronising only every second layer saves 27 to 31% and 4%.
"""

import ml_collections

from caatnet.schema.tree import defaults
from caatnet.studies.inference.keys import Inference


def get_config() -> ml_collections.ConfigDict:
  """Returns the study, for eight devices of five kinds."""
  config = defaults(Inference)
  return config
