"""Fastest placement, by linear programming.

Variables are the fraction of each state part per execution mode, the fraction
of each tensor per tier, and the seconds of each phase, an upper limit on the
time that each resource is busy. With ``whole`` the fractions are multiples of 1
/ `StatePart.units`, such as layers. This is a mixed integer program; the
optimum without ``whole`` is a lower bound on its time.

Example:
  See `parallel.plans.placement.problem`.
"""

from collections.abc import Iterator, Mapping
import contextlib
import ctypes
import os
import sys

import numpy as np
from scipy import optimize, sparse

from parallel.plans.placement.costs import (
  COMPUTE,
  Placement,
  TensorKey,
  capacities,
  resource_seconds,
)
from parallel.plans.placement.problem import INSTANTS, PHASES, Problem

# Bytes are given to the solver in GB, so that its numbers are near 1.
_GB = 1e9


class _Program:
  """Linear program with named variables, and one matrix row per constraint."""

  def __init__(self) -> None:
    self.index: dict[tuple[str, ...], int] = {}
    self.rows: list[dict[int, float]] = []
    self.low: list[float] = []
    self.high: list[float] = []

  def variable(self, *name: str) -> int:
    return self.index.setdefault(name, len(self.index))

  def add(
    self, terms: Mapping[int, float], low: float, high: float
  ) -> None:
    self.rows.append(dict(terms))
    self.low.append(low)
    self.high.append(high)

  def solve(
    self, minimised: list[int], integers: Mapping[int, int], limit_s: float
  ) -> np.ndarray | None:
    """Returns the values of all variables, or None if there is no solution.

    Args:
      minimised: Variables whose sum is minimised.
      integers: Variable -> n, where the variable's value must be a multiple of
        1 / n.
      limit_s: Time limit in seconds.
    """
    count = len(self.index)
    scale = np.ones(count)
    for variable, units in integers.items():
      scale[variable] = 1 / units
    entries = [
      (row, column, value * scale[column])
      for row, terms in enumerate(self.rows) for column, value in terms.items()
    ]
    row, column, value = (
      np.array(part) for part in zip(*entries, strict=True)
    )
    matrix = sparse.csr_array(
      (value, (row.astype(int), column.astype(int))),
      shape=(len(self.rows), count),
    )
    objective = np.zeros(count)
    objective[minimised] = 1
    whole = np.zeros(count)
    whole[list(integers)] = 1
    with _no_output() if integers else contextlib.nullcontext():
      found = optimize.milp(
        objective,
        integrality=whole,
        bounds=optimize.Bounds(0, np.inf),
        constraints=optimize.LinearConstraint(matrix, self.low, self.high),
        options={"time_limit": limit_s, "mip_rel_gap": 1e-4},
      )
    if found.status == 1 and found.x is None:
      raise ValueError(
        f"no placement was found within {limit_s:g} s; raise the time limit"
      )
    return None if found.x is None else found.x * scale


@contextlib.contextmanager
def _no_output() -> Iterator[None]:
  """Discards what libraries print to stdout, as the solver HiGHS does."""
  sys.stdout.flush()
  kept, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
  os.dup2(null, 1)
  try:
    yield
  finally:
    ctypes.CDLL(None).fflush(None)
    os.dup2(kept, 1)
    os.close(kept)
    os.close(null)


