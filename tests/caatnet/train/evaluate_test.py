"""Properties of evaluation."""

import jax
import numpy as np
import pytest

from caatnet.train.evaluate import make_evaluate, make_scores
from parallel.axes import Axis
from tests.caatnet.train import linear_model as toy

LEVELS = (Axis("node", 2, 2), Axis("gpu", 2))


@pytest.mark.parametrize(("num_examples", "scheme", "levels"), [
  *((n, scheme, None) for n in (3, 8, 13) for scheme in ("ddp", "zero3")),
  (13, "ddp", LEVELS), (13, "zero3", LEVELS),
])
def test_padding_rows_do_not_count(num_examples, scheme, levels):
  experiment = toy.make(  # with levels, all workers are on each device
    workers=2, data=2, devices=(1 if levels else 2, 2), scheme=scheme,
    levels=levels,
  )
  program = experiment.program
  params = {"w": toy.draw(3, 4)["y"], "b": toy.draw(1, 5)["y"][0]}
  stored = params
  if program.layout.shards is not None:
    stored = jax.tree.map(
      program.layout.shards.store, jax.tree.map(jax.numpy.asarray, params),
      program.tensors,
    )
  stored = jax.device_put(stored, program.layout.shardings(program.specs))
  examples = toy.draw(num_examples, 2)
  found = make_evaluate(program, 8)(stored, examples)
  losses = toy.judged(params, examples)
  scores = make_scores(program, 8)(stored, examples)  # in their order
  np.testing.assert_allclose(scores["loss"], losses, rtol=1e-5, atol=1e-6)
  assert found.num_examples == num_examples
  assert found.loss == found.means["loss"]
  np.testing.assert_allclose(found.loss, losses.mean(), rtol=1e-6)
  np.testing.assert_allclose(
    found.per_place["loss"], losses.mean(axis=0), rtol=1e-6
  )
