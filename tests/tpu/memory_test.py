"""`config.memory` compiled ahead of time for TPUs: `make test-tpu`."""

import pytest

pytest.importorskip("libtpu", reason="the tpu extra is not installed")

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.inspection import study
from configs.caatnet import tiny
from parallel.ledger import targets

# In small programs XLA's other temporaries change by more than the activations.
LAYERS, TOKENS, WIDTH = 4, 8192, 1024
# One sequence per device.
SIZES = (
  f"model.width={WIDTH} model.num_heads=8 model.num_kv_heads=8 "
  f"model.ffn_width=2816 model.num_layers={LAYERS} model.dtype=bfloat16 "
  f"model.vocab_size=1024 data.seq_len={TOKENS} data.batch_size=4 "
  "parallel.tensor=1 parallel.data=4"
)


def analyse(overrides):
  target = targets.resolve("tpu:v5p:2x2x1")
  config = override(tiny.get_config("demo"), f"{SIZES} {overrides}")
  experiment = experiments.build(config, None, list(target.devices))
  return study.analyse(experiment, target)


def crossing(result, to_host):
  """Returns the bytes that a step copies in one direction."""
  return sum(
    row["count"] * row["bytes"] for row in result["host_copies"]
    if row["to_host"] == to_host
  )


def test_activations_are_temporaries_in_host_memory():
  keys = "model.remat=full"
  before = analyse(keys)["memory"]
  result = analyse(f"{keys} memory.activations=pinned_host")
  memory = result["memory"]
  # Layer inputs in bfloat16.
  host = LAYERS * TOKENS * WIDTH * 2
  assert memory["temporaries on the host"] == host
  assert not {"temporaries on the host", "of these on the host"} & set(before)
  assert before["temporaries"] - memory["temporaries"] >= host
  assert before["peak"] - memory["peak"] >= host
  assert memory["peak"] <= memory["total"]
  assert crossing(result, True) == crossing(result, False) == host


def test_device_memory_falls_by_the_moments_but_those_of_a_layer():
  large = "model.num_layers=8 model.vocab_size=8192 data.seq_len=2048"
  before, after = (
    analyse(f"model.remat=full memory.moments={kind} {large}")["memory"]
    for kind in ("device", "pinned_host")
  )
  moments = 2 * after["parameters"]
  # Moments of a layer that arrive and leave, and copies in other layouts.
  layer = 2 * 4 * (4 * WIDTH**2 + 3 * 2816 * WIDTH)
  assert after["of these on the host"] >= moments
  for bytes_of in ("total", "peak"):
    assert before[bytes_of] - after[bytes_of] >= moments - 3 * layer


def test_moments_are_arguments_in_host_memory():
  result = analyse(
    "model.remat=reduced zero.scheme=zero3 memory.moments=pinned_host "
    "memory.activations=pinned_host"
  )
  memory = result["memory"]
  # Layer inputs and attention's sums.
  host = 2 * LAYERS * TOKENS * WIDTH * 2
  assert memory["temporaries on the host"] == host
  # Two moments of each parameter; layouts pad them by less than 10 kB.
  moments = 2 * memory["parameters"]
  assert 0 <= memory["of these on the host"] - moments < 1e4
  assert 0 < memory["optimizer state"] - moments < 100  # step counts
  assert crossing(result, True) == crossing(result, False) == moments + host
