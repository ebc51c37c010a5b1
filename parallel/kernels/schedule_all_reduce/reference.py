"""Runs any schedule of an all-reduce from its table: the specification.

A table is int32 ``[rounds, n, 4]``. In each round, device i

  - sends chunk ``[i, 1]`` of its array to device ``[i, 0]``, or has -1 in both;
  - receives into chunk ``[i, 2]`` and, by ``[i, 3]``, adds what arrives (0) or
    copies it (1), or has -1 in both.

All sends of a round read what was there before the round. Sums are rounded to
the array's dtype at each addition.

Shape legend: n = devices, C = chunks of rows, T = rows, K = channels.
"""

import jax
import numpy as np

# Columns of a table, and the values of the last one.
SEND_TO, SENT, RECEIVED, OPERATION = range(4)
ADD, COPY = 0, 1


def num_chunks(table: np.ndarray) -> int:
  """Returns how many chunks a table has: the largest number in it plus one."""
  return int(table[..., [SENT, RECEIVED]].max()) + 1


def senders(table: np.ndarray) -> np.ndarray:
  """Checks a table, and returns from whom each device receives.

  Args:
    table: int32 ``[rounds, n, 4]``.

  Returns:
    int32 ``[rounds, n]``; -1 where a device receives nothing.

  Raises:
    ValueError: The array is not a table. The message names the round and the
      device where sends and receives do not match.
  """
  table = np.asarray(table)
  if table.ndim != 3 or table.shape[-1] != 4 or table.dtype != np.int32:
    raise ValueError(
      f"schedule table: {table.dtype} {table.shape} must be int32 "
      "[rounds, devices, 4]"
    )
  rounds, n, _ = table.shape
  heard = np.full((rounds, n), -1, np.int32)
  for turn, device in np.ndindex(rounds, n):
    where = f"schedule table, round {turn}, device {device}"
    to, sent, received, operation = table[turn, device]
    if not -1 <= to < n or to == device:
      raise ValueError(f"{where}: sends to {to}; another of {n}, or -1")
    if (to < 0) != (sent < 0):
      raise ValueError(f"{where}: sends chunk {sent} to {to}; both or -1")
    if (received < 0) != (operation < 0) or operation > COPY:
      raise ValueError(
        f"{where}: receives chunk {received} with operation {operation}; "
        f"{ADD} (add) or {COPY} (copy), or both -1"
      )
    if to >= 0:
      if heard[turn, to] >= 0:
        raise ValueError(
          f"{where}: {to} hears {heard[turn, to]} in this round, too"
        )
      heard[turn, to] = device
  # Every message must have a receiver that expects it, and the other way round:
  # a kernel would wait forever, or leave a message behind.
  silent = (heard < 0) != (table[..., RECEIVED] < 0)
  if silent.any():
    turn, device = np.argwhere(silent)[0]
    raise ValueError(
      f"schedule table, round {turn}, device {device}: receives chunk "
      f"{table[turn, device, RECEIVED]}, is sent one by {heard[turn, device]}"
    )
  return heard


def schedule_all_reduce(x: jax.Array, table: np.ndarray) -> jax.Array:
  """Specifies `api.schedule_all_reduce`, for all devices on one of them.

  Operand and result are stacked over devices, ``[n, T, K]``; the number of
  chunks C divides T.
  """
  heard = senders(table)
  n, shape = x.shape[0], x.shape
  x = x.reshape(n, num_chunks(table), -1, shape[-1])  # [n, C, rows, K]
  for turn in range(len(table)):
    new = x  # x stays as it was before the round, since all sends read that
    for device in range(n):
      sender = heard[turn, device]
      if sender < 0:
        continue
      _, _, received, operation = table[turn, device]
      arrived = x[sender, table[turn, sender, SENT]]
      if operation == ADD:
        arrived = x[device, received] + arrived
      new = new.at[device, received].set(arrived)
    x = new
  return x.reshape(shape)
