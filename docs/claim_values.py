"""Readers of numbers: keys of JSON files, rows of CSV files, printed text."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import csv
import io
import json
import pathlib
import re
import statistics
from typing import Any

from docs.claim_schema import Claim, ExpectedNumber

_REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
  "min": min, "max": max, "mean": statistics.fmean,
  "median": statistics.median, "sum": sum, "count": len,
}


def read(claim: Claim, folder: pathlib.Path, printed: str) -> dict[
  str, list[float]
]:
  """Returns the numbers of a claim after its commands were run.

  Args:
    claim: The claim; numbers that only the log records are left out.
    folder: Folder that the commands ran in, with a copy of results/.
    printed: Text that they printed.

  Raises:
    ValueError: A number cannot be read; the message names it.
  """
  found: dict[str, list[float]] = {}
  later = []
  for name, expected in claim.expected.items():
    if expected.log:
      continue
    if expected.ratio:
      later.append((name, expected))
      continue
    try:
      found[name] = read_one(expected, folder, printed, claim.writes)
    except (ValueError, OSError, LookupError, TypeError) as error:
      raise ValueError(f"claim {claim.number}, {name}: {error}") from error
  for name, expected in later:
    over, under = (
      statistics.fmean(found.get(key, claim.expected[key].values))
      for key in expected.ratio
    )
    found[name] = [over / under * expected.scale]
  return found


def read_one(
  expected: ExpectedNumber,
  folder: pathlib.Path,
  printed: str = "",
  writes: Mapping[str, str] | None = None,
) -> list[float]:
  """Returns one expected number, or one per seed.

  Args:
    expected: Description of the number, and of how it is read.
    folder: Folder of its file.
    printed: Text of its commands.
    writes: File in results/ -> file that was written instead.

  Raises:
    ValueError: Nothing matches, or the match is no number.
    OSError: A file is missing.
    LookupError: A key is missing.
  """
  if expected.printed and expected.statistic == "count":
    return [float(len(re.findall(expected.printed, printed, re.M)))]
  if expected.printed:
    match = re.search(expected.printed, printed, re.M)
    if match is None:
      raise ValueError(f"nothing printed matches {expected.printed!r}")
    values = [float(match["value"].replace(",", ""))]
  else:
    name = expected.output or expected.file
    text = (folder / (writes or {}).get(name, name)).read_text()
    if expected.column:
      values = _column(text, expected)
    else:
      values = list(map(_number, select_by_pointer(
        json.loads(text), expected.pointer.strip("/").split("/")
      )))
  if expected.statistic:
    values = [float(_REDUCTIONS[expected.statistic](values))]
  return [value * expected.scale + expected.offset for value in values]


def select_by_pointer(content: Any, path: Sequence[str]) -> Iterator[Any]:
  """Yields the values that a pointer selects; see `ExpectedNumber.pointer`.

  Example:
    >>> from docs.claim_values import select_by_pointer
    >>> content = {"rows": [{"p": 1, "s": 3.5}, {"p": 0.5, "s": 2.5}]}
    >>> list(select_by_pointer(content, ["rows", "p=0.5", "s"]))
    [2.5]
    >>> list(select_by_pointer(content, ["rows", "*", "s"]))
    [3.5, 2.5]

  Raises:
    LookupError: A key is missing, or several entries match.
  """
  if not path:
    yield content
    return
  key, *rest = path
  if key.startswith("*"):
    entries = content.values() if isinstance(content, dict) else content
    for entry in _matching(entries, key[1:]):
      yield from select_by_pointer(entry, rest)
  elif isinstance(content, list) and "=" in key:
    matching = _matching(content, key)
    if len(matching) != 1:
      raise LookupError(
        f"{len(matching)} entries have the key {key!r}; exactly one must have "
        "it"
      )
    yield from select_by_pointer(matching[0], rest)
  elif isinstance(content, list):
    yield from select_by_pointer(content[int(key)], rest)
  else:
    if key not in content:
      raise LookupError(
        f"the key {key!r} is missing; the keys are "
        f"{', '.join(map(str, content))}"
      )
    yield from select_by_pointer(content[key], rest)


def _matching(entries: Iterable[Any], condition: str) -> list[Any]:
  """Returns the entries with ``KEY=VALUE;KEY=VALUE``; all if it is empty."""
  parts = condition.split(";") if condition else []
  wanted = dict(part.split("=", 1) for part in parts)
  return [
    entry for entry in entries
    if all(str(entry.get(key)) == value for key, value in wanted.items())
  ]


def _column(text: str, expected: ExpectedNumber) -> list[float]:
  rows = list(csv.DictReader(io.StringIO(text)))

  def select(wanted: Mapping[str, str]) -> list[float]:
    found = [
      float(row[expected.column]) for row in rows
      if all(row[key] == value for key, value in wanted.items())
    ]
    if not found:
      raise LookupError(f"no row has the values {wanted}")
    return found

  values = select(expected.rows)
  if not expected.minus:
    return values
  pairs = zip(values, select(expected.minus), strict=True)
  return [a - b for a, b in pairs]


def _number(value: Any) -> float:
  """Converts a JSON number, or a fraction such as "8/7", to a float."""
  if isinstance(value, str) and "/" in value:
    over, under = value.split("/")
    return float(over) / float(under)
  return float(value)
