"""What a gather of rows is: the specification of the kernels beside it."""

import jax
import jax.numpy as jnp


def gather_rows(rows: jax.Array, ids: jax.Array) -> jax.Array:
  """Specifies `api.gather_rows`: rows of ``[N, F]`` by ids, ``[n, F]``."""
  return jnp.take(rows, ids, axis=0, mode="clip")
