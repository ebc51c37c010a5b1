"""Gather of rows in plain jnp: the specification of the kernels."""

import jax
import jax.numpy as jnp


def gather_rows(rows: jax.Array, ids: jax.Array) -> jax.Array:
  """Implements `api.gather_rows`: ``[N, F]``, ids ``[n]`` -> ``[n, F]``."""
  return jnp.take(rows, ids, axis=0, mode="clip")
