"""Metrics of a step: read late, norms, and the rate of products."""

import types

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr
import numpy as np
import pytest

from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.train import throughput
from caatnet.train.metrics import MetricsQueue
from caatnet.train.norms import gradient_norms, parameter_names, worker_norms
from configs.caatnet import tiny
from tests.caatnet.train import linear_model as toy
from tests.caatnet.train.host_moments_test import SMALL


def test_metrics_are_taken_once_and_in_order():
  late = MetricsQueue()
  assert late.take() == []
  for step in (1, 2):
    late.add(step, {"loss": jnp.full((2,), float(step))}, due=False)
  found = late.take()
  assert [step for step, _ in found] == [1, 2]
  for step, metrics in found:
    assert isinstance(metrics["loss"], np.ndarray)
    np.testing.assert_array_equal(metrics["loss"], [step, step])
  assert late.take() == []


def test_norms_are_per_parameter_and_per_worker():
  program = toy.make(model=toy.Deep()).program
  tree = {"w": np.full((3, 4), 2.0, "f4"), "b": np.arange(4, dtype="f4"),
          "blocks": {"w": np.ones((2, 3, 3), "f4")}}
  assert parameter_names(tree) == ["b", "blocks/w", "w"]

  def run(f, tree):
    return jax.jit(jax.shard_map(
      lambda x: f(x, program), mesh=program.layout.mesh, in_specs=P(),
      out_specs=P(),
    ))(tree)

  found = run(gradient_norms, tree)
  assert {k: float(v) for k, v in found.items()} == {
    "b": pytest.approx(14**0.5), "blocks/w": pytest.approx(18**0.5),
    "w": pytest.approx(48**0.5),
  }
  both = jax.tree.map(lambda x: np.stack([x, 3 * x]), tree)
  norms = run(worker_norms, both)
  np.testing.assert_allclose(norms, [80**0.5, 3 * 80**0.5], rtol=1e-6)
  assert norms.dtype == "float32"


@pytest.mark.parametrize(("overrides", "mesh"), [
  ("parallel.data=2 zero.scheme=zero3", {"data": 2, "tensor": 2}),
  ("parallel.stage=2 train.accumulation=2", {"stage": 2, "tensor": 2}),
  ("parallel.worker=2 outer.algorithm=diloco", {"worker": 2, "tensor": 2}),
], ids=str)
def test_norms_count_each_element_of_all_devices_once(overrides, mesh):
  """Arrays are cut over several sets of axes, some over none."""
  program = experiments.build(
    override(
      tiny.get_config("test"), f"{SMALL} parallel.tensor=2 {overrides}"
    ), mesh
  ).program
  layout, draw = program.layout, np.random.default_rng(0)
  tree = jax.tree.map(
    lambda x: draw.normal(size=(layout.worker.size, *x.shape)).astype("f4"),
    program.stored_shapes,
  )

  def norms(tree):
    groups = gradient_norms(jax.tree.map(lambda x: x[0], tree), program)
    return worker_norms(tree, program), jax.tree.map(lambda x: x[None], groups)

  total, groups = jax.jit(jax.shard_map(
    norms, mesh=layout.mesh, in_specs=(layout.add_worker_dim(program.specs),),
    out_specs=P(layout.worker.name),
  ))(tree)
  squares = {
    keystr(path, simple=True, separator="/"):
    np.square(x, dtype="f8").reshape(len(x), -1).sum(axis=1)
    for path, x in jax.tree.leaves_with_path(tree)
  }
  assert groups.keys() == squares.keys()
  for name, square in squares.items():
    np.testing.assert_allclose(groups[name], np.sqrt(square), rtol=1e-5)
  np.testing.assert_allclose(total, np.sqrt(sum(squares.values())), rtol=1e-5)


def test_rate_of_products_counts_their_operations(monkeypatch):
  """The fastest of five measurements, on a clock that ticks per reading."""
  mesh = toy.make().program.layout.mesh
  times = iter([0.0, 4.0, 10.0, 12.0, 20.0, 23.0, 30.0, 35.0, 40.0, 43.0])
  clock = types.SimpleNamespace(perf_counter=lambda: next(times))
  monkeypatch.setattr(throughput, "time", clock)
  monkeypatch.setitem(throughput._MATRIX_SIDES, "cpu", 16)
  rate = throughput.matmul_rate.__wrapped__(mesh, "float32")
  assert rate == 8 * 2 * 16**3 / 2.0
  with pytest.raises(StopIteration):
    next(times)
