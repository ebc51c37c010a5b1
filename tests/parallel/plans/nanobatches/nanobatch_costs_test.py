"""Properties of the costs of nano-batches."""

import dataclasses

import numpy as np
import pytest

from parallel.plans.hardware.devices import A100, DEVICES
from parallel.plans.nanobatches import nanobatch, nanobatch_costs
from parallel.plans.nanobatches.nanobatch import Reduction
from parallel.plans.nanobatches.nanobatch_costs import (
  LLAMA_2_70B,
  Profile,
  TokenMix,
)
from parallel.plans.network import inference
from parallel.plans.network.inference import ModelStep

H100 = inference.machine("gpu:h100:1x8")
HEADER = "gpu,num_ranks,tokens," + ",".join(
  (*nanobatch_costs.ATTENTION_OPERATIONS, *nanobatch_costs.MLP_OPERATIONS)
)


def costs(mix, machine=H100, **options):
  profile = nanobatch_costs.profile_of(machine, LLAMA_2_70B, mix.tokens, 0.7)
  return nanobatch_costs.layer_costs(
    nanobatch_costs.PROFILED_MODEL, LLAMA_2_70B, profile, machine, mix,
    **options
  )


def test_profiles_have_the_measured_rows():
  """Compares with rows of Vidur's file, in ms."""
  found = nanobatch_costs.profiles()
  assert set(found) == {(g, n) for g in ("a100", "h100") for n in (4, 8)}
  assert all(len(p.tokens) > 250 for p in found.values())
  row = found["a100", 4]
  assert row.times("up", 1024)[1024] == pytest.approx(1.1155e-3)
  assert row.times("down", 1024)[1008] == pytest.approx(0.561e-3)
  # input_layernorm and attn_rope; post_attention_layernorm, mlp_act and add.
  assert row.times("attention_rest", 512)[512] == pytest.approx(26e-6)
  assert row.times("mlp_rest", 512)[512] == pytest.approx(52e-6)
  # Between two measured numbers of tokens, of 0 tokens, and of too many.
  assert row.times("up", 1024)[1012] == pytest.approx(1.0935e-3)
  assert row.times("up", 1)[0] == 0
  with pytest.raises(ValueError, match="no times were measured for 5000"):
    row.times("up", 5000)


def test_measured_profiles_belong_to_their_machine_and_model():
  pcie = inference.machine("gpu:a100-pcie:1x8")
  measured = nanobatch_costs.profiles()["a100", 8]
  assert nanobatch_costs.profile_of(pcie, LLAMA_2_70B, 64) is measured
  for name in ("gpu:h200:1x8", "gpu:h100:1x2"):
    machine = inference.machine(name)
    found = nanobatch_costs.profile_of(machine, LLAMA_2_70B, 64)
    assert "roofline" in found.name
    assert len(found.tokens) == 64


@pytest.mark.parametrize(("rows", "message"), [
  (["h100,8,1,5,5,0,5,5,5"], "attention_rest of 1 tokens takes 0 s"),
  (["h100,8,1,5,5,,5,5,5"], "h100 with 1 tokens has no value of"),
  (["h100,8,2,5,5,5,5,5,5"], "the first row must be for 1 token"),
  (["h100,8,1,5,5,5,5,5,5", "h100,8,1,5,5,5,5,5,5"], "must ascend"),
  (["h100,8,1,5,5,5,nan,5,5"], "up of 1 tokens takes nan s"),
])
def test_holes_and_zeros_of_a_profile_are_one_line(tmp_path, rows, message):
  path = tmp_path / "profile.csv"
  path.write_text("\n".join(["# source", HEADER, *rows]) + "\n")
  with pytest.raises(ValueError, match=message) as error:
    nanobatch_costs.read(path)
  assert "\n" not in str(error.value)


def test_profile_without_an_operation_is_rejected():
  with pytest.raises(ValueError, match="times of 'mlp_rest' are missing"):
    Profile("p", np.array([1]), {
      part: np.array([1.0])
      for part in (*nanobatch_costs.ATTENTION_OPERATIONS, "up", "down")
    })


def test_each_piece_reads_the_weights_again():
  """By the roofline, few tokens take the time of the weights."""
  found = nanobatch_costs.roofline(LLAMA_2_70B, A100, 8, 2048)
  matrices = dict(zip(
    ("qkv", "out", "up", "down"), LLAMA_2_70B.matrices, strict=True
  ))
  for part, elements in matrices.items():
    times = found.times(part, 2048)
    weights = elements / 8 * 2 / A100.memory_bandwidth
    assert times[1] == times[32] == pytest.approx(weights)
    assert times[2048] == pytest.approx(
      2 * 2048 * elements / 8 / A100.peak("bfloat16")
    )
  half = nanobatch_costs.roofline(LLAMA_2_70B, A100, 8, 2048, 0.5)
  assert half.times("up", 2048)[2048] == pytest.approx(
    2 * found.times("up", 2048)[2048]
  )
  assert half.times("up", 2048)[1] == found.times("up", 2048)[1]


