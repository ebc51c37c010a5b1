"""Pairwise covering arrays: tables of options for `pytest.mark.parametrize`.

Most faults of combinations need two options with certain values. A covering
array contains each valid pair of values in at least one row, with far fewer
rows than there are combinations.

Written here since all combinations can be listed: the pairs that an exclusion
permits are then those of the combinations that it permits. The filters of
allpairspy are also asked about unfinished rows, so each of them must allow for
missing options; and it would be a dependency that replaces 20 lines.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import itertools
from typing import Any

Row = dict[str, Any]


def pairs(row: Row) -> Iterator[Any]:
  """Yields the pairs of (option, number or name of its value) of a row."""
  return itertools.combinations(row.items(), 2)


def valid(
  options: Mapping[str, Sequence[Any]],
  excluded: Callable[[Row], bool] = lambda row: False,
) -> list[Row]:
  """Returns all combinations of the options that are not excluded."""
  every = itertools.product(*options.values())
  named = (dict(zip(options, values, strict=True)) for values in every)
  return [row for row in named if not excluded(row)]


def rows(
  options: Mapping[str, Sequence[Any]],
  excluded: Callable[[Row], bool] = lambda row: False,
) -> list[Row]:
  """Returns rows that contain every pair of values that a valid row contains.

  Greedy: the next row is the first of those with the most pairs that no row
  has yet. At least as many rows are needed as the two largest options have
  pairs.

  >>> for row in rows({"a": (0, 1), "b": (0, 1), "c": (0, 1)}):
  ...   print(*row.values())
  0 0 0
  0 1 1
  1 0 1
  1 1 0

  Args:
    options: Values of each option, hashable.
    excluded: Whether a combination of all options is not to be tested.
  """
  every = valid(options, excluded)
  number: dict[Any, int] = {}  # bit of each pair
  masks = [
    sum(1 << number.setdefault(x, len(number)) for x in pairs(row))
    for row in every
  ]
  left, found = (1 << len(number)) - 1, []
  while left:
    best = max(range(len(every)), key=lambda i: (masks[i] & left).bit_count())
    found.append(every[best])
    left &= ~masks[best]
  return found


def label(row: Row) -> str:
  """Returns the name of a row, for ``ids``."""
  return " ".join(f"{key}={value}" for key, value in row.items())
