"""What a gather of rows is: the specification of the kernels beside it."""

import jax
import jax.numpy as jnp


def gather_rows(rows: jax.Array, ids: jax.Array) -> jax.Array:
  """Returns rows of a table.

  Args:
    rows: ``[N, F]``.
    ids: int32 ``[n]``, from 0 to N - 1.

  Returns:
    ``[n, F]``.
  """
  return jnp.take(rows, ids, axis=0, mode="clip")
