"""Split of a batch into microbatches."""

from typing import Any

import jax
import jax.numpy as jnp


def split(batch: Any, count: int, num_lead: int = 0) -> Any:
  """Splits examples into microbatches, for a scan.

  Args:
    batch: Tree of ``[..., M * B, ...]``.
    count: M, the number of microbatches.
    num_lead: The number of dims before the examples.

  Returns:
    Tree of ``[M, ..., B, ...]``.

  Example:
    >>> split(jnp.arange(6, dtype=jnp.int32), 3).tolist()
    [[0, 1], [2, 3], [4, 5]]
  """

  def cut(x):
    lead, rest = x.shape[:num_lead], x.shape[num_lead + 1 :]
    parts = x.reshape(*lead, count, -1, *rest)
    return jnp.moveaxis(parts, num_lead, 0)

  return jax.tree.map(cut, batch)
