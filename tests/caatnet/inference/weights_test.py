"""Parameters in the format of inference: codes, separate layers, shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from caatnet.inference.scoring import Scorer
from caatnet.inference.weights import (
  CodedMatrix,
  abstract_weights,
  make_weights,
)
from tests.caatnet.models.transformer_test import (
  draw_params,
  make_config,
  make_program,
)


@pytest.mark.parametrize("width", [1, 128, 301])
def test_error_of_codes_is_bounded_by_each_block(width):
  """Blocks of 128 elements, whose magnitudes differ by a factor of 1000."""
  rng = np.random.default_rng(0)
  block = np.arange(width) // 128
  x = (rng.normal(size=(3, width)) * 1000.0**block).astype("f4")

  @jax.jit
  def both(x):
    coded = CodedMatrix.encode(x, "float32")
    return coded, coded.decode(), CodedMatrix.encode(x, "bfloat16").decode()

  coded, found, half = map(jax.device_get, both(x))
  assert (found.shape, found.dtype) == (x.shape, x.dtype)
  assert (half.shape, half.dtype) == (x.shape, jnp.bfloat16)
  for number in range(block[-1] + 1):
    part = x[:, block == number]
    largest = np.abs(part).max(axis=-1, keepdims=True)
    error = np.abs(found[:, block == number] - part)
    assert (error <= 1.01 * largest / 127 / 2).all()
  assert coded.encoded.scales.shape == (3, block[-1] + 1)


def is_coded(x):
  return isinstance(x, CodedMatrix)


def program_of(layers=2, ranks=2, **changes):
  return make_program(make_config(1.0, layers, **changes), ranks)


def make(program, apart, coded):
  params = jax.tree.map(jnp.array, draw_params(program))
  return make_weights(program, params, apart, coded)


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_are_coded_except_for_embedding_tables(tied):
  program = program_of(tied_embeddings=tied, qkv_bias=True)
  weights = abstract_weights(program, False, True)
  found, _ = jax.tree_util.tree_flatten_with_path(
    weights.params, is_leaf=is_coded
  )
  names = {path[-1].key: is_coded(leaf) for path, leaf in found}
  matrices = {"w_qkv", "w_out", "w_gate_up", "w_down"}
  if not tied:
    matrices.add("head")
  assert {name for name, coded in names.items() if coded} == matrices
  assert {"embedding", "norm", "norm_1", "b_qkv"} <= names.keys() - matrices


@pytest.mark.parametrize(("apart", "coded"), [(False, False), (True, True)])
def test_abstract_weights_have_the_shapes_of_the_arrays(apart, coded):
  program = program_of()
  weights = make(program, apart, coded)
  shapes = abstract_weights(program, apart, coded)

  def described(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)

  assert described(shapes.params) == described(weights.params)
  assert (shapes.specs, shapes.access) == (weights.specs, weights.access)
  layers = weights.params["blocks"]
  assert isinstance(layers, tuple) == apart
  if apart:
    assert len(layers) == 2


def test_few_tokens_read_codes_and_score_alike():
  """64 and 65 tokens: on both sides of the limit of products by codes."""
  program = program_of(layers=1, ranks=1, width=512, ffn_width=512)
  weights, found = make(program, True, True), {}
  assert weights.access.few
  for length in (64, 65):
    scorer = Scorer(program, weights, length, 1)
    row = [[3, 1, 4, 1, 5, *range(60)][:length]]
    found[length] = scorer.score(row)[0].log_probabilities
  np.testing.assert_allclose(found[64], found[65][:-1], rtol=1e-5, atol=1e-5)


def test_codes_and_separate_layers_score_alike():
  row, found = [[3, 1, 4, 1, 5, 9, 2, 6]], {}
  program = program_of(layers=1, ranks=1)
  for apart, coded in ((False, False), (False, True), (True, True)):
    scorer = Scorer(program, make(program, apart, coded), 8, 1)
    found[apart, coded] = scorer.score(row)[0].log_probabilities
  dense = found[False, False]
  np.testing.assert_allclose(found[False, True], dense, atol=0.1)
  assert (found[False, True] != dense).any()
  np.testing.assert_allclose(
    found[True, True], found[False, True], rtol=1e-5, atol=1e-6
  )
