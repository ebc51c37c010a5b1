"""Explicit training state: parameters that a rule updates, not a gradient.

Examples are the bias of a router, which balances the load of experts, and
counters. Such a parameter has a rule (`Parameter.update`). During the forward
pass a model reports a statistic for it. The statistic follows the path of a
gradient: the same code sums it over microbatches and data-parallel ranks, and
it counts exactly once, even if layers are rematerialised.
"""

import jax
import jax.numpy as jnp

from parallel.collectives import varying, varying_axes


@jax.custom_vjp
def report(x: jax.Array, state: jax.Array, statistic: jax.Array) -> jax.Array:
  """Returns ``x``, and reports a statistic for an explicit training state.

  Args:
    x: Any array on which the loss depends. The model must use the result
      instead of it; otherwise the statistic is lost.
    state: The state, as the model reads it from its parameters. The model must
      not differentiate other uses of it (``jax.lax.stop_gradient``).
    statistic: float32 array of the state's shape, such as the number of tokens
      per expert. For a state that tensor ranks share, all devices report equal
      values, outside of functions that are mapped over the ranks of a device.

  Example:
    >>> def loss(state, x):
    ...   return jnp.sum(report(x, state, jnp.float32(x.size)))
    >>> jax.grad(loss)(jnp.zeros(()), jnp.ones(3)).item()
    3.0
  """
  return x


def _forward(x, state, statistic):
  return x, (varying(statistic, *varying_axes(state)), statistic)


def _backward(residuals, dx):
  cotangent, statistic = residuals
  return dx, cotangent, jnp.zeros_like(statistic)


report.defvjp(_forward, _backward)