def test_experts_read_more_weights_than_a_token_uses():
  dense, sparse = (
    nanobatch_costs.roofline(LLAMA_2_70B, A100, 8, 2048, 1.0, experts)
    for experts in ((1, 1), (8, 2))
  )
  for count, ratio in ((1, 2), (2, 4), (8, 8), (2048, 2)):
    assert sparse.times("up", 2048)[count] == pytest.approx(
      ratio * dense.times("up", 2048)[count]
    )
  assert (sparse.times("qkv", 9) == dense.times("qkv", 9)).all()


def test_attention_of_decodes_reads_the_cache():
  """Compares with the bounds of inference, layer by layer."""
  for name, machine in (("h100", H100), ("v5p", None)):
    device = DEVICES[name]
    ranks = machine.num_ranks if machine else 8
    (wanted,) = (
      o.seconds(device, "bfloat16")
      for o in inference.operations(LLAMA_2_70B, ModelStep(64, 1, 900), ranks)
      if o.name == "attention"
    )
    found = nanobatch_costs.cumulative_attention_s(
      LLAMA_2_70B, device, ranks, TokenMix(64, 900)
    )
    assert found[64] == pytest.approx(wanted)
    assert found[16] == pytest.approx(wanted / 4)
  # A rank of six has all query heads of its two heads of keys and values.
  (uneven,) = (
    o.seconds(H100.device, "bfloat16")
    for o in inference.operations(LLAMA_2_70B, ModelStep(64, 1, 900), 6)
    if o.name == "attention"
  )
  found = nanobatch_costs.cumulative_attention_s(
    LLAMA_2_70B, H100.device, 6, TokenMix(0, 0, 64, 900)
  )
  flops = 4 * 64 * 900 * 16 * 128
  assert found[64] == pytest.approx(flops / H100.device.peak("bfloat16"))
  assert nanobatch_costs.cumulative_attention_s(
    LLAMA_2_70B, H100.device, 6, TokenMix(64, 900)
  )[64] == pytest.approx(uneven)
  mixed = nanobatch_costs.cumulative_attention_s(
    LLAMA_2_70B, H100.device, 8, TokenMix(64, 900, 100, 50)
  )
  assert len(mixed) == 165
  flops = 4 * 100 * 50 * 8 * 128
  assert mixed[-1] - mixed[64] == pytest.approx(
    flops / H100.device.peak("bfloat16")
  )


@pytest.mark.parametrize("end", nanobatch_costs.TIME_RANGE_ENDS)
def test_reductions_take_the_time_of_their_bytes(end):
  times = nanobatch_costs.reduction_times(
    H100, LLAMA_2_70B, Reduction(), 2048, end
  )
  for count in (1, 100, 2048):
    wanted = getattr(H100.all_reduce(count * 8192 * 2), end)
    assert times[count] == pytest.approx(wanted, rel=0.02)
  assert times[0] == 0
  half = nanobatch_costs.reduction_times(
    H100, LLAMA_2_70B, Reduction(p=0.5), 2048, end
  )
  # Both are interpolated between different sizes.
  assert half[2048] == pytest.approx(times[1024], rel=0.02)
  # Half of the bits sends as many bytes, and encodes and decodes.
  byte = nanobatch_costs.reduction_times(
    H100, LLAMA_2_70B, Reduction(bits=8), 2048, end
  )
  coding = 2048 * 8192 * 2 * 3 / H100.device.memory_bandwidth
  assert byte[2048] - half[2048] == pytest.approx(coding)
  none = nanobatch_costs.reduction_times(
    H100, LLAMA_2_70B, Reduction(p=0.0), 2048, end
  )
  assert not none.any()


def test_a_layer_is_the_sum_of_its_parts():
  found = costs(TokenMix(100, 600, 28, 50))
  profile = nanobatch_costs.profiles()["h100", 8]
  assert (found.model, found.num_layers) == ("llama-2-70b", 80)
  for got, parts in (
    (found.attention, ("qkv", "out", "attention_rest")),
    (found.mlp, ("up", "down", "mlp_rest")),
  ):
    assert got[128] == pytest.approx(
      sum(profile.times(part, 128)[128] for part in parts)
    )
  # The head reads its table; the embedding is reduced once.
  head = 32_000 * 8192 * 2 / 8 / H100.device.memory_bandwidth
  assert found.fixed_s == pytest.approx(
    head + found.reductions[Reduction()][128]
  )


def test_a_layer_has_the_utilisation_and_the_end_of_its_arguments():
  """A step of many tokens, whose head is bound by its FLOPs."""
  machine, mix = inference.machine("gpu:a100:1x8"), TokenMix(
    1000, 600, 1000, 500
  )
  found = costs(mix, machine, end="greatest", utilisation=0.5)
  least = costs(mix, machine)
  np.testing.assert_array_equal(
    found.attend,
    nanobatch_costs.cumulative_attention_s(LLAMA_2_70B, A100, 8, mix, 0.5),
  )
  assert found.attend[-1] > least.attend[-1]
  (sums,) = found.reductions.values()
  assert sums[2000] == pytest.approx(
    machine.all_reduce(2000 * 8192 * 2).greatest
  )
  assert least.reductions[Reduction()][2000] < sums[2000]
  head = 2 * 1000 * 8192 * 4000 / (0.5 * A100.peak("bfloat16"))
  assert found.fixed_s == pytest.approx(sums[2000] + head)


