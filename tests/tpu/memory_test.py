"""`config.memory` compiled ahead of time for TPUs: `make test-tpu`."""

import functools

import pytest

pytest.importorskip("libtpu", reason="the tpu extra is not installed")

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.studies.compilation import study
from configs.caatnet import tiny
from parallel.xla import targets

LAYERS, TOKENS, WIDTH = 3, 512, 256
SIZES = (
  f"model.width={WIDTH} model.num_heads=2 model.num_kv_heads=2 "
  f"model.ffn_width=512 model.num_layers={LAYERS} model.dtype=bfloat16 "
  f"model.remat=full parallel.tensor=1 data.seq_len={TOKENS} "
)


@functools.cache
def analyse(overrides):
  target = targets.resolve("tpu:v5p:2x2x1")
  # One sequence per device.
  config = override(
    tiny.get_config("demo"),
    f"{SIZES} parallel.data=4 data.batch_size=4 {overrides}",
  )
  experiment = experiments.build(config, None, list(target.devices))
  return study.analyse(experiment, target)


def on_device(memory):
  """Returns the bytes of a device without the compiled code."""
  return memory["total"] - memory["program"]


@pytest.mark.parametrize("scheme", ["ddp", "zero3"])
def test_moments_are_arguments_in_host_memory(scheme):
  before = analyse(f"zero.scheme={scheme}")["memory"]
  memory = analyse(
    f"zero.scheme={scheme} memory.moments=pinned_host"
  )["memory"]
  # Two moments of each parameter; step counts stay on the device.
  moments = 2 * memory["parameters"]
  assert memory["of these on the host"] == moments
  assert memory["optimizer state"] - moments < 100
  assert sum(before.get(k, 0) for k in ("parameters", "optimizer state")) == (
    sum(memory.get(k, 0) for k in ("parameters", "optimizer state"))
  )


@pytest.mark.parametrize(("scheme", "remat", "num"), [
  ("ddp", "full", 1), ("zero3", "full", 1), ("ddp", "reduced", 2),
])
def test_activations_are_temporaries_in_host_memory(scheme, remat, num):
  keys = f"zero.scheme={scheme} model.remat={remat}"
  before = analyse(keys)["memory"]
  result = analyse(f"{keys} memory.activations=pinned_host")
  # Layer inputs, and with remat=reduced attention's sums, in bfloat16.
  host = num * LAYERS * TOKENS * WIDTH * 2
  assert result["memory"]["temporaries on the host"] == host
  assert "temporaries on the host" not in before
  assert on_device(before) - on_device(result["memory"]) >= host
  # Every layer's activations cross the link once in each direction.
  for to_host in (True, False):
    assert host == sum(
      row["count"] * row["bytes"] for row in result["host_copies"]
      if row["to_host"] == to_host
    )
