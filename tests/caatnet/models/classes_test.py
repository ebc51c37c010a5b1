"""Scores of classifiers."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from caatnet.models import classes
from parallel.axes import Axis, make_mesh


def test_scores_of_a_classifier():
  logits = np.array([[1.0, 3.0, 2.0], [5.0, 5.0, 0.0], [0.0, 1.0, 2.0]], "f4")
  labels = np.array([1, 1, 0])
  tensor = Axis("tensor", 1)
  found = jax.jit(jax.shard_map(
    lambda x, y: classes.scores(x, y, tensor),
    mesh=make_mesh({"tensor": tensor}), in_specs=P(), out_specs=P(),
  ))(jnp.asarray(logits, "bfloat16"), jnp.asarray(labels))
  odds = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
  np.testing.assert_allclose(
    found["loss"], -np.log(odds[np.arange(3), labels]), rtol=1e-6
  )
  # Of two equal logits, the first one is the answer.
  assert found["accuracy"].tolist() == [1.0, 0.0, 0.0]
  assert {x.dtype.name for x in found.values()} == {"float32"}
