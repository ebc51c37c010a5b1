"""Inference steps compiled ahead of time for GPUs: `make test-gpu`."""

import pytest

pytest.importorskip(
  "jax_cuda12_plugin", reason="the cuda extra is not installed"
)

from caatnet.config import inference
from caatnet.config.override import override
from caatnet.inspection import decoding
from configs.caatnet import tiny
from parallel.ledger import targets

SIZES = (
  "model.width=1024 model.num_heads=8 model.num_kv_heads=8 model.num_layers=2 "
  "model.ffn_width=512 model.dtype=bfloat16 sync.p=0.5 inference.batch=8 "
  "inference.context=4096 inference.chunk=256"
)


@pytest.mark.parametrize("phase", decoding.PHASES)
@pytest.mark.parametrize("gpu", ["a100", "a100-pcie", "h200"])
def test_kernel_reads_pages_and_the_cache_is_updated_in_place(gpu, phase):
  target = targets.resolve(f"gpu:{gpu}:1x8")
  config = override(tiny.get_config(), SIZES)
  built = inference.build(config, None, list(target.devices))
  result = decoding.analyse(decoding.step_of(phase, built), target)
  assert not result["inference"]["gathers_pages"]
  assert result["memory"]["cache"] == built.cache_shape.size_bytes
  assert result["memory"]["temporaries"] < result["memory"]["cache"]
  for row in result["inference"]["formula"]:
    assert row["formula"] == row["lowered"] == row["compiled"] > 0
  bounds, (least, greatest) = result["roofline"], result["with_latency"]
  assert bounds["compute_seconds"] >= bounds["formula_seconds"]
  assert (
    bounds["step_if_none_overlaps"] < least["step_if_none_overlaps"]
    <= greatest["step_if_none_overlaps"]
  )


@pytest.mark.parametrize("gpu", ["a100", "h200"])
def test_reductions_of_a_nano_batch_overlap_products_of_another(gpu):
  """In all layers; nothing is left to multiply during the embedding's."""
  target = targets.resolve(f"gpu:{gpu}:1x8")
  config = override(
    tiny.get_config(), f"{SIZES} sync.p=1.0 inference.nanobatches=2"
  )
  built = inference.build(config, None, list(target.devices))
  found = decoding.analyse(decoding.step_of("decode", built), target)
  (row,) = found["nanobatches"]
  # Two layers with two reductions each, and the embedding.
  assert row["count"] == 2 * (2 * 2 + 1)
  assert row["asynchronous"] == row["bytes"]
  assert row["overlapped"] == row["bytes"] * 4 / 5


def test_layer_weights_are_not_copied_out_of_their_stack():
  """Bounds the bytes accessed by a step that is dominated by weights."""
  target = targets.resolve("gpu:h200:1x1")
  config = override(
    tiny.get_config(),
    f"{SIZES} parallel.tensor=1 model.ffn_width=8192 inference.context=64 "
    "inference.chunk=64",
  )
  built = inference.build(config, None, list(target.devices))
  result = decoding.analyse(decoding.step_of("decode", built), target)
  bounds = result["roofline"]
  assert bounds["compute_seconds"] < 1.3 * bounds["formula_seconds"]


@pytest.mark.parametrize("phase", decoding.PHASES)
def test_a_step_copies_no_weights(phase):
  """The weights of an expert, which are arguments, stay in their slot."""
  target = targets.resolve("gpu:h200:1x1")
  config = override(
    tiny.get_config(), f"{SIZES} parallel.tensor=1 sync.p=1.0 "
    "model.ffn_width=8192 inference.context=256 inference.chunk=128",
  )
  built = inference.build(config, None, list(target.devices))
  found = decoding.analyse(decoding.step_of(phase, built), target)["memory"]
  # The largest matrix of a layer has 28% of the bytes.
  assert found["temporaries"] < 0.2 * found["parameters"]
