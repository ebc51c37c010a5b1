"""Inference steps compiled ahead of time for TPUs: `make test-tpu`."""

import pytest

pytest.importorskip("libtpu", reason="the tpu extra is not installed")

from caatnet.config import inference
from caatnet.config.override import override
from caatnet.inspection import decoding
from configs.caatnet import tiny
from parallel.ledger import targets

SIZES = (
  "model.width=1024 model.num_heads=8 model.num_kv_heads=8 model.num_layers=2 "
  "model.ffn_width=512 model.dtype=bfloat16 sync.p=0.5 inference.batch=8 "
  "inference.context=4096 inference.page_size=128 inference.chunk=256"
)


def step(phase, target, overrides=""):
  config = override(tiny.get_config(), f"{SIZES} {overrides}")
  built = inference.build(config, {"tensor": 8}, list(target.devices))
  return decoding.step_of(phase, built)


@pytest.mark.parametrize(
  ("phase", "name"), [("decode", "tpu:v5p:2x2x2"), ("prefill", "tpu:v6e:2x4")]
)
def test_kernel_reads_pages_and_the_cache_is_updated_in_place(phase, name):
  target = targets.resolve(name)
  found = step(phase, target)
  result = decoding.analyse(found, target)
  assert not result["inference"]["gathers_pages"]
  assert result["memory"]["cache"] == found.cache_shape.size_bytes
  assert result["memory"]["temporaries"] < result["memory"]["cache"]
  rows = {(r["kind"], r["dtype"]): r for r in result["inference"]["formula"]}
  projections = rows["all_reduce", "bfloat16"]
  assert projections["formula"] == projections["lowered"]
  # XLA:TPU takes the argmax before widening: 2 bytes per sequence.
  assert 0 <= projections["compiled"] - projections["formula"] <= 2 * 8
  bounds, (least, greatest) = result["roofline"], result["with_latency"]
  assert bounds["compute_seconds"] >= bounds["formula_seconds"]
  assert (
    bounds["step_if_none_overlaps"] < least["step_if_none_overlaps"]
    < greatest["step_if_none_overlaps"]
  )


@pytest.mark.parametrize("name", ["tpu:v5p:2x2x2", "tpu:v6e:2x4"])
def test_reductions_of_a_nano_batch_overlap_products_of_another(name):
  """In all layers; nothing is left to multiply during the embedding's."""
  target = targets.resolve(name)
  found = step(
    "decode", target,
    "sync.p=1.0 inference.batch=256 inference.nanobatches=2",
  )
  (row,) = decoding.analyse(found, target)["nanobatches"]
  # Two layers with two reductions each, and the embedding.
  assert row["count"] == 2 * (2 * 2 + 1)
  assert row["asynchronous"] == row["bytes"]
  assert row["overlapped"] == row["bytes"] * 4 / 5


@pytest.mark.parametrize("phase", decoding.PHASES)
def test_a_step_copies_no_weights(phase):
  """The weights of an expert, which are arguments, stay in their slot."""
  target = targets.resolve("tpu:v5p:2x2x1")
  config = override(
    tiny.get_config(), f"{SIZES} parallel.tensor=4 sync.p=1.0 "
    "model.ffn_width=8192 inference.context=256 inference.chunk=128",
  )
  built = inference.build(config, {"tensor": 4}, list(target.devices))
  found = decoding.analyse(decoding.step_of(phase, built), target)["memory"]
  # The largest matrix of a layer has 28% of the bytes.
  assert found["temporaries"] < 0.2 * found["parameters"]
