"""Benchmark of training steps: the plain step computes our loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from caatnet.benchmarks.harness import setup
from caatnet.benchmarks.training import train_step
from caatnet.config import experiments
from caatnet.train.evaluate import make_evaluate
from configs.benchmark import train_step as config_of
from parallel.axes import Axis, make_mesh

ONE = {
  "parallel.tensor": 1, "model.dtype": "float32", "model.init_std": 0.3,
  "model.num_layers": 1,
}


def built(**changes):
  config = config_of.get_config("test")
  config.model.update({"num_kv_heads": 2, "num_heads": 4})
  config.update_from_flattened_dict(ONE | changes)
  plain = setup.without_benchmark(config)
  return config, experiments.build(plain, None, jax.devices()[:1])


def test_plain_step_computes_our_loss():
  config, experiment = built()
  program = experiment.program
  params = train_step._plain_params(program.model.config)
  assert sum(x.size for x in jax.tree.leaves(params)) == (
    program.model.num_params
  )
  tokens = setup.token_batch(config)
  found = jax.jit(functools.partial(
    train_step._plain_loss, config=program.model.config, over_batch=None
  ))(params, tokens)
  whole = jax.tree.map(
    lambda x, like: x.reshape(like.shape), params,
    jax.eval_shape(program.init_params, jax.random.key(0)),
  )
  expected = make_evaluate(program, len(tokens))(whole, tokens).loss
  assert float(found) == pytest.approx(expected, rel=1e-5)
  # The weights matter: without them the loss is that of a uniform choice.
  assert abs(expected - np.log(256)) > 0.01


def test_plain_optimizer_clips_and_decays_matrices_only():
  _, experiment = built()
  keys = experiment.config["optimizer"]
  optimizer = train_step._plain_optimizer(experiment)
  params = {"w": jnp.full(3, 2.0), "norm_1": jnp.full(3, 2.0)}
  zeros = jax.tree.map(jnp.zeros_like, params)
  init, update = jax.jit(optimizer.init), jax.jit(optimizer.update)
  state = init(params)
  updates, _ = update(zeros, state, params)
  rate = float(experiment.learning_rate(0))
  np.testing.assert_allclose(
    updates["w"], -rate * keys["weight_decay"] * 2, rtol=1e-5
  )
  np.testing.assert_array_equal(updates["norm_1"], 0)
  large = {"w": jnp.full(3, 1e3), "norm_1": jnp.zeros(3)}
  _, state = update(large, state, params)
  moments = optax.tree.get(state, "mu")["w"]
  norm = experiment.clip_norm
  np.testing.assert_allclose(
    moments, (1 - keys["beta_1"]) * norm / np.sqrt(3), rtol=1e-5
  )


def test_features_without_a_plain_form_are_refused():
  config, experiment = built(**{"model.tied_embeddings": True})
  with pytest.raises(ValueError, match="tied_embeddings must be False"):
    train_step.plain_runner(experiment, setup.token_batch(config))


@pytest.mark.parametrize(("shape", "spec"), [
  ((4, 8), (None, "data")), ((8, 4), ("data", None)), ((6, 3), (None, None)),
  ((9, 4), (None, "data")), ((), ()), ((8, 8), ("data", None)),
])
def test_state_is_sharded_along_its_largest_dim(shape, spec):
  mesh = make_mesh({"data": Axis("data", 4, 4)})
  found = train_step._along_largest_dim(jnp.zeros(shape), mesh)
  assert tuple(found.spec) == spec


def test_rows_are_times_rates_and_shares(capsys):
  seconds = {
    ("float32", "plain"): [2.0, 4.0, 8.0], ("float32", "ours"): [3.0, 4.0, 4.0],
    ("bfloat16", "plain"): [1.0] * 3, ("bfloat16", "ours"): [0.5] * 3,
  }
  rates = {"float32": 4e9, "bfloat16": 8e9}
  rows = train_step._rows(seconds, "plain", 64, 8e9, rates)
  columns = ("median_s", "relative", "tokens_per_second",
             "fraction_of_matmul_rate")
  assert [(r["dtype"], r["variant"]) for r in rows] == list(seconds)
  assert [[r[c] for c in columns] for r in rows] == [
    [4, 1, 16, 0.5], [4, 1, 16, 0.5], [1, 1, 64, 1.0], [0.5, 0.5, 128, 2.0],
  ]
  _, experiment = built()
  rows = [r | {"device_bytes": 3e9, "host_bytes": 5e8} for r in rows]
  train_step._show(rows, experiment, 64, rates)
  printed = capsys.readouterr().out
  assert f"{experiment.program.model.num_params / 1e6:.1f}M" in printed
  assert "64 tokens" in " ".join(printed.split())
  assert "4 GFLOP/s float32, 8 GFLOP/s" in " ".join(printed.split())
  (line,) = (x for x in printed.splitlines() if "0.500 to 0.500" in x)
  assert [x.strip() for x in line.strip("│").split("│")] == [
    "ours", "bfloat16", "0.500", "0.500 to 0.500", "0.500", "128", "200.0%",
    "3.00", "0.50",
  ]


def test_steps_of_a_run_are_compared_with_the_plain_one(capsys):
  config = config_of.get_config("test")
  config.model.num_layers = config.benchmark.rounds = 1
  config.benchmark.update({
    "dtypes": ("float32",), "variants": (
      ("plain JAX step", ""), ("r=1", "parallel.tensor=1"),
    ),
  })
  plain, ours = train_step.run(config)["rows"]
  assert plain["relative"] == 1
  assert ours["relative"] == pytest.approx(ours["median_s"] / plain["median_s"])
  tokens = config.data.batch_size * config.data.seq_len
  for row in (plain, ours):
    assert row["tokens_per_second"] == pytest.approx(tokens / row["median_s"])
    assert row["device_bytes"] > 0
  # Of the same model, in the same dtype.
  work = [r["median_s"] * r["fraction_of_matmul_rate"] for r in (plain, ours)]
  assert work[0] == pytest.approx(work[1])
  assert f"{tokens} tokens" in " ".join(capsys.readouterr().out.split())


def test_memory_of_a_step_is_that_of_its_program():
  program = jax.jit(lambda x, y: (x + 1, x @ y), donate_argnums=0).lower(
    *[jnp.ones((64, 64))] * 2
  ).compile()
  found = train_step._runner(lambda: None, program)
  # Two arguments, one of which is reused, and one other result.
  assert found.device_bytes - program.memory_analysis().temp_size_in_bytes == (
    pytest.approx(3 * 64 * 64 * 4, abs=64)
  )
  assert found.host_bytes == 0
