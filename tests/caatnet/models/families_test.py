"""Features of model families beyond Llama, against the oracle.

Padded heads and features of ranks are covered by `transformer_test`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from caatnet.models.lm.communication import tensor_reductions
from caatnet.models.transformer import layers
from caatnet.models.transformer.attention import attention
from caatnet.models.transformer.positions import (
  LinearScaling,
  Llama3Scaling,
  parse_scaling,
)
from tests.caatnet.models import oracle
from tests.caatnet.models.transformer_test import (
  expect_oracle,
  lower_step,
  make_config,
  make_program,
  tensor_counter,
)

# Wavelengths of 8 channels at base 100 are 6 to 63 positions.
LLAMA_3 = {
  "num_kv_heads": 4, "rope_base": 100.0,
  "rope_scaling": Llama3Scaling(4.0, 1.0, 3.0, 32),
}
MISTRAL = {"sliding_window": 3, "head_width": 6, "num_kv_heads": 4}
QWEN_2 = {"qkv_bias": True, "rope_scaling": LinearScaling(3.0)}
QWEN_3 = {
  "qk_norm": True, "head_width": 10, "num_kv_heads": 4, "norm_eps": 0.1,
}


@pytest.mark.rotated
@pytest.mark.parametrize("family", [LLAMA_3, MISTRAL, QWEN_2, QWEN_3])
def test_family_equals_the_dense_model(family):
  expect_oracle(make_config(1.0, **family), oracle.dense_loss, 2)


@pytest.mark.parametrize(("ranks", "devices"), [(4, 2), (4, 4)])
def test_all_features_together_equal_the_rank_oracle(ranks, devices):
  config = make_config(0.5, **(LLAMA_3 | MISTRAL | QWEN_2 | QWEN_3))
  expect_oracle(config, oracle.rank_loss, ranks, devices, inside=True)


def test_gains_of_heads_are_reduced_once_per_step():
  config = make_config(0.5, layers=3, **(QWEN_2 | QWEN_3))
  program = make_program(config, 4, 2)
  assert tensor_counter(lower_step(program, 2, 8)) == tensor_reductions(
    config, data_lanes=1, batch_size=2, seq_len=8
  )


@pytest.mark.parametrize("window", [1, 100, 600, 5000])
def test_blocks_of_queries_see_their_window(window):
  q, k, v = (
    jax.random.normal(jax.random.key(i), (1, 1100, heads, 8))
    for i, heads in enumerate((4, 2, 2))
  )
  expected = jax.nn.dot_product_attention(
    q, k, v, is_causal=True, local_window_size=(window - 1, 0)
  )
  np.testing.assert_allclose(
    attention(q, k, v, "xla", window), expected, rtol=1e-4, atol=1e-5
  )


def test_llama_3_scales_long_wavelengths_only():
  """By hand: context of 8192 positions, factor 8, between 1 and 4 periods."""
  periods = np.array([0.5, 1.0, 2.5, 4.0, 100.0])
  frequencies = periods * 2 * np.pi / 8192
  np.testing.assert_allclose(
    Llama3Scaling(8.0, 1.0, 4.0, 8192)(frequencies) / frequencies,
    [1 / 8, 1 / 8, (1 + 1 / 8) / 2, 1, 1],
  )


@pytest.mark.parametrize(
  ("values", "message"),
  [
    (("yarn", 4.0), r"rope_scaling=\('yarn', 4.0\) must be"),
    (("linear",), "must be"),
    (("linear", 0.5), r"rope_scaling=\('linear', 0.5\): .* a finite factor"),
    (("linear", float("nan")), "needs a finite factor >= 1"),
    (("llama3", 8.0, 4.0, 1.0, 8192), "0 < low < high"),
    (("linear", "x"), r"rope_scaling=\('linear', 'x'\) must have numbers"),
    (("linear", True), "must have numbers"),
  ],
)
def test_error_of_an_invalid_scaling_names_the_valid_form(values, message):
  with pytest.raises(ValueError, match=message):
    parse_scaling(values)


def test_norms_of_heads_add_the_eps_of_the_config():
  """Covers queries and keys; eps dominates the norm of small inputs."""
  qkv = 0.1 * jax.random.normal(jax.random.key(0), (1, 1, 4 * 6))
  heads = layers.AttentionConfig(2, 1, 1e4, eps=0.5)
  ones = jnp.ones(6)
  q, k, _ = layers.split_heads(qkv, heads, layers.QkvParams(None, ones, ones))
  x = np.asarray(qkv, "f8").reshape(4, 6)  # position 0 is not rotated
  x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 0.5)
  np.testing.assert_allclose(q[0, 0], x[:2], rtol=1e-5)
  np.testing.assert_allclose(k[0, 0], x[2:3], rtol=1e-5)
