"""Timing: alternating measurements, medians, ranges, progress bars.

If the measured functions alternate, a drift of the machine's speed affects all
of them. So ratios are computed between times of the same round.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import os
import time
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import track

K = TypeVar("K")
T = TypeVar("T")


def progress(
  items: Iterable[T], label: str, total: int | None = None
) -> Iterator[T]:
  """Yields items, with a progress bar on stderr that disappears at the end."""
  yield from track(
    items, label, total, transient=True, console=Console(stderr=True)
  )


def in_turns(
  measures: Mapping[K, Callable[[], T]], rounds: int, *, warm_up: int = 1,
  label: str | None = "rounds",
) -> dict[K, list[T]]:
  """Calls all functions once per round, in the order of the mapping.

  Example:
    >>> count = iter(range(9))
    >>> in_turns({"a": lambda: next(count), "b": lambda: -1}, 3, label=None)
    {'a': [1, 2, 3], 'b': [-1, -1, -1]}

  Args:
    measures: Functions that return one measurement each.
    rounds: Number of rounds whose measurements are returned.
    warm_up: Number of discarded rounds before them, in which programs are
      compiled and memory is touched.
    label: Text of the progress bar; None for no bar, for instance within
      another one.

  Returns:
    Measurements of each function, in the order of rounds.
  """
  found: dict[K, list[T]] = {key: [] for key in measures}
  turns = range(warm_up + rounds)
  for turn in turns if label is None else progress(turns, label):
    for key, measure in measures.items():
      value = measure()
      if turn >= warm_up:
        found[key].append(value)
  return found


def load_average() -> float:
  """Returns the number of processes that run or wait for a processor or disk.

  It is an average over about a minute (`os.getloadavg`).
  """
  return os.getloadavg()[0]


def seconds(function: Callable[[], Any]) -> float:
  """Returns the seconds that a call takes."""
  start = time.perf_counter()
  function()
  return time.perf_counter() - start


def seconds_when_warm(function: Callable[[], Any]) -> float:
  """Returns the seconds of the second of two calls.

  The first call is not timed: since the function's last turn, other functions
  may have evicted its data from the caches.
  """
  function()
  return seconds(function)


def cpu_seconds(function: Callable[[], T]) -> tuple[T, float]:
  """Returns a call's result and the seconds of processor time."""
  start = time.process_time()
  result = function()
  return result, time.process_time() - start


def summary(
  times: Sequence[float], first: Sequence[float] | None = None
) -> dict[str, float]:
  """Returns median, minimum and maximum of times, as a row's entries.

  Args:
    times: Seconds, one per round.
    first: Seconds of the reference in the same rounds. The entry "relative"
      is the median over rounds of the ratio to the reference.
  """
  found = {
    "median_s": float(np.median(times)), "min_s": min(times),
    "max_s": max(times),
  }
  if first is not None:
    ratios = np.array(times) / np.array(first)
    found["relative"] = float(np.median(ratios))
  return found


def range_text(values: Any, spec: str = ",.0f") -> str:
  """Formats values as "median (minimum to maximum)".

  Example:
    >>> range_text([3, 1, 2])
    '2 (1 to 3)'
  """
  low, middle, high = (
    format(float(f(values)), spec) for f in (np.min, np.median, np.max)
  )
  return f"{middle} ({low} to {high})"
