"""`config.memory` compiled ahead of time for TPUs: `make test-tpu`."""

import pytest

pytest.importorskip("libtpu", reason="the tpu extra is not installed")

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.studies.compilation import study
from configs.caatnet import tiny
from parallel.xla import targets

LAYERS, TOKENS, WIDTH = 3, 512, 256
# One sequence per device.
SIZES = (
  f"model.width={WIDTH} model.num_heads=2 model.num_kv_heads=2 "
  f"model.ffn_width=512 model.num_layers={LAYERS} model.dtype=bfloat16 "
  f"data.seq_len={TOKENS} data.batch_size=4 parallel.tensor=1 parallel.data=4"
)


def analyse(overrides):
  target = targets.resolve("tpu:v5p:2x2x1")
  config = override(tiny.get_config("demo"), f"{SIZES} {overrides}")
  experiment = experiments.build(config, None, list(target.devices))
  return study.analyse(experiment, target)


@pytest.mark.parametrize(("scheme", "remat", "names"), [
  ("ddp", "full", 1), ("zero3", "reduced", 2),
])
def test_host_bytes_are_those_of_moments_and_activations(scheme, remat, names):
  keys = f"zero.scheme={scheme} model.remat={remat} "
  before = analyse(keys)["memory"]
  result = analyse(
    f"{keys} memory.moments=pinned_host memory.activations=pinned_host"
  )
  memory = result["memory"]
  # Two moments of each parameter; step counts stay on the device.
  moments = 2 * memory["parameters"]
  assert memory["of these on the host"] == moments
  assert memory["optimizer state"] == before["optimizer state"]
  # Layer inputs, and with remat=reduced attention's sums, in bfloat16.
  activations = names * LAYERS * TOKENS * WIDTH * 2
  assert memory["temporaries on the host"] == activations
  assert "temporaries on the host" not in before
  assert before["total"] - memory["total"] >= activations
  # All of them cross the link once in each direction.
  for to_host in (True, False):
    assert moments + activations == sum(
      row["count"] * row["bytes"] for row in result["host_copies"]
      if row["to_host"] == to_host
    )
