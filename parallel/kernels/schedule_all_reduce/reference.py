"""All-reduce by an arbitrary schedule's table: the specification.

A table is int32 ``[rounds, n, 4]``. In each round, device i

  - sends chunk ``[i, 1]`` of its array to device ``[i, 0]``, or nothing if both
    are -1;
  - receives into chunk ``[i, 2]``, and adds (``[i, 3]`` = 0) or copies (1) the
    received chunk, or receives nothing if both are -1.

All sends of a round read the array before the round. Sums are rounded to the
array's dtype at each addition.

Shape legend: n = devices, C = chunks of rows, T = rows, K = channels.
"""

import jax
import numpy as np

# Columns of a table, and the values of the column OPERATION.
SEND_TO, SENT_CHUNK, RECEIVED_CHUNK, OPERATION = range(4)
ADD, COPY = 0, 1


def num_chunks(table: np.ndarray) -> int:
  """Returns the number of chunks of a table: the largest chunk number + 1."""
  return int(table[..., [SENT_CHUNK, RECEIVED_CHUNK]].max()) + 1


def senders(table: np.ndarray) -> np.ndarray:
  """Checks a table, and returns the sender to each device in each round.

  Args:
    table: int32 ``[rounds, n, 4]``.

  Returns:
    int32 ``[rounds, n]``; -1 if a device receives nothing in a round.

  Raises:
    ValueError: The array is not a table. The message contains the round and the
      device for which sends and receives do not match.

  Example:
    >>> exchange = np.array([[[1, 0, 0, ADD], [0, 0, 0, ADD]]], np.int32)
    >>> senders(exchange).tolist()
    [[1, 0]]
  """
  table = np.asarray(table)
  if table.ndim != 3 or table.shape[-1] != 4 or table.dtype != np.int32:
    raise ValueError(
      f"the schedule table has dtype {table.dtype} and shape {table.shape}; it "
      "must be int32 [rounds, devices, 4]"
    )
  rounds, n, _ = table.shape
  sender_of = np.full((rounds, n), -1, np.int32)
  for turn, device in np.ndindex(rounds, n):
    where = f"schedule table, round {turn}, device {device}"
    to, sent, received, operation = table[turn, device]
    if not -1 <= to < n or to == device:
      raise ValueError(
        f"{where}: it sends to device {to}, which must be another of the {n} "
        "devices, or -1 for no send"
      )
    if (to < 0) != (sent < 0):
      raise ValueError(
        f"{where}: it sends chunk {sent} to device {to}; chunk and device must "
        "both be -1, or neither"
      )
    if (received < 0) != (operation < 0) or operation > COPY:
      raise ValueError(
        f"{where}: it receives chunk {received} with operation {operation}; "
        f"the operation must be {ADD} (add) or {COPY} (copy), or chunk and "
        "operation must both be -1"
      )
    if to >= 0:
      if sender_of[turn, to] >= 0:
        raise ValueError(
          f"{where}: it sends to device {to}, which also receives from device "
          f"{sender_of[turn, to]} in this round; a device receives at most "
          "once per round"
        )
      sender_of[turn, to] = device
  # Every message needs a receive in the same round, and every receive a
  # message: otherwise a kernel would deadlock or leave a message unread.
  silent = (sender_of < 0) != (table[..., RECEIVED_CHUNK] < 0)
  if silent.any():
    turn, device = np.argwhere(silent)[0]
    raise ValueError(
      f"schedule table, round {turn}, device {device}: it receives chunk "
      f"{table[turn, device, RECEIVED_CHUNK]} from device "
      f"{sender_of[turn, device]}; "
      "both must be -1, or neither"
    )
  return sender_of


def schedule_all_reduce(x: jax.Array, table: np.ndarray) -> jax.Array:
  """Implements `api.schedule_all_reduce`, for all devices in one array.

  Operand and result are stacked over devices, ``[n, T, K]``; the number of
  chunks C divides T.
  """
  sender_of = senders(table)
  n, shape = x.shape[0], x.shape
  x = x.reshape(n, num_chunks(table), -1, shape[-1])  # [n, C, rows, K]
  for turn in range(len(table)):
    new = x  # all sends of the round read x, so that results go to a new array
    for device in range(n):
      sender = sender_of[turn, device]
      if sender < 0:
        continue
      _, _, received, operation = table[turn, device]
      arrived = x[sender, table[turn, sender, SENT_CHUNK]]
      if operation == ADD:
        arrived = x[device, received] + arrived
      new = new.at[device, received].set(arrived)
    x = new
  return x.reshape(shape)
