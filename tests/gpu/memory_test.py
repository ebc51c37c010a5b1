"""`config.memory` compiled ahead of time for GPUs: `make test-gpu`."""

import pytest

pytest.importorskip(
  "jax_cuda12_plugin", reason="the cuda extra is not installed"
)

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.inspection import study
from configs.caatnet import tiny
from parallel.ledger import targets

LAYERS, TOKENS, WIDTH = 4, 8192, 1024


def analyse(where):
  target = targets.resolve("gpu:h200:1x1")
  config = override(
    tiny.get_config("demo"),
    f"model.width={WIDTH} model.num_heads=8 model.num_kv_heads=8 "
    f"model.ffn_width=2816 model.num_layers={LAYERS} model.dtype=bfloat16 "
    f"model.vocab_size=1024 data.seq_len={TOKENS} data.batch_size=1 "
    "parallel.tensor=1 model.remat=full "
    f"memory.moments={where} memory.activations={where}",
  )
  experiment = experiments.build(config, None, list(target.devices))
  return study.analyse(experiment, target)["memory"]


def test_activations_are_temporaries_in_host_memory():
  """Ahead of time, moments count as device memory: see `ledger.memory`."""
  before, after = analyse("device"), analyse("pinned_host")
  activations = LAYERS * TOKENS * WIDTH * 2
  assert after["temporaries on the host"] == activations
  for bytes_of in ("total", "peak"):
    assert before[bytes_of] - after[bytes_of] >= activations
