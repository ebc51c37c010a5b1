"""Assertions about what a program sends, for tests of any project.

`assert_sends` fails with the source lines of the collectives that differ from
what a test expects in bytes, dtype, kind or axes. It is also the fixture of
`parallel.ledger.pytest_plugin`.
"""

from collections.abc import Collection, Mapping
import decimal
import re
from typing import Any

from parallel.ledger.entries import SLICE_AXIS
from parallel.ledger.reading import Executed, Reading, read

# Decimal units of a size.
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# Keys of ``expect`` that are not names of mesh axes.
_NON_AXIS_KEY = (
  rf"{SLICE_AXIS}|(\d+ to )?\d+ devices|all devices, number unknown"
)
# Bytes ("3.2 GB" or 4096), or (kind, number of executions).
Expected = str | int | tuple[str, int]


def assert_sends(
  program: Any, *args: Any, expect: Mapping[str, Expected], mesh: Any = None,
  dtype: str | None = None, silent: Collection[str] = (), **kwargs: Any,
) -> Reading:
  """Asserts what a program sends over each axis in one execution.

  It also fails if an instruction may communicate and is not counted.

  Args:
    program: Program as `parallel.ledger.reading.read` accepts it, such as a
      jitted function.
    *args: Arguments of a function.
    expect: Axis, or axes joined by ",", or "4 devices" for groups that no axes
      describe -> operand bytes per device, or (kind, executions), such as
      ``("all_reduce", 1)``. A size with a unit, "3.2 GB", is decimal and
      compared at the digits shown; an integer is exact. An upper bound, as of a
      ragged exchange, must be expected as one: "at most 3.2 GB". All axes over
      which the program communicates must be named; between TPU slices,
      "slices".
    mesh: Mesh that names the axes; None to find them in the program.
    dtype: NumPy name of the dtype that all operands must have; None for any.
      The requested dtype counts if it is known, else the compiled one.
    silent: Targets of custom calls that are known not to communicate, in
      addition to those of `parallel.ledger.silent`.
    **kwargs: Keyword arguments of a function.

  Returns:
    What `parallel.ledger.reading.read` returns, for further assertions.

  Raises:
    AssertionError: The program does not send what is expected.
    ValueError: An expectation has another form, or names an axis that the mesh
      does not have.

  Example:
    >>> import jax
    >>> assert_sends(jax.jit(lambda x: 2 * x), 1.0, expect={}).executed
    ()
  """
  reading = read(program, *args, mesh=mesh, **kwargs)
  expect = {_sort_axes(key, reading): value for key, value in expect.items()}
  sent: dict[str, list[Executed]] = {over: [] for over in expect}
  for found in reading.executed:
    sent.setdefault(found.entry.over, []).append(found)
  faults = [
    f"{u.source or 'unknown line'}: {u} may communicate and is not counted"
    for u in reading.unknown if not u.target or u.target not in silent
  ]
  for axes, executed in sent.items():
    if axes not in expect:
      faults.append(_fault(f"{axes}: nothing is expected", executed))
    elif fault := _describe_difference(expect[axes], executed):
      faults.append(_fault(f"{axes}: {fault}", executed))
  others = [
    e for e in reading.executed
    if dtype and (e.requested or e.entry.dtype) != dtype
  ]
  if others:
    faults.append(_fault(f"other dtypes than {dtype}", others))
  if faults:
    raise AssertionError("\n".join(faults))
  return reading


def _sort_axes(key: str, reading: Reading) -> str:
  """Returns the axes of an expectation in the order of the mesh.

  ``key`` and the result are names joined by ",". Keys such as "4 devices", for
  groups that no axes describe, are returned unchanged.
  """
  names = key.split(",")
  if re.fullmatch(_NON_AXIS_KEY, key):
    return key
  if not set(names) <= set(reading.axes):
    raise ValueError(
      f"expect={key!r} must use the axes of the mesh: {', '.join(reading.axes)}"
    )
  return ",".join(name for name in reading.axes if name in names)


def _describe_difference(expected: Expected, executed: list[Executed]) -> str:
  """Returns how the collectives ``executed`` differ from what is expected.

  The result is "" if they do not.
  """
  if isinstance(expected, tuple):
    kind, times = expected
    kinds = {e.entry.kind for e in executed}
    counts = [e.entry.count for e in executed]
    if kinds <= {kind} and None not in counts and sum(counts) == times:
      return ""
    return f"expected {times} x {kind}"
  if any(e.entry.count is None for e in executed):
    return "an unknown number of executions"
  size = sum(e.entry.bytes * e.entry.count for e in executed)
  bound = any(e.entry.at_most for e in executed)
  if bound != str(expected).startswith("at most "):
    return "at most " * bound + f"{size:,} B, expected {expected}"
  if bound:
    fault = _describe_size_error(size, expected.removeprefix("at most "))
    return fault and f"at most {fault}"
  return _describe_size_error(size, expected)


def _describe_size_error(size: int, expected: str | int) -> str:
  """Returns how bytes differ from an expected size; "" if they do not."""
  if isinstance(expected, int):
    return "" if size == expected else f"{size:,} B, expected {expected:,} B"
  match = re.fullmatch(r"(\d+(?:\.(\d+))?) ?([kMGT]?B)", str(expected))
  if not match:
    raise ValueError(f"expect={expected!r} must be a size, as in '3.2 GB'")
  # A quotient of decimals is exact, unlike one of floats.
  shown = decimal.Decimal(size) / _UNITS[match[3]]
  text = f"{shown:.{len(match[2] or '')}f}"
  if decimal.Decimal(text) == decimal.Decimal(match[1]):
    return ""
  return f"{text} {match[3]} ({size:,} B), expected {expected}"


def _fault(what: str, executed: list[Executed]) -> str:
  return "\n".join([what, *(f"  {_format_line(e)}" for e in executed)])


def _format_line(found: Executed) -> str:
  entry = found.entry
  count = "?" if entry.count is None else entry.count
  dtype = entry.dtype
  if found.requested not in (None, dtype):
    dtype += f" (requested {found.requested})"
  again = ", again" if entry.rematted else ""
  most = "at most " * entry.at_most
  return (
    f"{found.source or 'unknown line'}: {count} x {entry.kind} of {most}"
    f"{entry.bytes:,} B {dtype}, {entry.phase}{again}"
  )
