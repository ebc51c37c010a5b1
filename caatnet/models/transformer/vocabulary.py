"""Sums over a vocabulary that is cut over tensor ranks.

Every rank has a slice of the logits. What is asked of them here takes O(1)
numbers per token over the tensor axis, where gathered logits would be V.

Shape legend: R = lanes, B = batch, T = position, V = vocabulary of one rank.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp


class Targets(NamedTuple):
  """Tokens of which the logits are asked.

  Attributes:
    tokens: int ``[B, T]``.
    token_ids: int ``[R, V]``, which token each logit of this device stands for.
    axis_name: The name of the tensor axis.
  """

  tokens: jax.Array
  token_ids: jax.Array
  axis_name: str

  @property
  def found(self) -> jax.Array:
    """Whether a logit is the target's, bool ``[R, B, T, V]``: one of all."""
    return self.token_ids[:, None, None, :] == self.tokens[None, :, :, None]


def cross_entropy(logits: jax.Array, targets: Targets) -> jax.Array:
  """Computes log(sum of exp(logit)) - logit of the target.

  Args:
    logits: float32 ``[R, B, T, V]``; -inf for padding of the vocabulary.
    targets: The tokens that should have followed.

  Returns:
    Nats, float32 ``[B, T]``, the same on every tensor rank.
  """
  shifted = _shifted(logits, targets)
  # [2, B, T], so that one reduction takes both.
  sums = jnp.stack(_log_probability_terms(shifted, targets))
  normaliser, target = lax.psum(sums, targets.axis_name)
  return jnp.log(normaliser) - target


def target_scores(
  logits: jax.Array, targets: Targets
) -> dict[str, jax.Array]:
  """Says how likely each target is, and whether it is the most likely token.

  Args:
    logits: float32 ``[R, B, T, V]``; -inf for padding of the vocabulary.
    targets: The tokens that are judged.

  Returns:
    ``{"log_probability": float32 [B, T], "greedy": bool [B, T]}``, the same on
    every tensor rank. Among equal logits the lowest token is the greedy choice,
    as it is that of argmax.
  """
  shifted = _shifted(logits, targets)
  is_lower = (
    targets.token_ids[:, None, None, :] < targets.tokens[None, :, :, None]
  )
  # Lower tokens with the largest logit come before the target.
  before = jnp.sum(is_lower & (shifted == 0.0), axis=(0, 3))
  sums = jnp.stack(
    [*_log_probability_terms(shifted, targets), before.astype(jnp.float32)]
  )
  normaliser, target, before = lax.psum(sums, targets.axis_name)
  return {
    "log_probability": target - jnp.log(normaliser),
    "greedy": (target == 0.0) & (before == 0.0),
  }


def _shifted(logits: jax.Array, targets: Targets) -> jax.Array:
  """Subtracts the largest logit of all ranks, so that exp does not overflow.

  It cancels in a log-probability, hence it has no gradient. The barrier keeps
  XLA:TPU from moving the cast to float32 behind the reduction.
  """
  largest = jnp.max(lax.stop_gradient(logits), axis=(0, 3))
  largest = lax.pmax(lax.optimization_barrier(largest), targets.axis_name)
  return logits - largest[None, :, :, None]


def _log_probability_terms(
  shifted: jax.Array, targets: Targets
) -> list[jax.Array]:
  """Returns this device's part of the normaliser and of the target's logit."""
  return [
    jnp.sum(jnp.exp(shifted), axis=(0, 3)),
    # One rank has the target's logit; all others add zero.
    jnp.sum(jnp.where(targets.found, shifted, 0.0), axis=(0, 3)),
  ]
