"""Comparison of a step on several layouts with the step on one device."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import inspect
from typing import Any

import numpy as np

from parallel.base import available
from parallel.ledger import reading
from parallel.ledger.equal import locate, programs, verdict
from parallel.ledger.equal.locate import Location
from parallel.ledger.equal.programs import Builder, LayoutProgram
from parallel.ledger.equal.verdict import ResultComparison, Verdict

_MAX_SHRINKS = 12
_NO_LOCATION = (
  "all values that could be compared agree: the fault is in a loop of unknown "
  "length, a branch, or the partitioning of the program"
)


@dataclasses.dataclass(frozen=True)
class LayoutReport:
  """Comparison of one layout with one device.

  Attributes:
    layout: Axis -> number of devices.
    verdict: The worst verdict of all results of the first step; "refused" if
      the layout cannot be compared.
    reason: Why it is refused; else "".
    results: Comparison of each result.
    growth: Largest relative difference of the results after each step.
    explanations: Explanation of each wrong result, by name; "" if there is no
      simple one.
    location: Location of the first difference; None if it was not found.
    sent_bytes: Bytes of collectives' operands per device and step, by axes.
    bytes_needed: Bytes of all virtual devices while the step runs.
  """

  layout: Mapping[str, int]
  verdict: Verdict | str
  reason: str = ""
  results: Sequence[ResultComparison] = ()
  growth: Sequence[float] = ()
  explanations: Mapping[str, str] = dataclasses.field(default_factory=dict)
  location: Location | None = None
  sent_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
  bytes_needed: int = 0


def check(
  builder: Builder, layouts: Sequence[Mapping[str, int]], steps: int = 3,
  say: Callable[[str], None] = lambda line: None,
) -> list[LayoutReport]:
  """Compares a step on layouts with the step on one device.

  Args:
    builder: Function of a layout that returns a jitted step and its arguments.
    layouts: Layouts to compare.
    steps: Number of steps after which differences are reported, for a step
      whose first result replaces its first argument.
    say: Receives a line before each part that takes long.

  Raises:
    ValueError: The step cannot be compared on one device.
  """
  say("one device: compiling, and measuring what rounding changes")
  try:
    builder, one = _fitting(builder, say)
    refuse(one)
    if one.has_callbacks():
      say("the step calls functions on the host, which each execution repeats")
    reference = verdict.measure(one)
    if names := [
      name for name, x in zip(one.result_names, reference.results, strict=True)
      if not np.all(np.isfinite(np.asarray(x, "float64")))
    ]:
      say(f"not finite on one device: {', '.join(names)}")
  except ValueError as error:
    raise ValueError(f"one device: {error}") from error
  alone = _history(one, steps)
  found = []
  for layout in layouts:
    say(f"{programs.format_layout(layout)}: comparing")
    try:
      found.append(_compare(builder, layout, reference, alone, steps, say))
    except ValueError as error:
      found.append(LayoutReport(layout, "refused", str(error)))
  return found


def _fitting(
  builder: Builder, say: Callable[[str], None]
) -> tuple[Builder, LayoutProgram]:
  """Returns a builder whose step fits into memory, and the step.

  A builder with the argument ``shrink`` is called with 1, 2, 4, ..., a divisor
  of its sizes, until the step fits.
  """
  if "shrink" not in inspect.signature(builder).parameters:
    return builder, programs.build(builder, {})
  for power in range(_MAX_SHRINKS):
    smaller = functools.partial(builder, shrink=2**power)
    one = programs.build(smaller, {})
    if one.bytes_needed <= available.available_bytes():
      break
    say(f"sizes are divided by {2 ** (power + 1)}, since memory is too small")
  return smaller, one


def refuse(program: LayoutProgram) -> None:
  """Raises ValueError if a step cannot be compared, or needs too much memory.

  Raises:
    ValueError: Random numbers depend on the device, or the step needs more
      memory than there is.
  """
  if program.random_depends_on_device():
    raise ValueError(
      "the step folds the number of the device into a random key, so each "
      "layout draws other numbers; compare it without dropout or noise, or "
      "with keys that do not depend on the layout"
    )
  needed, there = program.bytes_needed, available.available_bytes()
  if needed > there:
    raise ValueError(
      f"the step needs {needed / 1e9:,.1f} GB in float64 on virtual devices, "
      f"but {there / 1e9:,.1f} GB are available; use smaller sizes"
    )


def _compare(
  builder: Builder, layout: Mapping[str, int], reference: verdict.Reference,
  alone: Sequence[Sequence[np.ndarray]], steps: int,
  say: Callable[[str], None],
) -> LayoutReport:
  """Returns the report of one layout."""
  program = programs.build(builder, layout)
  refuse(program)
  one = reference.program
  if any(
    not np.array_equal(a, b)
    for a, b in zip(one.args, program.args, strict=True)
  ):
    raise ValueError("the arguments depend on the layout")
  results, wide = verdict.compare(reference, program)
  found = verdict.worst(results)
  growth = [
    max((
      verdict.size_of(verdict.difference(x, y)).largest
      / (verdict.scale_of(x) or 1.0)
      for x, y in zip(mine, theirs, strict=True)
    ), default=0.0)
    for mine, theirs in zip(alone, _history(program, steps), strict=True)
  ]
  explanations, location = {}, None
  if found == "bug":
    say(f"{programs.format_layout(layout)}: looking for the line")
    explanations, location = _explained(reference, program, results, wide)
  return LayoutReport(
    layout, found, "", results, growth, explanations, location,
    sent_bytes(program), program.bytes_needed,
  )


def _explained(
  reference: verdict.Reference, program: LayoutProgram,
  results: Sequence[ResultComparison], wide: Sequence[np.ndarray],
) -> tuple[dict[str, str], Location | None]:
  """Returns explanations of wrong results by name, and their location."""
  one, found = reference.program, {}
  wrong = [i for i, x in enumerate(results) if x.verdict == "bug"]
  clear = [i for i in wrong if not results[i].has_fewer_bits]
  for place in clear:
    before = one.args[place] if place < one.num_state else None
    found[results[place].name] = verdict.explain(
      reference.wide[place], wide[place], before, program.layout
    )
  if clear:
    return found, locate.locate(one, program, one.args, clear)
  by_equations = program.run_by_equations(one.args)
  is_compiled = not any(
    verdict.is_outside(reference, by_equations, place) for place in wrong
  )
  for place in wrong:
    found[results[place].name] = (
      "only the compiled step differs, not its equations: the compiler or its "
      "partitioning is at fault" if is_compiled else
      "equal in float64: the layout computes in fewer bits"
    )
  if is_compiled:
    return found, None
  # Intermediate values differ at least as much as the results.
  tolerance = max(results[i].relative for i in wrong) / 4
  return found, locate.locate(
    one, program, one.args, wrong, wide=False, tolerance=tolerance
  )


def _history(program: LayoutProgram, steps: int) -> list[list[np.ndarray]]:
  """Returns the results of each step."""
  args, found = list(program.args), []
  for _ in range(steps if program.num_state else 1):
    found.append(program.run(args).values)
    args = program.next_args(args, found[-1])
  return found


def sent_bytes(program: LayoutProgram) -> dict[str, int]:
  """Returns the operand bytes of collectives per device and step, by axes."""
  found: dict[str, int] = {}
  # A compiled program without sharded arguments does not name its axes.
  mesh = next((
    eqn.params["mesh"] for eqn in program.closed.jaxpr.eqns
    if eqn.primitive.name == "shard_map"
  ), None)
  for entry in reading.read(program.compiled, mesh=mesh).entries:
    if entry.bytes and entry.count:
      axes = "+".join(entry.axes) or "?"
      found[axes] = found.get(axes, 0) + entry.bytes * entry.count
  return found


def assert_equal(
  builder: Builder, layouts: str | Sequence[Mapping[str, int]],
  undecided: bool = False,
) -> None:
  """Asserts that a step computes the same on layouts as on one device.

  Args:
    builder: Function of a layout that returns a jitted step and its arguments.
    layouts: Layouts, also as text such as ``"data:8 data:2,tensor:4"``.
    undecided: Whether a difference that is close to the limit is accepted.

  Raises:
    AssertionError: A layout differs by more than rounding; with its location.
    ValueError: The step cannot be compared.
  """
  if isinstance(layouts, str):
    layouts = programs.parse_layouts(layouts)
  for report in check(builder, layouts, steps=1):
    if report.verdict == "refused":
      raise ValueError(report.reason)
    allowed = ("rounding", "undecided") if undecided else ("rounding",)
    assert report.verdict in allowed, describe(report)


def describe(report: LayoutReport) -> str:
  """Returns one line about a layout."""
  line = f"{programs.format_layout(report.layout)}: {report.verdict}"
  if report.verdict == "refused":
    return f"{line}: {report.reason}"
  wrong = [x for x in report.results if x.verdict == report.verdict]
  if report.verdict == "rounding":
    largest = max((x.relative for x in report.results), default=0.0)
    line += f": largest relative difference {largest:.1e}"
    names = ", ".join(x.name for x in report.results if x.has_nan)
    return f"{line}; NaN also on one device in {names}" if names else line
  line += " in " + ", ".join(
    f"{x.name} ({x.relative:.1e} of its size"
    + (f"; its copies differ by {x.spread:.1e}" if x.spread else "")
    + (f"; {text}" if (text := report.explanations.get(x.name)) else "") + ")"
    for x in wrong[:3]
  ) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
  place = report.location
  if report.verdict != "bug":
    return line
  if place is None:
    return f"{line}; {_NO_LOCATION}"
  where = _where(place.lines)
  line += f"\n  first at {where} ({place.primitive}): {place.what}"
  if place.made:
    line += f"\n  its operands are from {', '.join(map(_where, place.made))}"
  if place.used:
    line += f"\n  its result is used at {_where(place.used)}"
  if place.passed:
    line += f"\n  not compared before it: {', '.join(place.passed)}"
  if place.python:
    line += f"\n  assigned without an operation: {', '.join(place.python)}"
  return line + (
    f"\n  last collective before: {place.collective}" if place.collective
    else ""
  )


def _where(lines: Sequence[str]) -> str:
  """Formats FILE:LINE and the line of its caller."""
  if not lines:
    return "an unknown line"
  return lines[0] + (f" (called at {lines[1]})" if len(lines) > 1 else "")


def as_data(report: LayoutReport) -> dict[str, Any]:
  """Returns a report as plain data."""
  return dataclasses.asdict(report)
