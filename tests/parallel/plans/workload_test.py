"""Parameter and FLOP counts of transformers."""

import dataclasses

import jax
import pytest

from caatnet.models.transformer.config import TransformerConfig
from caatnet.models.transformer.model import TransformerModel
from parallel.axes import Axis
from parallel.plans.hardware.devices import A100
from parallel.plans.workload import TrainingStep, Transformer
from parallel.tensor.partial_sync import PartialSync

SIZES = {
  "vocab_size": 96, "width": 64, "num_layers": 3, "num_heads": 8,
  "num_kv_heads": 8, "ffn_width": 176, "dtype": "float32",
}
VARIANTS = {
  "gpt": {},
  "llama": {"num_kv_heads": 2},
  "head_width": {"head_width": 32, "num_kv_heads": 4},
  "qwen2": {"num_kv_heads": 2, "qkv_bias": True, "tied_embeddings": True},
  "qwen3": {"num_kv_heads": 4, "head_width": 16, "qk_norm": True},
  "mistral": {"num_kv_heads": 2, "sliding_window": 5},
}


def _config(variant):
  syncs = ((PartialSync(), PartialSync()),) * SIZES["num_layers"]
  return TransformerConfig(**{**SIZES, **VARIANTS[variant]}, syncs=syncs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_equal_those_of_the_trained_model(variant):
  config = _config(variant)
  model = TransformerModel(config, Axis("tensor", 1, 1))
  tree = jax.eval_shape(model.init, jax.random.key(0))
  count = sum(x.size for x in jax.tree.leaves(tree))
  workload = Transformer(**{**SIZES, **VARIANTS[variant]})
  assert config.workload == workload
  assert workload.num_params == config.num_params == count


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seq_len", [4, 16])
def test_flops_are_six_per_weight_plus_the_visible_scores(
  variant, seq_len
):
  """Each visible query-key pair counts twice: products with keys and values.

  A position's score with itself counts half, as on the whole diagonal.
  """
  config = _config(variant)
  window = config.sliding_window or seq_len
  seen = sum(min(i + 1, window) for i in range(seq_len)) - (
    min(window, seq_len) / 2
  )
  scores = 2 * 2 * config.num_heads * config.head_width * seen / seq_len
  products = config.num_params - (
    0 if config.tied_embeddings else config.vocab_size * config.width
  )
  assert config.flops_per_token(seq_len) == pytest.approx(
    6 * products + 3 * config.num_layers * scores
  )
  # The forward has a third of the products, without gains and biases.
  layer = config.workload.layer_flops(seq_len, seq_len)
  assert layer / seq_len == pytest.approx(
    2 * sum(config.workload.matrices) + scores
  )


def test_step_costs_divide_by_ranks_and_examples():
  step = TrainingStep(Transformer(**SIZES), batch_size=8, seq_len=16)
  assert step.layer_flops(4, 2) == step.model.layer_flops(4 * 16, 16) / 2
  assert step.head_flops(4, 2) == 2 * 4 * 16 * 64 * 96 / 2
  assert step.boundary_bytes(4) == 4 * 16 * 64 * 4
  # Ranks keep disjoint parts, except for the stream, which all of them hold.
  whole, half = (
    step.saved_activation_bytes(1, 1),
    step.saved_activation_bytes(1, 2),
  )
  assert half == whole / 2 + 2 * 4 * step.boundary_bytes(1) / 4
  assert [step.model.layers_per_part(n) for n in (1, 2, 3)] == [3, 2, 1]


LLAMA_2 = Transformer(32_000, 4096, 32, 32, 32, 11_008)
LLAMA_3 = Transformer(128_256, 4096, 32, 32, 8, 14_336)
QWEN_2 = Transformer(
  151_936, 896, 24, 14, 2, 4864, qkv_bias=True, tied_embeddings=True
)
QWEN_3 = Transformer(
  151_936, 1024, 28, 16, 8, 3072, head_width=128, qk_norm=True,
  tied_embeddings=True,
)


@pytest.mark.parametrize(("model", "count"), [
  # Parameters of the published weights.
  (LLAMA_2, 6_738_415_616), (LLAMA_3, 8_030_261_248), (QWEN_2, 494_032_768),
  (QWEN_3, 596_049_920),
], ids=["llama 2 7b", "llama 3 8b", "qwen2 0.5b", "qwen3 0.6b"])
def test_published_models_have_their_published_parameters(model, count):
  assert model.num_params == count
  assert model.dtype == "bfloat16"
  assert model.item_bytes == 2


def test_saved_activations_of_a_layer_are_counted_by_tensor():
  """Llama 3 8B, in channels per token: 32 heads and 8 of keys, of 128."""
  stream = ["before norm 1", "norm 1", "before norm 2", "norm 2"]
  replicated = len(stream) * 4096
  partitioned = sum((4096, 1024, 1024, 4096, 14_336, 14_336, 14_336))
  for tensor in (1, 8):
    assert LLAMA_3.saved_activation_bytes(10, tensor) == (
      10 * 2 * (replicated + partitioned / tensor)
    )
  assert LLAMA_3.residual_stream_bytes(10) == 10 * 4096 * 2
  assert LLAMA_3.head_flops(10) == 10 * 2 * 4096 * 128_256
  step = TrainingStep(LLAMA_3, 1, 5)
  assert step.backward_bytes == 4  # reductions in float32
  assert step.saved_activation_bytes(2, 8) == LLAMA_3.saved_activation_bytes(
    10, 8
  )


@pytest.mark.parametrize("examples", [1 / 4096, 3])
def test_layer_time_is_the_larger_of_products_and_weights_plus_activations(
  examples
):
  """A single token reads weights; thousands of tokens compute."""
  step, rate = TrainingStep(LLAMA_3, 1, 4096), 312e12
  tokens = examples * 4096
  matrices = 2 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14_336)
  scores = 2 * 4096 * 4096  # two products of 2 FLOPs, half of them visible
  read_s = matrices / 2 / 4 * 2 / A100.memory_bandwidth
  compute_s = tokens * (matrices + scores) / 4 / (0.5 * rate)
  assert (compute_s > read_s) == (examples == 3)
  moved_s = (
    2 * LLAMA_3.saved_activation_bytes(tokens, 4) / A100.memory_bandwidth
  )
  assert step.layer_s(examples, 4, A100, 0.5) == pytest.approx(
    max(read_s, compute_s) + moved_s
  )


def test_layer_takes_at_least_the_time_to_read_its_weights():
  step = TrainingStep(Transformer(**SIZES), batch_size=1, seq_len=1)
  read = sum(step.model.matrices) * 4 / A100.memory_bandwidth
  assert step.layer_s(1, 1, A100, 1.0) > read
  large = dataclasses.replace(step, seq_len=1 << 20)
  products = large.layer_flops(1, 1) / A100.peak("float32")
  assert large.layer_s(1, 1, A100, 0.5) > 2 * products


def test_unknown_dtype_is_refused():
  with pytest.raises(ValueError, match="dtype='int8' must be one of"):
    Transformer(**SIZES | {"dtype": "int8"})
