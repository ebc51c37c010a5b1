"""File of a long benchmark's results, with which an interrupted run continues.

A benchmark adds each result to the file of ``config.benchmark.results`` when it
is measured, and does not measure those that are there.
"""

import pathlib
from typing import Any

from caatnet.show import results


class Kept:
  """Results that a benchmark has measured so far.

  Attributes:
    found: Plain data, by the keys of ``empty``; "options" has the benchmark's
      section as JSON.
  """

  def __init__(self, options: Any, **empty: Any) -> None:
    """Reads the results of an interrupted run.

    Args:
      options: ``config.benchmark``, whose ``results`` is a path, or "" for no
        file.
      **empty: Results of a run that begins.

    Raises:
      ValueError: The file has results of other options.
    """
    text = options.to_json()
    self._path = pathlib.Path(options.results) if options.results else None
    self.found = results.read(self._path) if self._path else {}
    if self.found and self.found.get("options") != text:
      raise ValueError(
        f"config.benchmark.results={options.results!r} has rows of other "
        "options; name another file, or remove it"
      )
    self.found = self.found or {"options": text, **empty}

  def save(self) -> None:
    """Writes the results to the file, replacing it as a whole."""
    if self._path:
      results.write(self._path, self.found)
