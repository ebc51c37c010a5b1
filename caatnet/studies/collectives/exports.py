"""Fastest schedule of several algorithms, and its export to other programs."""

from collections.abc import Mapping
import contextlib
import functools
import pathlib
import sys
from typing import Any

from rich.console import Console
from rich.progress import track

from caatnet.studies.collectives import chosen
from caatnet.studies.collectives.chosen import ChosenSchedule
from parallel.base import files
from parallel.base.naming import prefix_error_keys
from parallel.plans.network import perfetto_trace, simulate, trace
from parallel.plans.network.routed import on_links
from parallel.plans.schedules import builders
from parallel.plans.schedules.msccl import exporter, importer
from parallel.plans.schedules.schedule import Collective, Schedule
from parallel.plans.topology.graph import Topology


@functools.lru_cache(maxsize=16)
def tune_algorithm(
  topology: Topology,
  text: str,
  collective: Collective,
  size_bytes: int,
  pieces: int = 0,
  random_numberings: int = 0,
  model: chosen.TimeModel = "events",
  runtime: str = "",
) -> ChosenSchedule:
  """Returns the fastest schedule of one algorithm.

  Args are those of `chosen.fastest`, except for:
    text: Algorithm, as in `builders.parse_builder`; its option ``pieces`` has
      precedence over the argument.
    pieces: Number of pieces of each chunk; 0 for the fastest number.
    runtime: Key of `exporter.RUNTIMES` whose limits the schedule must respect,
      with any number of pieces; "" for no limits.
  """
  name, options = builders.parse_builder(text)
  options = {"pieces": pieces or None} | options
  if runtime:
    options["pieces"] = None
  return chosen.fastest(
    name, topology, collective, size_bytes, model=model,
    random_numberings=random_numberings,
    fits=lambda x: not runtime or not _refusal(x, runtime), **options,
  )


def fastest_of(
  texts: tuple[str, ...], topology: Topology, *args: Any, **search: Any
) -> ChosenSchedule:
  """Returns the fastest schedule of several algorithms.

  Args:
    texts: Algorithms, as in `builders.parse_builder`.
    topology: Network that the schedule runs on.
    *args: Positional arguments of `tune_algorithm` after the topology and text.
    **search: Keyword arguments of `tune_algorithm`.

  Raises:
    ValueError: No algorithm has a schedule for the topology.
  """
  found, errors, console = [], [], Console(stderr=True)
  for text in track(
    texts, "timing schedules", transient=True, console=console,
    disable=not console.is_terminal,
  ):
    try:
      found.append(tune_algorithm(topology, text, *args, **search))
    except ValueError as error:
      errors.append(error)
  if not found:
    raise ValueError("; ".join(map(str, errors)) or "no algorithm is given")
  return min(found, key=lambda choice: choice.seconds)


def export(
  path: pathlib.Path,
  config: Mapping[str, Any],
  key: str,
  others: tuple[str, ...],
  topology: Topology,
  *args: Any,
) -> None:
  """Writes the fastest schedule to a file for other programs, see `write`.

  If the schedule exceeds the limits of ``config.export.runtime``, the fastest
  schedule within the limits, with any number of pieces, is written instead, and
  a line on stderr reports both schedules.

  Args:
    path: File to write.
    config: Config of a study.
    key: Config key whose value is an algorithm or a tuple of algorithms.
    others: Other algorithms, of which an error suggests the fastest one that is
      within the limits.
    topology: Network that the schedule runs on.
    *args: Further positional arguments of `tune_algorithm`.

  Raises:
    ValueError: No schedule is within the limits, or `write` raises it.
  """
  size_bytes, runtime = args[1], config["export"]["runtime"]
  texts = (config[key],) if isinstance(config[key], str) else config[key]

  def within(
    runtime: str, texts: tuple[str, ...] = texts
  ) -> ChosenSchedule | None:
    with contextlib.suppress(ValueError):
      return fastest_of(texts, topology, *args, runtime=runtime)
    return None

  best = found = fastest_of(texts, topology, *args)
  refusal = path.suffix == ".xml" and _refusal(best.schedule, runtime)
  if refusal and not (found := within(runtime)):
    refusal += ", in any number of pieces"
    if other := within(runtime, others):
      us = other.seconds * 1e6
      refusal += f"; --config.{key}={other} fits ({us:,.1f} us)"
    for name in exporter.RUNTIMES:
      if found := within(name):
        refusal += f"; --config.export.runtime={name} takes {found}"
        break
    raise ValueError(refusal)
  write(path, found.schedule, topology, size_bytes, config["export"])
  if refusal:
    # The file lacks paths and the order within rounds, so its time may differ.
    read = importer.import_xml(path.read_text(), topology)
    us = simulate.events(on_links(read, topology), size_bytes).finish_ns / 1e3
    print(
      f"exports {found} ({us:,.1f} us as read from the file), since {best} "
      f"({best.seconds * 1e6:,.1f} us) exceeds a limit: {refusal}",
      file=sys.stderr,
    )


def write(
  path: pathlib.Path,
  schedule: Schedule,
  topology: Topology,
  size_bytes: int,
  options: Mapping[str, Any],
) -> None:
  """Writes MSCCL XML, or a timeline for https://ui.perfetto.dev.

  Args:
    path: File to write, which ends in .xml or in .perfetto-trace.
    schedule: The schedule.
    topology: Network that the schedule runs on.
    size_bytes: Bytes of the buffer, for the timeline.
    options: Section ``config.export``.

  Raises:
    ValueError: The file has another suffix, the schedule exceeds a limit, or
      perfetto is not installed.
  """
  if path.suffix == ".xml":
    with prefix_error_keys("config.export", options):
      text = exporter.export_xml(schedule, **options)
    files.replace(path, text)
  elif path.suffix == perfetto_trace.SUFFIX:
    routed = on_links(schedule, topology)
    rows, bars = trace.message_bars(simulate.events(routed, size_bytes))
    title = f"{schedule.name} on {topology.name}"
    with files.atomic_file(path) as temporary:
      perfetto_trace.write(bars, temporary, title, rows)
  else:
    raise ValueError(
      f"--export={path} must end in .xml (MSCCL) or {perfetto_trace.SUFFIX}"
    )


def _refusal(schedule: Schedule, runtime: str) -> str:
  """Returns why a runtime cannot run a schedule; "" if it can."""
  try:
    exporter.check_limits(schedule, runtime)
  except ValueError as error:
    return str(error)
  return ""
