"""A gather of rows, by the preferred implementation that is available."""

from typing import Any

import jax

from parallel.kernels.gather_rows import gpu, reference, tpu
from parallel.kernels.selection import Choice, Implementation, choose

_KERNELS = {"tpu": tpu, "gpu": gpu}


def choice(
  num_rows: int,
  width: int,
  dtype: Any,
  implementation: Implementation = "auto",
) -> Choice:
  """Returns which implementation takes a table, and why others do not.

  Args:
    num_rows: N, the rows of the table.
    width: F, the features of a row.
    dtype: Dtype of the table.
    implementation: "auto", or names in order of preference; see
      `parallel.kernels.selection`.

  Raises:
    ValueError: A name is unknown, or no preferred kernel takes the table.
  """
  return choose(
    "gather_rows", implementation,
    lambda kind: _KERNELS[kind].refusal(num_rows, width, dtype),
  )


def gather_rows(
  stored: jax.Array, ids: jax.Array, width: int, chosen: Choice
) -> jax.Array:
  """Gathers rows of a table; ``reference.gather_rows`` specifies the result.

  Args:
    stored: The table, laid out by `order.stored` for ``chosen.kind``.
    ids: int32 ``[n]``, from 0 to N - 1.
    width: F, the features of a row.
    chosen: What `choice` returned.

  Returns:
    ``[n, F]``.
  """
  if chosen.name == "reference":
    return reference.gather_rows(stored, ids)
  kernel = _KERNELS[chosen.kind]
  return kernel.gather(stored, ids, width, chosen.interpret)
