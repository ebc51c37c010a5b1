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


def get_config() -> ml_collections.ConfigDict:
  """Returns the study, for eight devices of five kinds."""
  config = ml_collections.ConfigDict()
  config.name = "decode"
  config.study = "inference"
  # Names of `caatnet.studies.inference.study.MODELS`.
  config.models = ("7b", "70b")
  # Devices of one node or slice, each of which is a tensor rank; as the targets
  # of launch.compile.
  config.machines = (
    "gpu:h200:1x8",
    "gpu:a100:1x8",
    "gpu:a100-pcie:1x8",
    "tpu:v5p:2x2x2",
    "tpu:v6e:2x4",
  )
  # The part of the channels that all row doors sum over ranks.
  config.p = (1.0, 0.75, 0.5, 0.25)
  # Or: both row doors of one layer in so many sum all channels, others none.
  config.every = (2,)
  # Sequences that decode at once, and the positions that each of them sees.
  config.batch = (1, 32, 256)
  config.context = 2048
  # Tokens of a prompt that is prefilled; 0 for none.
  config.prompt = 2048
  # By what the roofline's time is multiplied. Measured layers take 1.4 to 2.3
  # times as long (the table of layers); with that, less is saved.
  config.compute_factor = 1.0
  # A saving of a step that counts as a help.
  config.threshold = 0.05
  return config
