"""Where the wrong results of a layout come from.

All intermediate values of both programs are compared, in the order of the
program and a bounded number of bytes at a time. On a layout, a value has a copy
on each device. The copies agree with the value on one device if, for each axis,
they are equal, are slices of it, or are summands of it; all of these may be
multiplied by the size of the axis, as gradients of a rank's mean loss are. A
value without such a reading is wrong.

The search goes from the wrong results to their operands, as long as one of them
is wrong. Values that cannot be compared, such as masks and indices of a
device's part, are passed, and their lines are reported. A program may differ
from one device at other places on purpose, for example in rounds of a pipeline:
these are not on the way.

Copies that agree may be used wrongly: values with and without that factor, or
summands and whole values, are added, or a summand leaves the program as if all
devices had equal values.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from parallel.ledger.equal.equations import Equation, Values, pairs, values_of
from parallel.ledger.equal.interpret import Path
from parallel.ledger.equal.programs import LayoutProgram, widened
from parallel.ledger.equal.sources import python_lines

# Bytes of recorded values of one run, over all devices.
_BUDGET = 2**30
# Values in float64 are equal if they differ by at most this fraction of the
# largest one.
TOLERANCE = 1e-8
_COLLECTIVES = {
  "psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_to_all",
  "all_gather_invariant", "reduce_scatter", "ppermute", "ragged_all_to_all",
}
# Changes of types that keep values.
_IDENTITIES = {"pvary", "pcast", "optimization_barrier"}
# Operations that only move values.
_MOVES = _IDENTITIES | {
  "reshape", "transpose", "broadcast_in_dim", "squeeze", "slice", "concatenate",
  "copy", "expand_dims",
}
# Changes of floats to integers or back, and in float64 nothing else.
_CAST = "convert_element_type"
# Operations that add operands of one kind.
_SUMS = {"add", "sub", "add_any"}


class Role(NamedTuple):
  """Relation of a value's copies on the devices of an axis to the value.

  Attributes:
    kind: "equal"; "sum", of which they are the summands; or the dim along which
      they are slices.
    scaled: Whether the result is to be divided by the size of the axis, as for
      gradients of a rank's mean loss.
  """

  kind: str | int
  scaled: bool = False


@dataclasses.dataclass(frozen=True)
class Location:
  """First operation on a layout whose result is wrong, or is used wrongly.

  Attributes:
    lines: FILE:LINE of the operation, then of the calls that led to it.
    primitive: Name of the operation.
    what: Description of the fault.
    made: Likewise for the operations that compute its operands: for each of
      ``lines``, the nearest one at another line of the same function. The fault
      is at these lines, or between them: a missing operation has no line.
    passed: Lines of operations between these and it that were not compared.
    python: Lines without an operation that assign names which the statements at
      these lines read.
    used: Likewise for the first operation at another line that uses its result.
    collective: The last collective before it: name, axes, and line; "" if there
      is none.
    share: Fraction of the values that could be compared.
  """

  lines: tuple[str, ...]
  primitive: str
  what: str
  made: tuple[tuple[str, ...], ...]
  passed: tuple[str, ...]
  python: tuple[str, ...]
  used: tuple[str, ...]
  collective: str
  share: float


def _dims(spec: Any) -> dict[str, int]:
  """Returns the dim of each axis that a spec names."""
  return {
    name: dim for dim, entry in enumerate(spec) if entry
    for name in ((entry,) if isinstance(entry, str) else entry)
  }


def read_copies(
  reference: np.ndarray, found: np.ndarray, sizes: Sequence[int], lead: int,
  tolerance: float = TOLERANCE,
) -> tuple[Role, ...] | None:
  """Returns how the devices' copies of a value agree with the value.

  Args:
    reference: The value on one device, ``[*loops, ...]``.
    found: The copies, ``[*sizes, *loops, ...]``.
    sizes: Size of each axis.
    lead: Number of loops.
    tolerance: Difference of equal values, as a fraction of the largest one.

  Returns:
    A role per axis, the simplest ones that fit; None if none do.

  Raises:
    LookupError: The shapes cannot be related.

  Example:
    >>> x = np.arange(4.0)
    >>> read_copies(x, x.reshape(2, 2), [2], 0)  # slices along dim 0
    (Role(kind=0, scaled=False),)
    >>> read_copies(x, np.stack([x / 2, 3 * x / 2]), [2], 0)  # x is their mean
    (Role(kind='sum', scaled=True),)
  """
  num_axes, sizes = len(sizes), list(sizes)
  shape, local = reference.shape[lead:], found.shape[len(sizes) + lead :]
  if len(shape) != len(local):
    raise LookupError
  for dim, (size, here) in enumerate(zip(shape, local, strict=True)):
    if size and here > size and here % size == 0:
      # A dim of ranks within the value itself is one more axis.
      at = len(sizes) + lead + dim
      parts = found.reshape(
        *found.shape[:at], here // size, size, *found.shape[at + 1 :]
      )
      found = np.moveaxis(parts, at, len(sizes))
      sizes.append(here // size)
  local = found.shape[len(sizes) + lead :]
  if any(
    b == 0 or a % b for a, b in zip(shape, local, strict=True)
  ) and shape != local:
    raise LookupError
  ratios = [a // b if b else 1 for a, b in zip(shape, local, strict=True)]
  exact = not np.issubdtype(reference.dtype, np.floating)
  scale = 0.0 if exact else _scale(reference)

  def close(x: np.ndarray, y: np.ndarray) -> bool:
    if exact:
      return bool(np.array_equal(x, y))
    return bool(np.allclose(
      x, y, rtol=TOLERANCE, atol=tolerance * scale, equal_nan=True
    ))

  kinds = [i for i, ratio in enumerate(ratios) if ratio > 1]
  options = [
    [Role("equal")] if size == 1
    else [Role(kind) for kind in (*kinds, "equal")] if exact
    else [
      Role(kind, scaled)
      for scaled in (False, True) for kind in (*kinds, "equal", "sum")
    ] for size in sizes
  ]
  ways = sorted(itertools.product(*options), key=lambda way: sum(
    (role.kind == "sum") + 2 * role.scaled for role in way
  ))
  if not ways or (not scale and not exact):
    ways = ways[:1]  # zeros agree in every way
  possible = False
  for way in ways:
    joined = [1] * len(ratios)
    for role, size in zip(way, sizes, strict=True):
      if isinstance(role.kind, int):
        joined[role.kind] *= size
    if joined != ratios and scale:
      continue
    possible = True
    if joined != ratios:
      return way[:num_axes] if not np.any(found) else None
    value = _combine(found, way, sizes, lead, close)
    if value is not None and close(value, reference):
      return way[:num_axes]
  if not possible:
    raise LookupError
  return None


def _scale(x: np.ndarray) -> float:
  """Returns the largest finite absolute value, without masks such as -1e30."""
  sizes = np.abs(x[np.isfinite(x)])
  largest = sizes.max(initial=0.0)
  others = sizes[sizes < largest / 2].max(initial=0.0)
  return float(others if 0 < others < 1e-8 * largest else largest)


def _combine(
  found: np.ndarray, way: Sequence[Role], sizes: Sequence[int], lead: int,
  close: Any,
) -> np.ndarray | None:
  """Combines copies by the roles of their axes; None if they contradict."""
  x = found
  for axis in reversed(range(len(way))):
    kind = way[axis].kind
    if kind == "equal":
      if not close(x, np.broadcast_to(x.take([0], axis), x.shape)):
        return None
      x = x.take(0, axis)
    elif kind == "sum":
      x = x.sum(axis)
    else:
      # [.., n, .., k, ..] -> [.., .., n * k, ..]; outer axes come later.
      dim = axis + lead + kind
      x = np.moveaxis(x, axis, dim)
      x = x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
    if way[axis].scaled:
      x = x / sizes[axis]
  return x


def locate(
  one: LayoutProgram, many: LayoutProgram, args: Sequence[Any],
  wrong: Collection[int], wide: bool = True, tolerance: float = TOLERANCE,
) -> Location | None:
  """Returns where wrong results of a layout come from.

  Args:
    one: The step on one device.
    many: The step on a layout.
    args: Flat arguments of both.
    wrong: Numbers of the wrong results.
    wide: Whether to compute in float64.
    tolerance: Difference of equal values, as a fraction of the largest one.

  Returns:
    The location; None if all values that could be compared agree.
  """
  found = values_of(many.closed)
  trace = _Trace(found, many.layout, wide, tolerance)
  matched = [
    pair for pair in pairs(values_of(one.closed).equations, found.equations)
    if max(x.num_bytes for x in pair) <= _BUDGET
    and pair[1].eqn.primitive.name not in _IDENTITIES
    and not any(
      jnp.issubdtype(getattr(x.aval, "dtype", bool), jax.dtypes.extended)
      for x in pair[1].eqn.outvars
    )
  ]
  for group in _groups(matched):
    mine, theirs = (
      program.run_by_equations(
        args, wide=wide, wanted=[pair[side].path for pair in group]
      ) for side, program in enumerate((one, many))
    )
    # Additional results may change how a program is partitioned: its values say
    # something only if the fault is still there.
    if not any(
      _differ(mine.values[i], theirs.values[i], tolerance)
      or theirs.spreads[i] for i in wrong
    ):
      continue
    for a, b in group:
      trace.compare(a, b, mine.recorded[a.path], theirs.recorded[b.path])
  results = [found.results[i] for i in wrong]
  return trace.first(results) or trace.leaving(results)


def _level(lines: Sequence[str], others: Sequence[str]) -> int | None:
  """Returns the outermost function in which two operations have other lines.

  None if they have none, for example if one is made by a call in the other.
  """
  chains = zip(lines[::-1], others[::-1], strict=False)
  return next((i for i, (a, b) in enumerate(chains) if a != b), None)


def _differ(x: np.ndarray, y: np.ndarray, tolerance: float) -> bool:
  """Returns whether results differ by more than a fraction of the largest."""
  x, y = (np.asarray(a, "float64") for a in (x, y))
  scale = np.abs(x[np.isfinite(x)]).max(initial=0.0)
  # A result may differ less than its operands.
  return not np.allclose(
    x, y, rtol=0, atol=1e-3 * tolerance * scale, equal_nan=True
  )


def _groups(
  matched: Sequence[tuple[Equation, Equation]],
) -> Iterator[list[tuple[Equation, Equation]]]:
  """Yields consecutive pairs whose values fit into the budget."""
  group: list[tuple[Equation, Equation]] = []
  size = 0
  for pair in matched:
    needed = pair[0].num_bytes + pair[1].num_bytes
    if group and size + needed > _BUDGET:
      yield group
      group, size = [], 0
    group.append(pair)
    size += needed
  if group:
    yield group


class _Trace:
  """What is known about the values of a layout's program."""

  def __init__(
    self, values: Values, layout: Mapping[str, int], wide: bool,
    tolerance: float,
  ) -> None:
    self.values, self.layout = values, layout
    self.wide, self.tolerance = wide, tolerance
    self.equations = values.equations
    self.roles = {
      number: tuple(Role(_dims(spec).get(axis, "equal")) for axis in axes)
      for number, spec, axes in values.arguments
    }
    self.makers = {x: eqn for eqn in self.equations for x in eqn.results}
    self.positions = {eqn.path: i for i, eqn in enumerate(self.equations)}
    self.users: dict[int, list[Equation]] = {}
    for eqn in self.equations:
      for x in eqn.operands:
        if x is not None:
          self.users.setdefault(x, []).append(eqn)
    # Path of a compared equation -> what is wrong ("" for nothing), and the
    # first iteration of its outermost loop with a wrong result.
    self.found: dict[Path, tuple[str, int]] = {}

  def compare(
    self, mine: Equation, theirs: Equation, x: Sequence[np.ndarray],
    y: Sequence[np.ndarray],
  ) -> None:
    """Compares the results of an equation.

    Integers may differ on purpose, for example numbers of devices and of
    positions; and values that are moved, for example into rows per device. Both
    do not count as compared then.
    """
    x, y = ([widened(v) for v in values] for values in (x, y))
    what = ""
    moves = _MOVES | ({_CAST} if self.wide else set())
    for number, a, b in zip(theirs.results, x, y, strict=True):
      try:
        roles = self.read(mine, theirs, a, b)
      except LookupError:
        return
      if roles is not None:
        self.roles[number] = roles
      elif np.issubdtype(a.dtype, np.floating) and (
        theirs.eqn.primitive.name not in moves
      ):
        what = "its result differs"
      else:
        return
    what = self.mixed(theirs) or what
    when = self.first_iteration(mine, theirs, x, y) if what else 0
    self.found[theirs.path] = what, when

  def read(
    self, mine: Equation, theirs: Equation, a: np.ndarray, b: np.ndarray
  ) -> tuple[Role, ...] | None:
    """Returns the roles of a recorded value, with a device dim if it has one.

    Outside of `jax.shard_map` they are those of the layout's axes.
    """
    if mine.sizes:
      a = a.take(0, mine.outside)  # the only device
    sizes = list((theirs.sizes or self.layout).values())
    if theirs.sizes:
      b = np.moveaxis(b, theirs.outside, 0)
      b = b.reshape(*sizes, *b.shape[1:])
    else:
      b = np.broadcast_to(b, (*sizes, *b.shape))
    return read_copies(a, b, sizes, len(theirs.loops), self.tolerance)

  def first_iteration(
    self, mine: Equation, theirs: Equation, x: Sequence[np.ndarray],
    y: Sequence[np.ndarray],
  ) -> int:
    """Returns the first iteration of the outermost loop with a wrong result.

    Iterations are numbered in the order of their execution.
    """
    if theirs.loop is None:
      return 0
    length, reverse = theirs.loops[0], theirs.loop[1]

    def wrong(index: int) -> bool:
      for a, b in zip(x, y, strict=True):
        # The dim of the loop is after that of devices if it is inside.
        at, bt = (int(bool(e.sizes) and not e.outside) for e in (mine, theirs))
        parts = a.take([index], at), b.take([index], bt)
        try:
          if self.read(mine, theirs, *parts) is None:
            return True
        except LookupError:
          continue
      return False

    order = range(length)[::-1] if reverse else range(length)
    return next((i for i, index in enumerate(order) if wrong(index)), 0)

  def mixed(self, x: Equation) -> str:
    """Returns what is wrong if operands of a sum have other roles; else ""."""
    if x.eqn.primitive.name not in _SUMS:
      return ""
    of_operands = [self.roles.get(y) for y in x.operands if y is not None]
    if len(of_operands) < 2 or None in of_operands:
      return ""
    sizes = x.sizes or self.layout
    for axis, *found in zip(sizes, *of_operands, strict=False):
      if sizes[axis] > 1 and len({role.scaled for role in found}) > 1:
        return (
          "it adds values of which only one has to be divided by the size of "
          f"{axis!r}: a mean over {axis!r} is missing"
        )
      if sizes[axis] > 1 and {role.kind for role in found} >= {"sum", "equal"}:
        return (
          f"it adds a summand of {axis!r} to a value that is equal on all "
          f"devices: a sum over {axis!r} is missing, or is taken later"
        )
    return ""

  def first(self, results: Sequence[int | None]) -> Location | None:
    """Returns the first operation that is wrong although its operands are not.

    Only operations that lead to the numbered results count.
    """
    queue, _ = self.blamed(results, None, 0)
    seen = {x.path for x in queue}
    origins: list[tuple[Equation, list[tuple[str, ...]]]] = []
    while queue:
      x = queue.pop()
      guilty, passed = self.blamed(x.operands, x.loop, self.found[x.path][1])
      if not guilty:
        origins.append((x, passed))
      for y in guilty:
        if y.path not in seen:
          seen.add(y.path)
          queue.append(y)
    if not origins:
      return None
    x, passed = min(origins, key=lambda item: self.positions[item[0].path])
    return self.location(x, self.found[x.path][0], passed)

  def blamed(
    self, numbers: Sequence[int | None], loop: Any, when: int
  ) -> tuple[list[Equation], list[tuple[str, ...]]]:
    """Returns wrong operations that make values, and the lines of those passed.

    Args:
      numbers: Numbers of the values.
      loop: Outermost loop in which they are used; None outside of loops.
      when: Iteration of this loop in which they are used.
    """
    queue = [(x, when) for x in numbers]
    guilty: list[Equation] = []
    passed: list[tuple[str, ...]] = []
    seen = set()
    while queue:
      number, when = queue.pop()
      if number is None or (number, when) in seen:
        continue
      seen.add((number, when))
      if number in self.values.carried:
        start, after, depth = self.values.carried[number]
        if depth or loop is None:  # iterations of inner loops are not told
          queue += [(start, when), (after, when)]
        else:
          queue.append((after, when - 1) if when else (start, 0))
        continue
      x = self.makers.get(number)
      if x is None:
        queue.append((self.values.links.get(number), when))
        continue
      what, since = self.found.get(x.path, (None, 0))
      if what is None:
        passed.append(x.lines)
        queue += [(y, when) for y in x.operands]
      elif what and (x.loop != loop or since <= when):
        guilty.append(x)
    return guilty, passed

  def leaving(self, results: Sequence[int | None]) -> Location | None:
    """Returns a result that leaves `jax.shard_map` as equal, but is not."""
    inside = {self.values.links.get(x) for x in results if x is not None}
    for number, spec, axes in self.values.leaving:
      if number not in inside or number not in self.makers:
        continue
      for axis, role in zip(axes, self.roles.get(number, ()), strict=False):
        if axis in _dims(spec) or not (role.kind == "sum" or role.scaled):
          continue
        what = "mean" if role.scaled else "sum"
        return self.location(self.makers[number], (
          f"its result leaves as if it were equal over {axis!r}, but a {what} "
          f"over {axis!r} is missing"
        ), [])
    return None

  def location(
    self, x: Equation, what: str, passed: Sequence[tuple[str, ...]]
  ) -> Location:
    """Returns the location of an equation."""
    before = [
      y for y in self.equations[: self.positions[x.path]]
      if y.eqn.primitive.name in _COLLECTIVES
    ]
    collective = ""
    if before:
      last = before[-1]
      names = last.eqn.params.get("axes", last.eqn.params.get("axis_name"))
      where = "".join(last.lines[:1])
      collective = f"{last.eqn.primitive.name} over {names} at {where}"
    used = self.used(x)
    made = self.origins(x)
    lines = {y[0]: None for y in passed if y}
    near = [*x.lines, *(y[0] for y in (*made, used) if y), *lines]
    arrays = {y for eqn in self.equations for y in eqn.lines}
    return Location(
      x.lines, x.eqn.primitive.name, what, made, (*lines,),
      python_lines(near, arrays), used, collective,
      len(self.found) / len(self.equations),
    )

  def used(self, x: Equation) -> tuple[str, ...]:
    """Returns the lines of the first operation at another line that uses it."""
    queue, seen = [x], {x.path}
    while queue:
      eqn = min(queue, key=lambda y: self.positions[y.path])
      queue.remove(eqn)
      if _level(x.lines, eqn.lines) is not None:
        return eqn.lines
      for user in (y for number in eqn.results
                   for y in self.users.get(number, ())):
        if user.path not in seen:
          seen.add(user.path)
          queue.append(user)
    return ()

  def origins(self, x: Equation) -> tuple[tuple[str, ...], ...]:
    """Returns the lines of earlier operations; see `Location.made`."""
    found: dict[int, tuple[str, ...]] = {}
    queue, seen = [x], {x.path}
    while queue and len(found) < len(x.lines):
      for number in queue.pop(0).operands:
        number = self.values.links.get(number, number)
        before = self.makers.get(number)
        if before is None or before.path in seen:
          continue
        seen.add(before.path)
        queue.append(before)
        if before.eqn.primitive.name in (*_MOVES, _CAST):
          continue
        level = _level(x.lines, before.lines)
        if level is not None:
          found.setdefault(level, before.lines)
    return tuple(found[level] for level in sorted(found, reverse=True))
