"""A gather of rows, by the preferred implementation that is available."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from parallel.kernels.gather_rows import gpu, reference, tpu
from parallel.kernels.selection import Choice, Implementation, choose


class Kernels(Protocol):
  """Kernels of a platform: the functions of ``tpu.py`` and ``gpu.py``."""

  def refusal(self, num_rows: int, width: int, dtype: jnp.dtype) -> str | None:
    """Returns why the kernel does not take a table, or None if it does.

    Args:
      num_rows: N, the rows of the table.
      width: F, the features of a row.
      dtype: Dtype of the table.
    """
    ...

  def gather(
    self, stored: jax.Array, ids: jax.Array, width: int,
    interpret: bool = False,
  ) -> jax.Array:
    """Returns rows of a table, ``[n, F]`` in the device's memory.

    Args:
      stored: The table, laid out by `order.stored` for the platform, in memory
        that the device can address.
      ids: int32 ``[n]``, from 0 to N - 1.
      width: F, the features of a row.
      interpret: Whether to run in the interpreter, on any machine.
    """
    ...


KERNELS: dict[str, Kernels] = {"tpu": tpu, "gpu": gpu}


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
    lambda kind: KERNELS[kind].refusal(num_rows, width, dtype),
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
  kernel = KERNELS[chosen.kind]
  return kernel.gather(stored, ids, width, chosen.interpret)
