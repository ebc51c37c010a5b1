"""Tables of textbook schedules, shared by tests and benchmarks.

``reference.py`` defines the format of a table. n = devices.
"""

import numpy as np

from parallel.kernels.schedule_all_reduce.reference import ADD, COPY


def ring(n: int) -> np.ndarray:
  """Returns the table of a ring reduce-scatter and all-gather of n chunks."""
  table = np.zeros((2 * (n - 1), n, 4), np.int32)
  for turn, device in np.ndindex(2 * (n - 1), n):
    # A device starts with the chunk of its number, then forwards the chunk that
    # it received in the previous round.
    sent = (device - turn) % n
    operation = ADD if turn < n - 1 else COPY
    table[turn, device] = (device + 1) % n, sent, (sent - 1) % n, operation
  return table


def recursive_doubling(n: int) -> np.ndarray:
  """Returns the table of recursive doubling: exchanges at distance 1, 2, 4, ...

  n must be a power of two.

  Example:
    >>> recursive_doubling(2).tolist()  # send to, sent, received, ADD
    [[[1, 0, 0, 0], [0, 0, 0, 0]]]
  """
  rounds = n.bit_length() - 1
  table = np.zeros((rounds, n, 4), np.int32)
  for turn, device in np.ndindex(rounds, n):
    table[turn, device] = device ^ (1 << turn), 0, 0, ADD
  return table


def chain(n: int) -> np.ndarray:
  """Returns the table of a sum along a chain to device 0, then of copies back.

  In each round all devices except two are idle.
  """
  table = np.full((2 * (n - 1), n, 4), -1, np.int32)
  for turn in range(n - 1):
    down, up = n - 1 - turn, turn
    table[turn, down, :2] = down - 1, 0
    table[turn, down - 1, 2:] = 0, ADD
    table[n - 1 + turn, up, :2] = up + 1, 0
    table[n - 1 + turn, up + 1, 2:] = 0, COPY
  return table


CASES = {
  "ring of 2": ring(2),
  "ring of 4": ring(4),
  "recursive doubling of 4": recursive_doubling(4),
  "chain of 3": chain(3),
}