def test_head_reads_one_token_of_a_step_of_prompts():
  """At this utilisation FLOPs take longer than the table's bytes."""
  found = costs(TokenMix(0, 0, 64, 50), utilisation=1e-3)
  head = 2 * 8192 * 4000 / (1e-3 * H100.device.peak("bfloat16"))
  assert found.fixed_s == pytest.approx(
    head + found.reductions[Reduction()][64]
  )


def test_one_shot_is_faster_for_few_tokens_only():
  one, ring = (
    nanobatch_costs.reduction_times(H100, LLAMA_2_70B, Reduction(name), 4096)
    for name in ("one_shot", "all_reduce")
  )
  assert one[2048] == pytest.approx(
    H100.all_reduce(1).least + 7 * 2048 * 8192 * 2 / H100.rate
  )
  assert one[32] < ring[32]
  assert one[2048] > ring[2048]
  few, many = (
    nanobatch.plan(
      costs(TokenMix(n, 100), reductions=nanobatch_costs.reduction_choices()), n
    ) for n in (32, 2048)
  )
  assert few.reduction.algorithm == "one_shot"
  assert many.reduction.algorithm == "all_reduce"


def test_plan_chooses_p_and_bits_with_the_pieces():
  assert nanobatch_costs.reduction_choices() == [
    Reduction(), Reduction("one_shot")
  ]
  reductions = nanobatch_costs.reduction_choices((1.0, 0.25), (16, 8))
  assert len(reductions) == 8
  both = nanobatch.plan(costs(TokenMix(1024, 100), reductions=reductions), 1024)
  assert both.reduction.p == 0.25
  for way in reductions:
    alone = nanobatch.plan(costs(TokenMix(1024, 100), reductions=[way]), 1024)
    assert both.step_s <= alone.step_s


def test_optimum_is_a_bound_on_rooflines():
  for name in ("gpu:h200:1x8", "tpu:v5p:2x2x2"):
    machine = inference.machine(name)
    for mix in (TokenMix(32, 1024), TokenMix(256, 1024, 1792, 512)):
      profile = nanobatch_costs.roofline(
        LLAMA_2_70B, machine.device, 8, mix.tokens
      )
      plan = nanobatch.plan(nanobatch_costs.layer_costs(
        "70b", LLAMA_2_70B, profile, machine, mix
      ), mix.tokens)
      assert 0 < plan.optimum_s <= plan.step_s <= plan.single_s
      best = nanobatch_costs.peak_rate_times(LLAMA_2_70B, machine, mix)
      assert plan.optimum_s == best.seconds
      assert best.network == pytest.approx(
        161 * machine.wire_seconds(mix.tokens * 8192 * 2)
      )


def test_one_rank_sends_nothing():
  machine = dataclasses.replace(H100, num_ranks=1)
  best = nanobatch_costs.peak_rate_times(LLAMA_2_70B, machine, TokenMix(8, 100))
  assert best.network == 0


@pytest.mark.parametrize(("mix", "experts"), [
  (TokenMix(256, 1000), (1, 1)), (TokenMix(256, 1000, 50, 400), (1, 1)),
  (TokenMix(256, 1000), (8, 2)), (TokenMix(1, 1000), (8, 2)),
])
def test_optimum_counts_products_attention_weights_and_cache(mix, experts):
  best = nanobatch_costs.peak_rate_times(LLAMA_2_70B, H100, mix, experts)
  qkv, out, up, down = LLAMA_2_70B.matrices
  number, top = experts
  table = 32_000 * 8192  # of the head, for the decodes
  flops = 2 * mix.decodes * table + 160 * mix.tokens * (
    qkv + out + top * (up + down)
  )
  flops += 4 * 80 * 8192 * (
    mix.decodes * mix.context + mix.prefills * mix.prefill_context
  )
  held = min(number, top * mix.tokens)
  size = 2 * (table + 80 * (qkv + out + held * (up + down)))
  size += mix.decodes * mix.context * 327_680
  assert best.compute == pytest.approx(
    flops / 8 / H100.device.peak("bfloat16")
  )
  assert best.memory == pytest.approx(
    size / 8 / H100.device.memory_bandwidth
  )


@pytest.mark.parametrize(("call", "message"), [
  (
    lambda: nanobatch_costs.reduction_choices(algorithms=("tree",)),
    "algorithm='tree'"
  ),
  (lambda: costs(TokenMix(8, 100), end="mean"), "end='mean'"),
  (lambda: costs(TokenMix(8, 1), reductions=[Reduction(p=2.0)]), "p=2"),
  (lambda: costs(TokenMix(8, 1), reductions=[Reduction(bits=0)]), "bits=0"),
  (lambda: nanobatch_costs.roofline(LLAMA_2_70B, A100, 8, 4, 1.5),
   "utilisation=1.5"),
])
def test_invalid_arguments_are_one_line(call, message):
  with pytest.raises(ValueError, match=message) as error:
    call()
  assert "\n" not in str(error.value)
