"""Gather of rows, by the preferred implementation that is available."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from parallel.kernels.gather_rows import gpu, reference, tpu
from parallel.kernels.selection import Implementation, SelectedKernel, choose


class Kernels(Protocol):
  """Kernels of a platform: the functions of ``tpu.py`` and ``gpu.py``."""

  def refusal(self, num_rows: int, width: int, dtype: jnp.dtype) -> str | None:
    """Returns the reason why a table is not supported, or None if it is.

    Args:
      num_rows: Number of rows of the table, N.
      width: Features of a row, F.
      dtype: Dtype of the table.
    """
    ...

  def gather(
    self, stored: jax.Array, ids: jax.Array, width: int,
    interpret: bool = False,
  ) -> jax.Array:
    """Returns rows of a table, ``[n, F]`` in device memory.

    Args:
      stored: Table in the layout of `order.lay_out_table` for the platform, in
        memory that the device can address.
      ids: int32 ``[n]``, from 0 to N - 1.
      width: Features of a row, F.
      interpret: Whether to run in the interpreter, on any machine.
    """
    ...


KERNELS: dict[str, Kernels] = {"tpu": tpu, "gpu": gpu}


def select_kernel(
  num_rows: int,
  width: int,
  dtype: Any,
  implementation: Implementation = "auto",
) -> SelectedKernel:
  """Selects the first preferred implementation that supports the table.

  Args:
    num_rows: Number of rows of the table, N.
    width: Features of a row, F.
    dtype: Dtype of the table.
    implementation: "auto", or names in order of preference; see
      `parallel.kernels.selection`.

  Raises:
    ValueError: A name is unknown, or no preferred implementation supports the
      table.
  """
  return choose(
    "gather_rows", implementation,
    lambda kind: KERNELS[kind].refusal(num_rows, width, dtype),
  )


def gather_rows(
  stored: jax.Array, ids: jax.Array, width: int, chosen: SelectedKernel
) -> jax.Array:
  """Gathers rows of a table; ``reference.gather_rows`` specifies the result.

  Args:
    stored: Table in the layout of `order.lay_out_table` for ``chosen.kind``.
    ids: int32 ``[n]``, numbers of rows from 0 to N - 1.
    width: Features of a row, F.
    chosen: Result of `select_kernel`.

  Returns:
    ``[n, F]`` in the dtype of the table.

  Example:
    >>> rows = jnp.arange(6, dtype=jnp.float32).reshape(3, 2)
    >>> chosen = select_kernel(3, 2, rows.dtype, "reference")
    >>> gather_rows(rows, jnp.array([2, 0]), 2, chosen).tolist()
    [[4.0, 5.0], [0.0, 1.0]]
  """
  if chosen.name == "reference":
    return reference.gather_rows(stored, ids)
  kernel = KERNELS[chosen.kind]
  return kernel.gather(stored, ids, width, chosen.interpret)
