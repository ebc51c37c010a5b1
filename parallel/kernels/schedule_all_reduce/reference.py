"""Any schedule of an all-reduce, from its table: the specification.

A table is int32 ``[rounds, n, 4]``: in a round, device i sends chunk ``[i, 1]``
of its array to device ``[i, 0]``, receives into chunk ``[i, 2]``, and, by
``[i, 3]``, adds what arrives or copies it; -1 where it sends or receives
nothing. All sends of a round read what was there before it. Sums are rounded
to the array's dtype at each addition.

Shape legend: n = devices, C = chunks of rows, T = rows, K = channels.
"""

import jax
import numpy as np

SEND_TO, SENT, RECEIVED, OPERATION = range(4)
ADD, COPY = 0, 1


def num_chunks(table: np.ndarray) -> int:
  """The largest chunk that is named, plus one."""
  return int(table[..., [SENT, RECEIVED]].max()) + 1


def senders(table: np.ndarray) -> np.ndarray:
  """int32 ``[rounds, n]``: from whom each device receives; -1: nobody.

  Raises:
    ValueError: A table that is none, with the round and device.
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
  silent = (heard < 0) != (table[..., RECEIVED] < 0)
  if silent.any():
    turn, device = np.argwhere(silent)[0]
    raise ValueError(
      f"schedule table, round {turn}, device {device}: receives chunk "
      f"{table[turn, device, RECEIVED]}, is sent one by {heard[turn, device]}"
    )
  return heard


def schedule_all_reduce(x: jax.Array, table: np.ndarray) -> jax.Array:
  """Runs a schedule on all devices' arrays.

  Args:
    x: ``[n, T, K]``; the number of chunks divides T.
    table: See the module.

  Returns:
    ``[n, T, K]``.

  Raises:
    ValueError: See `senders`.
  """
  heard = senders(table)
  n, shape = x.shape[0], x.shape
  x = x.reshape(n, num_chunks(table), -1, shape[-1])
  for turn in range(len(table)):
    new = x
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
