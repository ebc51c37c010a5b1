"""Sizes of a server's caches, which follow from config and free memory."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import pytest

from caatnet.config import inference, serving
from caatnet.config.override import override
from configs.caatnet import tiny
from configs.recurrent import tiny as recurrent
from parallel.axes import Axis
from parallel.base import available
from parallel.memory.offload import ON_DEVICE

SMALL = (
  "parallel.tensor=2 model.width=8 model.num_heads=2 model.num_layers=1 "
  "model.num_kv_heads=2 model.ffn_width=8 model.vocab_size=16 data.seq_len=4 "
  "inference.batch=4 inference.context=60 inference.page_size=8 "
  "inference.chunk=4 "
)


def build(overrides="", mesh=None):
  config = inference.with_inference(tiny.get_config("test"))
  return inference.build(override(config, SMALL + overrides), mesh)


@functools.cache
def decoder():
  made = build(mesh={"tensor": 1})
  return made.decoder(jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype), made.program.stored_shapes
  ))


# Of one position of a rank: a key and a value of 4 channels in float32.
PAGE_BYTES = 8 * 2 * 4 * 4


def set_free_memory(monkeypatch, size):
  """Sets the available memory that the system reports."""
  monkeypatch.setattr(available, "available_bytes", lambda: size)


def test_cache_of_a_batch_has_pages_for_its_contexts():
  made = build()
  assert made.capacity.pages_per_sequence == 8
  assert (made.cache_shape.num_pages, made.cache_shape.page_size) == (32, 8)
  assert build("inference.pages=9").cache_shape.num_pages == 9
  assert made.cache_shape.dtype == made.program.model.config.dtype
  assert build("inference.cache=int8").cache_shape.dtype == "int8"
  assert build("inference.pages=268435455")  # of 8 positions
  with pytest.raises(ValueError, match="pages=268435456 with page_size=8 must"):
    build("inference.pages=268435456")


@pytest.mark.parametrize("devices", [1, 2])
def test_memory_for_the_weights_is_that_of_all_cpu_devices(devices):
  program = build(mesh={"tensor": devices}).program
  params = jax.tree.map(
    lambda x, s: jax.device_put(jnp.zeros(x.shape, x.dtype), s),
    program.stored_shapes,
    program.layout.shardings(program.unpartitioned_specs),
  )
  assert serving._param_bytes(program) == sum(
    shard.data.nbytes for x in jax.tree.leaves(params)
    for shard in x.addressable_shards
  )


@pytest.mark.parametrize(("devices", "lanes"), [(1, 2), (2, 1)])
@pytest.mark.parametrize(("free", "pages"), [
  # Half of the free memory, at least one sequence, and no more than a batch.
  (0, 8), (2 * 8, 8), (2 * 20, 20), (2 * 20.9, 20), (2 * 32, 32), (999, 32),
])
def test_cache_has_half_of_the_free_memory(
  monkeypatch, devices, lanes, free, pages
):
  made = build(mesh={"tensor": devices})
  assert made.program.layout.tensor.lanes == lanes
  set_free_memory(monkeypatch, int(free * PAGE_BYTES * lanes))
  found = serving.fit_cache(made)
  assert found == dataclasses.replace(
    made, cache_shape=dataclasses.replace(made.cache_shape, num_pages=pages)
  )
  # Memory that is reserved for weights is not free.
  other = serving.fit_cache(made, 3 * PAGE_BYTES * lanes)
  set_free_memory(monkeypatch, int((free + 3) * PAGE_BYTES * lanes))
  assert serving.fit_cache(made, 3 * PAGE_BYTES * lanes) == found
  assert other.cache_shape.num_pages == max(8, min(32, int((free - 3) / 2)))
  # A number that the config sets is kept.
  chosen = build("inference.pages=9", {"tensor": devices})
  assert serving.fit_cache(chosen) == chosen


def test_free_memory_is_that_of_the_device(monkeypatch):
  set_free_memory(monkeypatch, 640)
  stats = {"bytes_limit": 100, "bytes_in_use": 30}
  for platform, reported, free in (
    ("gpu", stats, 70), ("gpu", {}, 640), ("gpu", None, 640),
    ("cpu", stats, 640),
  ):
    device = types.SimpleNamespace(
      platform=platform, memory_stats=lambda reported=reported: reported
    )
    assert serving.free_bytes(device) == free


@pytest.mark.parametrize(("overrides", "free", "host_pages"), [
  ("", 999, 32), ("", 4 * 2 * 5, 5), ("serving.host_pages=7", 999, 7),
  ("serving.preempt=swap serving.keep_turns=False", 999, 32),
  ("serving.preempt=recompute", 999, 32),
  # Nothing copies pages to the host.
  ("serving.preempt=recompute serving.keep_turns=False", 999, 0),
])
def test_host_cache_has_a_quarter_of_the_free_memory(
  monkeypatch, overrides, free, host_pages
):
  """A page of the host has those of both ranks."""
  model = decoder()
  assert serving.page_bytes(model) == 2 * PAGE_BYTES
  set_free_memory(monkeypatch, free * PAGE_BYTES)
  chosen, rest = serving.split_overrides(f"{overrides} serving.growth=3 x.y=1")
  assert rest == "x.y=1"
  engine = serving.engine(model, chosen)
  engine.executor.close()
  assert serving.describe(model, engine) == {
    "slots": 4, "context": 60, "pages": 32, "page_size": 8, "states": 0,
    "cache_gb": 32 * 2 * PAGE_BYTES / 1e9, "host_pages": host_pages,
    "host_gb": host_pages * 2 * PAGE_BYTES / 1e9,
  }
  limits = engine.scheduler.limits
  assert (limits.slots, limits.tokens) == (4, 4 + 4)
  assert (limits.growth, limits.preempt) == (3, chosen.preempt)
  assert (limits.wait_s, limits.keep_turns) == (0.002, chosen.keep_turns)


def test_states_of_a_recurrent_model_are_part_of_its_cache(monkeypatch):
  """State slots for 4 sequences: the convolution and 16 channels per rank."""
  config = override(
    inference.with_inference(recurrent.get_config("test")),
    "parallel.tensor=2 data.seq_len=4 model.vocab_size=16 model.num_heads=2 "
    "model.num_layers=1 inference.batch=4 inference.context=60",
  )
  made = inference.build(config, {"tensor": 1})
  model = made.decoder(jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype), made.program.stored_shapes
  ))
  chosen, _ = serving.split_overrides("serving.host_pages=7")
  engine = serving.engine(model, chosen)
  engine.executor.close()
  taps = config.model.conv_width - 1
  state = 2 * 16 * (taps + 1) * 4
  found = serving.describe(model, engine)
  assert (found["pages"], found["states"]) == (0, 4)
  assert found["cache_gb"] == pytest.approx(4 * state / 1e9)
  assert found["host_gb"] == pytest.approx(7 * state / 1e9)
  assert "has no effect: RecurrentModel has one state" in (
    serving.reuse_notice(model, chosen)
  )


def described(tree):
  return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def test_weights_have_separate_layers_and_codes_if_asked():
  """On CPUs and GPUs; matrices are coded, gains and embeddings are not."""
  made, coded = build(), build("inference.weights=int8")
  params = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype), made.program.stored_shapes
  )
  weights = made.weights(params)
  assert described(weights.params) == described(made.abstract_weights().params)
  for found, dtypes in (
    (made, {"float32"}), (coded, {"float32", "uint8"}),
  ):
    params = found.abstract_weights().params
    assert len(params["blocks"]) == 1  # layers
    assert isinstance(params["blocks"], tuple)
    assert {str(dtype) for _, dtype in described(params)} == dtypes
  scorer = made.scorer_of(weights)
  assert (scorer.context, scorer.vocab_size) == (60, 16)
  assert scorer._num_rows == 4


def test_reuse_has_an_effect_on_caches_of_pages():
  model = decoder()
  assert not serving.reuse_notice(model, serving.split_overrides("")[0])


@pytest.mark.parametrize(("overrides", "weights"), [
  ("", "float"), ("inference.weights=int8", "int8"),
])
def test_model_for_inference_has_neutral_training_keys(overrides, weights):
  made = build(
    f"parallel.worker=3 parallel.data=2 data.batch_size=6 model.remat=full "
    f"model.dtype=bfloat16 sync.carry=on sync.route=ring_kernel {overrides}",
    {"data": 2},
  )
  layout, config = made.program.layout, made.program.model.config
  assert (layout.worker.size, layout.num_data_ranks) == (1, 2)
  assert layout.data == (Axis("data", 2, 2),)
  assert layout.shards is layout.stages is None
  assert not layout.prefetch
  assert (layout.moments, layout.activations) == ("device", ON_DEVICE)
  assert (config.remat, config.carry, config.dtype) == (
    "none", False, "bfloat16"
  )
  assert made.coded == (weights == "int8")
  assert made.layers_apart
  assert made.capacity == build().capacity
  narrow = build("inference.dtype=bfloat16")
  assert narrow.program.model.config.dtype == "bfloat16"
  assert build().program.model.config.dtype == "float32"
