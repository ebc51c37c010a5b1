"""Measured rates of memory: read, write, copy, triad and latency.

The loops are compiled by numba (extra ``memory``): NumPy needs several passes
for some of them, and loops in Python are slower than memory.

Example:
  >>> import numpy as np
  >>> from parallel.plans.placement import rates
  >>> x = np.zeros(2**20, np.float32)
  >>> found = rates.measure([x, x.copy(), x.copy()], num_threads=1)
  >>> sorted(found), min(found.values()) > 1e6  # bytes per second
  (['copy', 'read', 'triad', 'write'], True)
"""

from collections.abc import Sequence
import functools
import os
import statistics
import time
from types import ModuleType, SimpleNamespace

import numpy as np

# Number of timed repetitions; their median is reported.
NUM_REPEATS = 5


def imported_numba(what: str) -> ModuleType:
  """Returns the module numba.

  Args:
    what: Name of the function that needs it, for the error.

  Raises:
    ValueError: numba is not installed.
  """
  try:
    import numba
  except ImportError as error:
    raise ValueError(
      f"{what} needs numba: pip install 'caatnet[memory]'"
    ) from error
  return numba


@functools.cache
def _loops() -> SimpleNamespace:
  """Returns compiled loops over arrays: read, write, copy, triad, and chase.

  Raises:
    ValueError: numba is not installed.
  """
  numba = imported_numba("measuring memory")
  loop = numba.njit(parallel=True, fastmath=True)

  @loop
  def read(a, b, c):
    total = np.float32(0)
    for i in numba.prange(len(a)):
      total += a[i]
    return total

  @loop
  def write(a, b, c):
    for i in numba.prange(len(a)):
      a[i] = np.float32(1)
    return np.float32(0)

  @loop
  def copy(a, b, c):
    for i in numba.prange(len(a)):
      a[i] = b[i]
    return np.float32(0)

  @loop
  def triad(a, b, c):
    for i in numba.prange(len(a)):
      a[i] = b[i] + np.float32(3) * c[i]
    return np.float32(0)

  @numba.njit
  def chase(order, count):
    place = order[0]
    for _ in range(count):
      place = order[place]
    return place

  return SimpleNamespace(
    read=read, write=write, copy=copy, triad=triad, chase=chase, numba=numba
  )


# Bytes that a loop moves per byte of an array: reads and writes.
BYTES_MOVED = {"read": 1, "write": 1, "copy": 2, "triad": 3}


def measure(
  arrays: Sequence[np.ndarray], num_threads: int | None = None,
  names: Sequence[str] = tuple(BYTES_MOVED),
) -> dict[str, float]:
  """Returns bytes per second by loop (read, write, copy, triad, as in STREAM).

  Args:
    arrays: Three arrays float32 ``[N]``. They are overwritten.
    num_threads: Number of threads; None for all cores.
    names: Loops to time; each takes the median of `NUM_REPEATS` times.

  Raises:
    ValueError: numba is not installed.
  """
  loops = _loops()
  most = loops.numba.config.NUMBA_NUM_THREADS
  before = loops.numba.get_num_threads()
  loops.numba.set_num_threads(min(num_threads or os.cpu_count() or 1, most))
  try:
    found = {}
    for name in names:
      loop = getattr(loops, name)
      loop(*(a[:64] for a in arrays))  # compiles
      seconds = []
      for _ in range(NUM_REPEATS):
        start = time.perf_counter()
        loop(*arrays)
        seconds.append(time.perf_counter() - start)
      found[name] = (
        BYTES_MOVED[name] * arrays[0].nbytes / statistics.median(seconds)
      )
    return found
  finally:
    loops.numba.set_num_threads(before)


def read(array: np.ndarray) -> None:
  """Reads an array float32 ``[N]`` with all cores.

  Raises:
    ValueError: numba is not installed.
  """
  _loops().read(array, array, array)


def latency_s(array: np.ndarray, num_loads: int = 2**18) -> float:
  """Returns the seconds of a load whose address is the value loaded before.

  Args:
    array: Memory, uint8 ``[N]``, overwritten with one cycle through all of its
      cache lines in random order.
    num_loads: Number of loads.

  Raises:
    ValueError: numba is not installed.
  """
  chase = _loops().chase
  # One int64 for each line of 64 bytes.
  order = array[: len(array) // 64 * 64].view(np.int64)
  lines = 8 * np.random.default_rng(0).permutation(len(order) // 8)
  order[lines] = np.roll(lines, -1)
  chase(order, 1)  # compiles
  seconds = []
  for _ in range(NUM_REPEATS):
    start = time.perf_counter()
    chase(order, num_loads)
    seconds.append(time.perf_counter() - start)
  return statistics.median(seconds) / num_loads
