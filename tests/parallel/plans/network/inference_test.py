"""Bounds of prefill and decode: published sizes and general properties."""

import itertools

import pytest

from parallel.plans.hardware.collective_times import Sample, Span
from parallel.plans.hardware.devices import DEVICES
from parallel.plans.network import inference
from parallel.plans.network.inference import Machine, ModelStep
from parallel.plans.workload import Transformer

LLAMA_7B = Transformer(32_000, 4096, 32, 32, 32, 11008)
LLAMA_70B = Transformer(32_000, 8192, 80, 64, 8, 28672)
MODELS = {"7b": LLAMA_7B, "70b": LLAMA_70B}
MACHINES = (
  "gpu:h200:1x8", "gpu:a100:1x8", "gpu:a100-pcie:1x8", "tpu:v5p:2x2x2",
  "tpu:v6e:2x4",
)
each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
each_machine = pytest.mark.parametrize("name", MACHINES)


def everywhere(model, p):
  return [p] * (2 * model.num_layers)


@pytest.mark.parametrize(
  ("model", "parameters"),
  [(LLAMA_7B, 6_738_415_616), (LLAMA_70B, 68_976_648_192)],
  ids=["7b", "70b"],
)
@pytest.mark.parametrize("ranks", [1, 8])
def test_weights_equal_the_published_parameters(model, parameters, ranks):
  gains = (2 * model.num_layers + 1) * model.width
  found = inference.memory_bytes(model, ModelStep(1, 1, 1), ranks)
  assert ranks * found["weights"] / 2 + gains == parameters


@each_model
def test_prompt_flops_equal_decoding_its_tokens(model):
  """Decodes the tokens one by one; only the last one needs logits."""
  whole, *parts = (
    {o.name: o.count * o.flops for o in inference.operations(model, step, 8)}
    for step in (
      ModelStep(3, 5, 9), *(ModelStep(3, 1, n) for n in range(5, 10))
    )
  )
  for name, flops in whole.items():
    total = sum(part[name] for part in parts)
    assert flops == (parts[0][name] if name == "head" else total)


def test_cache_has_two_numbers_per_head_channel_and_position():
  for model, ranks, heads in ((LLAMA_7B, 8, 4), (LLAMA_70B, 8, 1),
                              (LLAMA_70B, 16, 1), (LLAMA_70B, 3, 3)):
    found = inference.memory_bytes(model, ModelStep(7, 1, 100), ranks)
    # With more ranks than heads, heads are replicated: no rank has fewer.
    assert found["cache"] == 7 * 100 * 2 * model.num_layers * heads * 128 * 2


@pytest.mark.parametrize(
  ("model", "ranks", "heads", "kv_heads", "ffn", "vocab"),
  [
    (LLAMA_7B, 1, 32, 32, 11008, 32_000),
    (LLAMA_7B, 5, 7, 7, 2202, 6400),
    # Two of three ranks have 3 of 8 key/value heads, each with 8 query heads.
    (LLAMA_70B, 3, 24, 3, 9558, 10_667),
    (LLAMA_70B, 8, 8, 1, 3584, 4000),
    # More ranks than key/value heads: two ranks share one.
    (LLAMA_70B, 16, 4, 1, 1792, 2000),
    # Eight of twelve ranks have a key/value head, the others padding.
    (LLAMA_70B, 12, 8, 1, 2390, 2667),
  ],
)
def test_slowest_rank_has_sizes_that_are_rounded_up(
  model, ranks, heads, kv_heads, ffn, vocab
):
  step, width, layers = ModelStep(3, 5, 9), model.width, model.num_layers
  weights = {
    "qkv": width * (heads + 2 * kv_heads) * 128, "out": heads * 128 * width,
    "gate and up": 2 * width * ffn, "down": ffn * width, "head": width * vocab,
  }
  found = {o.name: o for o in inference.operations(model, step, ranks)}
  for name, size in weights.items():
    rows = 3 if name == "head" else 3 * 5
    assert found.pop(name) == (
      name, 1 if name == "head" else layers, 2 * rows * size, 2 * size
    )
  # Of 9 positions, the 5 new ones attend to 5 to 9.
  assert found.pop("attention") == (
    "attention", layers, 4 * 3 * (5 + 6 + 7 + 8 + 9) * heads * 128,
    3 * 9 * 2 * kv_heads * 128 * 2,
  )
  assert not found
  memory = inference.memory_bytes(model, step, ranks)
  assert memory["weights"] == 2 * (
    vocab * width + width * vocab
    + layers * sum(size for name, size in weights.items() if name != "head")
  )


@each_model
def test_sent_bytes_are_proportional_to_p(model):
  step = ModelStep(6, 1, 100)
  embedding = 6 * model.width * 2
  for p in (1, 0.75, 0.5, 0.25):
    sent = inference.all_reduce_bytes(model, step, everywhere(model, p))
    assert len(sent) == 1 + 2 * model.num_layers
    assert sum(sent) - embedding == p * 2 * model.num_layers * embedding
  assert inference.all_reduce_bytes(
    model, step, everywhere(model, 0)
  ) == [embedding]


