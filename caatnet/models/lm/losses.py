"""Losses over a vocabulary that is cut over tensor ranks.

Every rank has a slice of the logits. The functions reduce O(1) numbers per
token over the tensor axis instead of gathering V logits per token and rank.

Shape legend: R = ranks of this device, B = batch, T = position, V = vocabulary
of one rank.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from parallel.collectives import on_cpu
from parallel.kernels.calls import unify_varying_axes


class Targets(NamedTuple):
  """Target tokens, and the layout of the logits.

  Attributes:
    tokens: The targets, int ``[B, T]``.
    token_ids: int ``[R, V]``, the token of each logit of this device.
    axis_name: Name of the axis, or names of the axes, over which the vocabulary
      is cut.
  """

  tokens: jax.Array
  token_ids: jax.Array
  axis_name: str | tuple[str, ...]


def cross_entropy(logits: jax.Array, targets: Targets) -> jax.Array:
  """Computes the cross-entropy: log(sum of exp(logits)) - target's logit.

  Args:
    logits: float32 ``[R, B, T, V]``; -inf for padding of the vocabulary.
    targets: The target tokens.

  Returns:
    Cross-entropy in nats, float32 ``[B, T]``, equal on all tensor ranks.
  """
  # The maximum cancels in the loss, so it needs no gradient.
  largest = jnp.max(lax.stop_gradient(logits), axis=(0, 3))
  # [2, B, T], so that one all-reduce sums both.
  sums = jnp.stack(
    _cross_entropy_sums(logits, _global_max(largest, targets), targets)
  )
  normaliser, target = lax.psum(sums, targets.axis_name)
  return jnp.log(normaliser) - target


def target_scores(
  logits: jax.Array, targets: Targets
) -> dict[str, jax.Array]:
  """Returns targets' log-probabilities, and whether greedy decoding picks them.

  Args:
    logits: float32 ``[R, B, T, V]``; -inf for padding of the vocabulary.
    targets: The target tokens.

  Returns:
    ``{"log_probability": float32 [B, T], "greedy": bool [B, T]}``, equal on all
    tensor ranks; log-probabilities are in nats. Among equal logits the greedy
    choice is the lowest token, as for argmax.
  """
  best, choice = _local_argmax(  # of this device
    lax.stop_gradient(logits), targets.token_ids
  )
  largest = _global_max(best, targets)
  # A device whose choice is the target adds 1. A device with the largest logit
  # at a lower token subtracts 2. So the sum is 1 for greedy targets only. The
  # compared logits are behind optimisation barriers: if XLA recomputed them in
  # another fusion, they could differ in the last bit.
  vote = jnp.where(choice == targets.tokens, 1.0, 0.0)
  vote = jnp.where(choice < targets.tokens, -2.0, vote)
  vote = jnp.where(best == largest, vote, 0.0)
  sums = jnp.stack([*_cross_entropy_sums(logits, largest, targets), vote])
  normaliser, target, votes = lax.psum(sums, targets.axis_name)
  return {
    "log_probability": target - jnp.log(normaliser),
    "greedy": votes == 1.0,
  }


def _local_argmax(
  logits: jax.Array, token_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns this device's largest logit and its token, ``[B, T]`` each.

  Of several tokens with the largest logit, the lowest is returned.
  """

  def larger(a, b):
    first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
    return tuple(jnp.where(first, x, y) for x, y in zip(a, b, strict=True))

  ids = jnp.broadcast_to(token_ids[:, None, None, :], logits.shape)
  nothing = jnp.float32(-jnp.inf), jnp.int32(jnp.iinfo(jnp.int32).max)
  return lax.optimization_barrier(
    lax.reduce((logits, ids), nothing, larger, (0, 3))
  )


def _global_max(of_device: jax.Array, targets: Targets) -> jax.Array:
  """Returns the largest logit over all ranks, from those ``of_device``.

  Both are ``[B, T]``, a logit for each of T positions of B sequences.

  The barrier prevents XLA:TPU from moving the cast to float32 after the
  reduction.
  """
  return lax.pmax(lax.optimization_barrier(of_device), targets.axis_name)


def _cross_entropy_sums(
  logits: jax.Array, largest: jax.Array, targets: Targets
) -> list[jax.Array]:
  """Returns this device's summands of the normaliser and the target's logit.

  The largest logit is subtracted first, so that exp does not overflow.
  """
  if on_cpu():
    return list(_cpu_cross_entropy_sums(*unify_varying_axes(
      logits, largest, targets.tokens, targets.token_ids
    )))
  shifted = logits - largest[None, :, :, None]
  # One rank has the target's logit; all other ranks contribute zero.
  is_target = (
    targets.token_ids[:, None, None, :] == targets.tokens[None, :, :, None]
  )
  return [
    jnp.sum(jnp.exp(shifted), axis=(0, 3)),
    jnp.sum(jnp.where(is_target, shifted, 0.0), axis=(0, 3)),
  ]


@jax.custom_vjp
def _cpu_cross_entropy_sums(
  logits: jax.Array, largest: jax.Array, tokens: jax.Array, ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Computes `_cross_entropy_sums` with fewer passes over the logits, for CPUs.

  The target's logit is gathered by its index instead of selected by a mask, and
  the backward reads only the saved exponentials.
  """
  return _cpu_sums_forward(logits, largest, tokens, ids)[0]


def _cpu_sums_forward(logits, largest, tokens, ids):
  def look_up(logits, ids):  # [B, T, V] and [V] of a lane
    place = jnp.clip(tokens - ids[0], 0, len(ids) - 1)
    found = jnp.take_along_axis(logits, place[..., None], axis=-1)[..., 0]
    return jnp.where(ids[place] == tokens, found - largest, 0.0)

  exponentials = jnp.exp(logits - largest[None, :, :, None])
  sums = (
    jnp.sum(exponentials, axis=(0, 3)),
    jnp.sum(jax.vmap(look_up)(logits, ids), axis=0),
  )
  return sums, (exponentials, tokens, ids)


def _cpu_sums_backward(residuals, cotangents):
  exponentials, tokens, ids = residuals
  d_normaliser, d_target = (x[None, :, :, None] for x in cotangents)
  is_target = ids[:, None, None, :] == tokens[None, :, :, None]
  d_logits = exponentials * d_normaliser + jnp.where(is_target, d_target, 0.0)
  return d_logits, None, None, None


_cpu_cross_entropy_sums.defvjp(_cpu_sums_forward, _cpu_sums_backward)
