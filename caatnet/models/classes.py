"""Loss and accuracy of classifiers."""

import jax
from jax import lax
import jax.numpy as jnp

from parallel.axes import Axis


def scores(
  logits: jax.Array, labels: jax.Array, tensor: Axis
) -> dict[str, jax.Array]:
  """Returns cross-entropy and accuracy of each example.

  Runs inside ``jax.shard_map`` with the tensor axis.

  Args:
    logits: ``[B, classes]``.
    labels: int ``[B]``, the correct classes.
    tensor: The tensor axis, which has one rank.

  Returns:
    "loss", the cross-entropy in nats, and "accuracy", 1.0 if the class with the
    largest logit is correct and else 0.0; float32 ``[B]`` each.
  """
  log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
  chosen = jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0]
  right = (jnp.argmax(log_probs, axis=1) == labels).astype(jnp.float32)
  # The sum over one rank changes no value. It makes the scores invariant over
  # the tensor axis by type, as `Model.scores` requires.
  return jax.tree.map(
    lambda x: lax.psum(x, tensor.name), {"loss": -chosen, "accuracy": right}
  )