@each_machine
@each_model
def test_latency_only_adds_and_sending_less_is_never_slower(model, name):
  machine = inference.machine(name)
  for step in (
    ModelStep(1, 1, 2048), ModelStep(64, 1, 2048), ModelStep(1, 1024, 1024)
  ):
    found = [
      inference.step_time_bounds(model, step, machine, everywhere(model, p))
      for p in (0.25, 0.5, 0.75, 1.0)
    ]
    for less, more in itertools.pairwise(found):
      for a, b in zip(less.with_latency, more.with_latency, strict=True):
        assert a <= b * (1 + 1e-12)
    for b in found:
      assert b.compute == found[0].compute
      assert b.wire < b.collectives.least <= b.collectives.greatest
      assert b.without_latency == b.compute + b.wire < b.with_latency.least
      assert b.with_latency == tuple(b.compute + s for s in b.collectives)
      assert b.overlapped == tuple(max(b.compute, s) for s in b.collectives)
      assert b.num_collectives == 1 + 2 * model.num_layers
    for b, p in zip(found, (0.25, 0.5, 0.75, 1.0), strict=True):
      sent = inference.all_reduce_bytes(model, step, everywhere(model, p))
      assert b.sent_bytes == sum(sent)
      for total, times in zip(
        b.collectives, zip(*map(machine.all_reduce, sent), strict=True),
        strict=True,
      ):
        assert total == pytest.approx(sum(times))


@each_machine
def test_step_is_bounded_by_the_device(name):
  """One sequence reads all weights; many tokens multiply by all of them."""
  machine = inference.machine(name)
  device, model = machine.device, LLAMA_7B
  shares = everywhere(model, 1)
  memory = inference.memory_bytes(model, ModelStep(1, 1, 64), 8)
  table = model.vocab_size * model.width * 2 / 8  # one row of it is read
  one = inference.step_time_bounds(model, ModelStep(1, 1, 64), machine, shares)
  assert one.compute == pytest.approx(
    (sum(memory.values()) - table) / device.memory_bandwidth
  )
  step = ModelStep(1, 4096, 4096)
  flops = sum(o.count * o.flops for o in inference.operations(model, step, 8))
  many = inference.step_time_bounds(model, step, machine, shares)
  assert many.compute == pytest.approx(flops / device.peak("bfloat16"), 0.02)


def test_machines_are_parsed_from_their_names():
  machine = inference.machine("gpu:a100-pcie:1x8")
  assert machine.device is DEVICES["a100-pcie"]
  assert inference.machine("gpu:h200:1x2").num_ranks == 2
  assert machine.wire_seconds(8e9) == pytest.approx(14e9 / 31.5e9, 1e-2)
  # A torus in all three dims: two links along each.
  assert inference.machine("tpu:v5p:4x4x4").rate == 6 * 1200e9 / 2 / 6


def test_all_reduce_takes_at_least_the_time_of_its_bytes():
  """Measurements of a machine with faster links may be shorter."""
  measured = Sample((1, 10**6), (Span(1e-9, 1e-3),) * 2, "")
  machine = Machine("slow", DEVICES["h200"], 4, 1e9, measured)
  wire_s = 2 * 3 / 4 * 1000 / 1e9
  assert machine.wire_seconds(1000) == pytest.approx(wire_s)
  assert machine.all_reduce(1000) == pytest.approx((wire_s, 1e-3))


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: inference.machine("gpu:h300:1x8"), "did you mean h"),
    (lambda: inference.machine("gpu:h200:2x8"), "as in gpu:h200:1x8"),
    (lambda: inference.machine("gpu:h200:1x9"), "from 2 to 8, the GPUs"),
    (lambda: inference.machine("gpu:h200:1x1"), "from 2 to 8, the GPUs"),
    (lambda: inference.machine("gpu:b200:1x8"), "were not measured"),
    (lambda: inference.machine("gpu:h200:1x08"), "must be gpu:NAME:1xGPUS"),
    (lambda: inference.machine("tpu:v5p:3x5x3"), "this slice does not exist"),
    (lambda: inference.machine("tpu:v9:2x2"), "generation 'v9'"),
    (lambda: inference.step_time_bounds(
      LLAMA_7B, ModelStep(1, 9, 8), inference.machine("gpu:h200:1x8"),
      everywhere(LLAMA_7B, 1)), "context=8 must be at least 9"),
    (lambda: inference.step_time_bounds(
      LLAMA_7B, ModelStep(0, 1, 8), inference.machine("gpu:h200:1x8"),
      everywhere(LLAMA_7B, 1)), "sequences=0"),
    (lambda: inference.all_reduce_bytes(LLAMA_7B, ModelStep(1, 1, 1), [1.0]),
     "one for each of the 64 row-parallel projections in 32 layers"),
    (lambda: inference.all_reduce_bytes(
      LLAMA_7B, ModelStep(1, 1, 1), everywhere(LLAMA_7B, 1.5)), "p=1.5"),
  ],
)
def test_invalid_machines_and_sizes_are_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call()


@pytest.mark.parametrize("tokens", [1, 2, 7, 100])
@pytest.mark.parametrize("context", [100, 101, 2**31 - 1])
def test_a_new_token_attends_to_all_before_it(tokens, context):
  """Also a prompt whose pairs of positions would take years to enumerate."""
  def pairs(tokens, context):
    by = {o.name: o for o in inference.operations(
      LLAMA_7B, ModelStep(3, tokens, context), 8
    )}
    return by["attention"].flops // (3 * 4 * 4 * 128)  # 4 heads of 128

  assert pairs(tokens, context) == sum(range(context - tokens + 1, context + 1))
  assert pairs(2**60, 2**60) == 2**59 * (2**60 + 1)
