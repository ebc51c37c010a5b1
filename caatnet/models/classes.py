"""Scores of models that tell classes apart."""

import jax
from jax import lax
import jax.numpy as jnp

from parallel.axes import Axis


def scores(
  logits: jax.Array, labels: jax.Array, tensor: Axis
) -> dict[str, jax.Array]:
  """Scores logits ``[B, classes]`` by labels ``[B]``.

  Args:
    logits: Of each example.
    labels: The right classes.
    tensor: The tensor axis, of one rank.

  Returns:
    Cross-entropy and whether the likeliest class is right, float32 ``[B]``.
  """
  log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
  chosen = jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0]
  right = (jnp.argmax(log_probs, axis=1) == labels).astype(jnp.float32)
  # A sum over one rank changes nothing, but makes scores equal on all tensor
  # ranks by type, which the protocol asks for.
  return jax.tree.map(
    lambda x: lax.psum(x, tensor.name), {"loss": -chosen, "accuracy": right}
  )
