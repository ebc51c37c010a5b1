r"""Bounds prefill and decode of 7B and 70B, and what synchronising less saves.

  python -m launch.simulate --config=configs/inference/decode.py
  python -m launch.simulate --config=configs/inference/decode.py \
    --config.batch='(16,)' --config.context=8192 --plot=decode.png
  python -m launch.simulate --config=configs/inference/decode.py \
    --config.machines="('gpu:h100:1x4', 'tpu:v5p:4x4x4')" --json

Nothing is compiled; it takes seconds. Collectives are told by their bytes
alone and with latency. Between H100s this was measured, and is taken for H200s,
which have the same links. Between A100s and TPUs it is an assumption, which the
last table names. Expected result: to decode 32 sequences with the 70B on eight
H200s takes 9.1 to 11.1 ms with latency and 4.5 without; p = 0.5 saves 4 to 19%
with latency and 4% without, every second layer 27 to 31% and 4%.
"""

import ml_collections

from caatnet.config.schema.tree import defaults


def get_config() -> ml_collections.ConfigDict:
  """Returns the study, for eight devices of five kinds."""
  config = defaults("study", "inference")
  return config