def place(
  problem: Problem,
  *,
  whole: bool = False,
  forced: Mapping[TensorKey, str] | None = None,
  limit_s: float = 60.0,
) -> Placement:
  """Returns the placement with the shortest step.

  Args:
    problem: The problem.
    whole: Whether no unit of a state part (a layer) is divided.
    forced: (state part, execution mode, tensor) -> the only memory tier that
      the tensor may use.
    limit_s: Time limit of the search in seconds.

  Raises:
    ValueError: The state does not fit on all tiers together, or no placement
      was found in time.
  """
  program, shares, tiers = _program(problem, forced or {})
  units = {part.name: part.units for part in problem.parts}
  integers = (
    {v: units[key[0]] for key, v in (*shares.items(), *(
      (key[:1], v) for key, v in tiers.items()))}
    if whole else {}
  )
  solved = program.solve(
    [program.variable("seconds", phase) for phase in PHASES], integers, limit_s
  )
  if solved is None:
    lacking = _shortage(problem) or "its layers cannot be divided"
    raise ValueError(f"the state does not fit: {lacking}")
  found: dict[TensorKey, dict[str, float]] = {}
  for (part, way, tensor, tier), variable in tiers.items():
    found.setdefault((part, way, tensor), {})[tier] = float(solved[variable])
  return Placement(
    {key: float(solved[variable]) for key, variable in shares.items()}, found
  )


def _program(
  problem: Problem, forced: Mapping[TensorKey, str], extended: bool = False
) -> tuple[
  _Program, dict[tuple[str, str], int], dict[tuple[str, str, str, str], int]
]:
  """Returns the linear program, and the indices of its variables.

  Args:
    problem: The problem.
    forced: Argument of `place`.
    extended: Whether to add variables "added", which extend the capacities.

  Returns:
    The program; (state part, execution mode) -> index of the variable with the
    part's fraction; (part, mode, tensor, tier) -> index of that with the
    tensor's fraction.
  """
  program = _Program()
  shares: dict[tuple[str, str], int] = {}
  tiers: dict[tuple[str, str, str, str], int] = {}
  # held: (instant, tier) -> variable -> GB.
  # busy: (phase, resource) -> variable -> seconds.
  held: dict[tuple[str, str], dict[int, float]] = {}
  busy: dict[tuple[str, str], dict[int, float]] = {
    (phase, COMPUTE): {} for phase in PHASES
  }
  for part in problem.parts:
    for way in part.ways:
      key = part.name, way.name
      shares[key] = program.variable("way", *key)
      for phase, seconds in way.seconds.items():
        busy[phase, COMPUTE][shares[key]] = seconds
    program.add({shares[part.name, way.name]: 1 for way in part.ways}, 1, 1)
  for part, way, tensor in problem.tensors():
    key = part.name, way.name, tensor.name
    allowed = [forced[key]] if key in forced else problem.tiers_of(tensor)
    for tier in allowed:
      variable = tiers[*key, tier] = program.variable("tier", *key, tier)
      for instant in tensor.held:
        terms = held.setdefault((instant, tier), {})
        terms[variable] = tensor.size_bytes / _GB
      for place, seconds in resource_seconds(problem, tensor, tier).items():
        busy.setdefault(place, {})[variable] = seconds
    whole = {tiers[*key, tier]: 1.0 for tier in allowed}
    program.add(whole | {shares[key[:2]]: -1}, 0, 0)
  for instant in INSTANTS:
    for tier, capacity in capacities(problem, instant).items():
      terms = held.get((instant, tier), {})
      if extended:
        terms = terms | {program.variable("added", tier): -1}
      program.add(terms, -np.inf, capacity / _GB)
  for (phase, resource), terms in busy.items():
    seconds = program.variable("seconds", phase)
    fixed = problem.seconds[phase] if resource == COMPUTE else 0.0
    program.add(terms | {seconds: -1}, -np.inf, -fixed)
  return program, shares, tiers


def _shortage(problem: Problem) -> str:
  """Describes the smallest tier capacity to add so that a placement exists."""
  program, _, _ = _program(problem, {}, extended=True)
  added = {
    name[1]: variable for name, variable in program.index.items()
    if name[0] == "added"
  }
  found = program.solve(list(added.values()), {}, limit_s=60.0)
  if found is None:
    return "a tensor has no tier that it can be on"
  return ", ".join(
    f"{tier} lacks {found[variable]:,.1f} GB"
    for tier, variable in added.items() if found[variable] > 1e-6
  )
