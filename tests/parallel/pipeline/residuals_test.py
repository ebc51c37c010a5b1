"""Residuals: gradients equal those of `jax.vjp`, without recomputation.

A part consists of layers with two products, the first in bfloat16, which casts
its weights; residuals are therefore activations and casts of weights.
"""

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from parallel.pipeline.residuals import (
  RecomputingBackward,
  SavingBackward,
  _Program,
)
from tests import users

LAYERS, TOKENS, WIDTH = 3, 6, 4
# Products of a layer: forward, cotangents of the input, gradients of weights.
PRODUCTS = 2


def part(params, scale, x):
  def layer(x, layer):
    w, gain = layer
    h = x.astype(jnp.bfloat16) @ w[0].astype(jnp.bfloat16)
    h = jnp.tanh(h).astype(jnp.float32) * gain[None]
    return x + scale * (h @ w[1]), None

  return lax.scan(layer, x, params)[0]


def arguments():
  draw = np.random.default_rng(0)

  def normal(*shape):
    return draw.normal(size=shape).astype(np.float32)

  params = normal(LAYERS, 2, WIDTH, WIDTH), normal(LAYERS, WIDTH)
  return params, np.float32(0.5), normal(TOKENS, WIDTH), normal(TOKENS, WIDTH)


def num_products(f, *args):
  """Counts the products that a program executes, including loop trips."""

  def count(jaxpr):
    total = 0
    for equation in jaxpr.eqns:
      times = equation.params.get("length", 1)
      total += equation.primitive.name == "dot_general"
      for inner in jax.tree.leaves(
        list(equation.params.values()),
        is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
      ):
        if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
          total += times * count(getattr(inner, "jaxpr", inner))
    return total

  return count(jax.make_jaxpr(f)(*args).jaxpr)


def compiled_flops(f, *args):
  return users.compiled(jax.jit(f).lower(*args)).cost_analysis()["flops"]


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_gradients_equal_those_of_one_program(keeps, splits):
  *args, dy = arguments()
  how = SavingBackward(part, splits) if keeps else RecomputingBackward(part)
  y, kept = jax.jit(how.forward)(*args)
  expected, vjp = jax.vjp(lambda p, x: part(p, args[1], x), args[0], args[2])
  of_params, of_x = jax.jit(vjp)(dy)
  if splits:
    dx, deltas = jax.jit(how.of_input)(*args, kept, dy)
    grads = jax.jit(how.of_weight)(*args, kept, dy, deltas)
  else:
    grads, dx = jax.jit(how.both)(*args, kept, dy)
  np.testing.assert_array_equal(y, expected)
  np.testing.assert_array_equal(dx, of_x)
  chex.assert_trees_all_equal(grads, of_params)


@pytest.mark.parametrize("splits", [False, True])
def test_output_may_have_no_tangent_of_the_input(splits):
  how = SavingBackward(lambda w, _, x: w * lax.stop_gradient(x), splits)
  args = jnp.float32(2), (), jnp.arange(3.0)
  dy = jnp.array([1.0, 10.0, 100.0])
  y, kept = how.forward(*args)
  np.testing.assert_array_equal(y, 2 * args[2])
  if splits:
    dx, deltas = how.of_input(*args, kept, dy)
    gradient = how.of_weight(*args, kept, dy, deltas)
  else:
    gradient, dx = how.both(*args, kept, dy)
  assert gradient == 10 + 2 * 100
  np.testing.assert_array_equal(dx, np.zeros(3))


def test_residuals_are_distinct_activations():
  """Contain no parameter or cast of one, no input, and no duplicates."""
  *args, dy = arguments()
  for splits in (False, True):
    _, kept = SavingBackward(part, splits).forward(*args)
    assert all(x.shape == (LAYERS, TOKENS, WIDTH) for x in kept)
    assert len(kept) == len({np.asarray(x).tobytes() for x in kept})
  # For each product and the gain: the cotangent of an additive perturbation.
  how = SavingBackward(part, True)
  _, deltas = how.of_input(*args, kept, dy)
  assert [x.shape for x in deltas] == 3 * [(LAYERS, TOKENS, WIDTH)]


def test_equal_results_of_a_program_are_one_value():
  """A residual that is an output, too, is found among the residuals only."""

  def program(x):
    doubled, halved = 2 * x, x / 2
    return doubled, halved, doubled, x, halved, doubled

  traced = _Program(program, jnp.ones(3))
  assert traced.same(0) == [0, 1, 0, 3, 1, 0]
  assert traced.same(1) == [0, 1, 2, 3, 1, 2]
  assert traced.same(2) == [0, 1, 2, 3, 4, 2]
  assert [i for i in range(6) if traced.is_argument(i)] == [3]


def test_nothing_is_computed_twice():
  """Each third of a step has the same number of products."""
  *args, dy = arguments()
  whole, halved = SavingBackward(part, False), SavingBackward(part, True)
  one = PRODUCTS * LAYERS
  _, kept = whole.forward(*args)
  assert num_products(whole.forward, *args) == one
  assert num_products(whole.both, *args, kept, dy) == 2 * one
  _, kept = halved.forward(*args)
  _, deltas = halved.of_input(*args, kept, dy)
  assert num_products(halved.forward, *args) == one
  assert num_products(halved.of_input, *args, kept, dy) == one
  assert num_products(halved.of_weight, *args, kept, dy, deltas) == one
  # An output that the backward reads is saved, too.
  output = SavingBackward(lambda w, _, x: jnp.exp(x @ w), True)
  args = jnp.ones((WIDTH, WIDTH)), (), jnp.ones((TOKENS, WIDTH))
  y, kept = output.forward(*args)
  np.testing.assert_array_equal(kept, [y])
  _, deltas = output.of_input(*args, kept, y)
  assert num_products(output.forward, *args) == 1
  assert num_products(output.of_input, *args, kept, y) == 1
  assert num_products(output.of_weight, *args, kept, y, deltas) == 1


def test_recomputed_halves_repeat_the_forward():
  *args, dy = arguments()
  one = PRODUCTS * LAYERS
  # When only inputs are kept, each half of the backward starts with a forward.
  how = RecomputingBackward(part)
  assert num_products(how.of_input, *args, (), dy) == 2 * one


def test_compiled_backward_has_no_forward():
  """Compares XLA's FLOPs for wider layers, which products dominate."""
  params = jnp.ones((LAYERS, 2, 128, 128)), jnp.ones((LAYERS, 128))
  x = dy = jnp.ones((128, 128))
  args = params, np.float32(1), x
  product = 2 * 128**3
  for how, of_input, of_weight in (
    (RecomputingBackward(part), 4, 6), (SavingBackward(part, True), 2, 2)
  ):
    _, kept = how.forward(*args)
    _, deltas = how.of_input(*args, kept, dy)
    # XLA's analysis counts a loop's body once, without its trips.
    for f, given, times in (
      (how.of_input, (kept, dy), of_input),
      (how.of_weight, (kept, dy, deltas), of_weight),
    ):
      flops = compiled_flops(f, *args, *given)
      assert flops / product == pytest.approx(times, rel=0.12)
