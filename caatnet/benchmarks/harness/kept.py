"""File of a long benchmark's results, with which an interrupted run continues.

A benchmark adds each result to the file of ``config.benchmark.results`` when it
is measured, and does not measure those that are there. All results of a file
are of one config and one commit.
"""

import json
import pathlib
from typing import Any

from caatnet import commands
from caatnet.show import results

# Keys of config.benchmark that change no measured result.
_FREE = ("results", "plot", "target")


def described(config: Any) -> str:
  """Returns the keys of a config that may change results, as JSON."""
  found = json.loads(config.to_json())
  found["benchmark"] = {
    key: value for key, value in found["benchmark"].items() if key not in _FREE
  }
  return json.dumps(found, sort_keys=True)


class Kept:
  """Results that a benchmark has measured so far.

  Attributes:
    found: Plain data, by the keys of ``empty``; "config" has the config as
      JSON.
  """

  def __init__(self, config: Any, **empty: Any) -> None:
    """Reads the results of an interrupted run.

    Args:
      config: Config of the benchmark, whose ``config.benchmark.results`` is a
        path, or "" for no file.
      **empty: Results of a run that begins.

    Raises:
      ValueError: The file has results of another config or commit.
    """
    text, name = described(config), config.benchmark.results
    self._path = pathlib.Path(name) if name else None
    self.found = results.read(self._path) if self._path else {}
    of = self.found.get("config"), self.found.get("commit")
    if self.found and of != (text, commands.commit()):
      raise ValueError(
        f"config.benchmark.results={name!r} has rows of another config or "
        "commit; name another file, or remove it"
      )
    self.found = self.found or {"config": text, **empty}

  def save(self) -> None:
    """Writes the results to the file, replacing it as a whole."""
    if self._path:
      results.write(self._path, self.found)
