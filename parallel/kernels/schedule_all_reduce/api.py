"""All-reduce by an arbitrary schedule, given as a table of integers."""

import jax
from jax import lax
import numpy as np

from parallel.kernels import calls
from parallel.kernels.schedule_all_reduce import tpu
from parallel.kernels.schedule_all_reduce.reference import (
  num_chunks,
  senders,
)
from parallel.kernels.selection import Implementation, SelectedKernel, choose


def select_kernel(
  x: jax.Array, table: np.ndarray, implementation: Implementation = "auto"
) -> SelectedKernel:
  """Selects the first preferred implementation that supports the operands.

  Args:
    x: This device's summand, ``[..., K]``, or a ``jax.ShapeDtypeStruct``: only
      shape and dtype are used.
    table: int32 ``[rounds, n, 4]`` for n devices.
    implementation: "auto", or names in order of preference.

  Raises:
    ValueError: A name is unknown, or no preferred implementation supports the
      operands.
  """

  def refusal(kind):
    if kind != "tpu":
      return "no kernel for this platform"
    return tpu.refusal(
      calls.leading_size(x), x.shape[-1], x.dtype, num_chunks(table)
    )

  return choose("schedule_all_reduce", implementation, refusal)


def schedule_all_reduce(
  x: jax.Array,
  table: np.ndarray,
  *,
  axis_name: str,
  implementation: Implementation = "auto",
) -> jax.Array:
  """Sums over a mesh axis by executing the table of a schedule.

  Must be called inside ``jax.shard_map``. The caller must have proven that the
  schedule computes an all-reduce (`parallel.plans.schedules`); the kernel does
  not check that.

  Args:
    x: This device's summand, ``[..., K]``; its rows are split into chunks.
    table: int32 ``[rounds, n, 4]`` of (send to, chunk sent, chunk received,
      operation) for n devices; see ``reference.py``.
    axis_name: Mesh axis to sum over.
    implementation: "auto", or names in order of preference; see
      `parallel.kernels.selection`. The reference is a ``psum``, whose order
      of summation is chosen by the backend.

  Returns:
    The sum, ``[..., K]``; device-varying by type, though equal in value.

  Raises:
    ValueError: The array is not a table, the table is for another number of
      devices, a name is unknown, or no preferred implementation supports the
      operands.
  """
  # Called for its checks: a kernel with unmatched messages would deadlock.
  senders(table)
  if table.shape[1] != lax.axis_size(axis_name):
    raise ValueError(
      f"the schedule table is for {table.shape[1]} devices, but the axis "
      f"{axis_name!r} has {lax.axis_size(axis_name)}"
    )
  chosen = select_kernel(x, table, implementation)
  if chosen.name == "reference":
    return lax.pcast(lax.psum(x, axis_name), axis_name, to="varying")
  rows = calls.as_rows(x)[0]
  out = tpu.schedule_all_reduce(
    rows, table, axis_name=axis_name, interpret=chosen.interpret
  )
  return out.reshape(x.shape)
