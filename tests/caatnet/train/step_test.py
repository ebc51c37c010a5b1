"""Properties of the training step."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.train.evaluate import put_batch
from caatnet.train.microbatches import split
from caatnet.train.step import make_train_step
from configs.caatnet import tiny


def make_experiment(mesh, overrides=""):
  config = override(tiny.get_config("test"), overrides)
  return experiments.build(config, mesh)


def run_steps(experiment, num_steps=3):
  step = make_train_step(
    experiment.program,
    experiment.optimizer,
    experiment.outer,
    experiment.clip_norm,
    experiment.train.accumulation,
  )
  state = experiment.init_state()
  tokens = np.random.default_rng(0).integers(256, size=(num_steps, 8, 33))
  losses = []
  for batch in tokens:
    laid_out = put_batch(experiment.program.layout, batch)
    state, metrics = step(state, laid_out, ())
    losses.append(metrics["loss"].item())
  return jax.device_get(state), jax.device_get(metrics), losses


def test_padded_heads_stay_zero_and_change_no_loss():
  """The last of four ranks has only padding."""
  sizes = (
    "model.num_heads=6 model.num_kv_heads=3 model.head_width=4 "
    "model.ffn_width=9 model.qkv_bias=True model.qk_norm=True sync.p=1.0 "
    "optimizer.weight_decay=0.1 "
  )
  one = make_experiment({}, sizes + "parallel.tensor=1")
  four = make_experiment({"tensor": 4}, sizes + "parallel.tensor=4")
  expected, _, losses = run_steps(one)
  state, _, padded_losses = run_steps(four)
  np.testing.assert_allclose(padded_losses, losses, rtol=1e-5)
  assert np.ptp(losses) > 1e-3
  for model in (one.program.model, four.program.model):
    assert model.num_params == sum(
      np.count_nonzero(x) for x in jax.tree.leaves(expected.params)
    )
  assert four.program.model.num_params == sum(
    np.count_nonzero(x) for x in jax.tree.leaves(state.params)
  )
  blocks = state.params["blocks"]
  for name in ("w_qkv", "b_qkv", "w_out"):
    axis = blocks[name].shape.index(4)
    *_, last = np.split(blocks[name], 4, axis)
    assert not last.any(), name


@pytest.mark.rotated(2)
@pytest.mark.parametrize("sizes", ["parallel.data=4", "train.accumulation=4"])
def test_data_shards_and_microbatches_change_no_update(sizes):
  base = "parallel.tensor=2 sync.p=0.5"
  whole = run_steps(make_experiment({}, base))
  split = run_steps(make_experiment({}, f"{base} {sizes}"))
  chex.assert_trees_all_close(whole, split, rtol=2e-4, atol=2e-5)


def test_gradient_norm_counts_each_logical_parameter_once():
  """Clipping over ranks equals optax's clipping of the whole arrays."""
  experiment = make_experiment(
    {"tensor": 4}, "parallel.tensor=4 sync.p=0.5 optimizer.clip_norm=0.0"
  )
  program = experiment.program
  sgd = optax.sgd(1.0)
  tokens = np.random.default_rng(0).integers(256, size=(8, 33))
  from caatnet.train.state import init_state

  def updated(clip_norm):
    state = init_state(program, sgd, experiment.outer, 0)
    before = jax.device_get(state.params)
    step = make_train_step(program, sgd, experiment.outer, clip_norm)
    state, metrics = step(state, put_batch(program.layout, tokens), ())
    after = jax.device_get(state.params)
    grads = jax.tree.map(lambda a, b: a - b, before, after)
    return grads, metrics["grad_norm"].item()

  grads, norm = updated(0.0)
  np.testing.assert_allclose(optax.tree.norm(grads), norm, rtol=1e-4)
  clipped, _ = updated(norm / 7)
  expected = jax.tree.map(lambda g: g / 7, grads)
  chex.assert_trees_all_close(clipped, expected, rtol=1e-2, atol=1e-6)


def test_only_matrices_decay():
  experiment = make_experiment({}, "optimizer.warmup_steps=0")
  params = jax.tree.map(lambda x: x[0], experiment.init_state().params)
  zeros = jax.tree.map(np.zeros_like, params)
  optimizer = experiment.optimizer
  updates, _ = optimizer.update(zeros, optimizer.init(params), params)
  for path, update in jax.tree.leaves_with_path(updates):
    moved = bool((np.abs(update) > 0).any())
    assert moved != ("norm" in path[-1].key), path


def test_schedule_warms_up_and_ends_at_a_tenth():
  schedule = make_experiment(
    {}, "train.num_steps=100 optimizer.warmup_steps=10"
  ).learning_rate
  rates = np.array([schedule(step) for step in range(101)])
  assert rates[0] == 0
  assert rates.argmax() == 10
  np.testing.assert_allclose(rates[100], rates[10] / 10, rtol=1e-5)


@pytest.mark.parametrize("num_lead", [0, 1, 2])
def test_microbatches_are_consecutive_examples(num_lead):
  batch = np.arange(2 * 3 * 12 * 5).reshape(2, 3, 12, 5)
  whole = batch.reshape(*batch.shape[2 - num_lead : 2], 12, 5, -1)
  parts = split({"x": jnp.asarray(whole)}, 4, num_lead)["x"]
  for i in range(4):
    expected = np.moveaxis(
      np.moveaxis(whole, num_lead, 0)[3 * i : 3 * i + 3], 0, num_lead
    )
    np.testing.assert_array_equal(parts[i], expected)
