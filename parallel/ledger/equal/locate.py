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
import difflib
import itertools
import math
import pathlib
import sysconfig
from typing import Any, NamedTuple

from jax.extend import core
import numpy as np

from parallel.ledger.equal.interpret import Path, inner_jaxprs, scan_sizes
from parallel.ledger.equal.programs import LayoutProgram

# Bytes of recorded values of one run, over all devices.
_BUDGET = 2**30
# Values in float64 are equal if they differ by at most this fraction of the
# largest one.
TOLERANCE = 1e-8
_COLLECTIVES = {
  "psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_to_all",
  "all_gather_invariant", "reduce_scatter", "ppermute", "ragged_all_to_all",
}
# Folders and files whose lines are not the user's.
_LIBRARIES = (
  *{f"{sysconfig.get_path(name)}/" for name in (
    "stdlib", "platstdlib", "purelib", "platlib"
  )},
  f"{pathlib.Path(__file__).parent}/", "<",
)
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


class Equation(NamedTuple):
  """Equation of a program that is not control flow.

  Attributes:
    path: Its position (`parallel.ledger.equal.interpret.Path`).
    eqn: The equation.
    outside: Number of loops outside of the enclosing `jax.shard_map`.
    loops: Lengths of all enclosing loops, outermost first.
    loop: Path of the outermost enclosing loop, and whether it runs from its
      last to its first iteration; None outside of loops.
    sizes: Mesh axis -> size, inside of `jax.shard_map`.
    operands: Number of each operand among the values of the program; None for a
      literal.
    results: Likewise for each result.
    lines: FILE:LINE of the user's code that made it, then of its callers.
  """

  path: Path
  eqn: Any
  outside: int
  loops: tuple[int, ...]
  loop: tuple[tuple[int, ...], bool] | None
  sizes: dict[str, int]
  operands: tuple[int | None, ...]
  results: tuple[int, ...]
  lines: tuple[str, ...]

  @property
  def num_bytes(self) -> int:
    """Bytes of its results in float64, over all devices and iterations."""
    copies = math.prod(self.loops) * math.prod(self.sizes.values())
    return 8 * copies * sum(
      math.prod(getattr(x.aval, "shape", ())) for x in self.eqn.outvars
    )


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
    used: Likewise for the first operation that uses its result.
    collective: The last collective before it: name, axes, and line; "" if there
      is none.
    share: Fraction of the values that could be compared.
  """

  lines: tuple[str, ...]
  primitive: str
  what: str
  made: tuple[tuple[str, ...], ...]
  passed: tuple[str, ...]
  used: tuple[str, ...]
  collective: str
  share: float


def source_lines(eqn: Any) -> tuple[str, ...]:
  """Returns FILE:LINE of the user's code that made an equation, and callers."""
  traceback = eqn.source_info.traceback
  return tuple(
    f"{frame.file_name}:{frame.line_num}"
    for frame in (() if traceback is None else traceback.frames)
    if not frame.file_name.startswith(_LIBRARIES)
  )


class Values(NamedTuple):
  """Equations of a program, and how its values are connected.

  Attributes:
    equations: Equations that the interpreter can record, in order.
    arguments: Arguments of `jax.shard_map`: number, spec and axes.
    leaving: Results of `jax.shard_map`, before they leave it: likewise.
    links: Number inside of `jax.shard_map` of an argument or result -> that
      outside, or the reverse: where a value comes from.
    carried: Number of a value that a loop carries -> the numbers of its first
      value and of that after an iteration, and the depth of the loop.
    results: Numbers of the results.
  """

  equations: list[Equation]
  arguments: list[tuple[int, Any, list[str]]]
  leaving: list[tuple[int | None, Any, list[str]]]
  links: dict[int, int | None]
  carried: dict[int, tuple[int | None, int | None, int]]
  results: list[int | None]


def values_of(closed: Any) -> Values:
  """Returns the equations of a program, with numbers of their values."""
  found = Values([], [], [], {}, {}, [])
  fresh = itertools.count()

  def visit(
    jaxpr: Any, operands: Sequence[int | None], path: tuple[int, ...],
    outside: int, loops: tuple[int, ...], loop: Any, sizes: dict[str, int],
    called: tuple[str, ...] | None = None,
  ) -> list[int | None]:
    """Visits a jaxpr; returns the numbers of its results.

    ``called`` are the lines that call a library's jitted function.
    """
    numbers = dict(zip(jaxpr.invars, operands, strict=True))

    def read(atoms: Sequence[Any]) -> tuple[int | None, ...]:
      return tuple(
        None if isinstance(x, core.Literal) else numbers.get(x) for x in atoms
      )

    for index, eqn in enumerate(jaxpr.eqns):
      here, mine = (*path, index), read(eqn.invars)
      lines = source_lines(eqn) if called is None else called
      inner = next(inner_jaxprs(eqn), None)
      if inner is None:
        results = tuple(next(fresh) for _ in eqn.outvars)
        found.equations.append(
          Equation(
            here, eqn, outside, loops, loop, sizes, mine, results, lines
          )
        )
        numbers |= zip(eqn.outvars, results, strict=True)
        continue
      inner, p = getattr(inner, "jaxpr", inner), eqn.params
      mine = mine[len(mine) - len(inner.invars) :]
      if eqn.primitive.name == "scan":
        first, num = scan_sizes(eqn)
        carries = [next(fresh) for _ in range(num)]
        of_results = visit(
          inner, (*mine[:first], *carries, *mine[first + num :]), here,
          outside, (*loops, p["length"]), loop or (here, p["reverse"]), sizes,
          called,
        )
        found.carried.update(
          (x, (start, after, len(loops))) for x, start, after in zip(
            carries, mine[first : first + num], of_results[:num], strict=True
          )
        )
      elif eqn.primitive.name == "shard_map":
        axes = [x for x in p["mesh"].axis_names if x in p["newly_manual_axes"]]
        entering = [next(fresh) for _ in mine]
        found.links.update(zip(entering, mine, strict=True))
        found.arguments.extend(
          (x, spec, axes)
          for x, spec in zip(entering, p["in_specs"], strict=True)
        )
        manual = {x: p["mesh"].shape[x] for x in axes}
        inside = visit(
          inner, entering, here, len(loops), loops, loop, sizes | manual, called
        )
        found.leaving.extend(
          (x, spec, axes)
          for x, spec in zip(inside, p["out_specs"], strict=True)
        )
        of_results = [next(fresh) for _ in inside]
        found.links.update(zip(of_results, inside, strict=True))
      else:
        # The jaxpr of a library's function may be that of an earlier call.
        info = str(getattr(inner.debug_info, "func_src_info", ""))
        is_library = any(prefix in info for prefix in _LIBRARIES[:-1])
        of_results = visit(
          inner, mine, here, outside, loops, loop, sizes,
          lines if is_library else called,
        )
      numbers |= zip(eqn.outvars, of_results, strict=True)
    return list(read(jaxpr.outvars))

  jaxpr = closed.jaxpr
  found.results.extend(
    visit(jaxpr, [next(fresh) for _ in jaxpr.invars], (), 0, (), None, {})
  )
  return found


def _dims(spec: Any) -> dict[str, int]:
  """Returns the dim of each axis that a spec names."""
  return {
    name: dim for dim, entry in enumerate(spec) if entry
    for name in ((entry,) if isinstance(entry, str) else entry)
  }


def pairs(
  one: Sequence[Equation], many: Sequence[Equation]
) -> list[tuple[Equation, Equation]]:
  """Returns corresponding equations of two programs, in order."""

  def keys(found: Sequence[Equation]) -> list[tuple[str, str, int]]:
    return [
      (x.eqn.primitive.name, "".join(x.lines[:1]), len(x.loops)) for x in found
    ]

  blocks = difflib.SequenceMatcher(
    None, keys(one), keys(many), autojunk=False
  ).get_matching_blocks()
  return [
    (one[block.a + i], many[block.b + i]) for block in blocks
    for i in range(block.size)
    if one[block.a + i].loops == many[block.b + i].loops
  ]


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
  scale = 0.0
  if reference.size and not exact:
    finite = np.where(np.isfinite(reference), reference, 0)
    scale = float(np.abs(finite).max())

  def close(x: np.ndarray, y: np.ndarray) -> bool:
    if exact:
      return bool(np.array_equal(x, y))
    return bool(np.allclose(
      x, y, rtol=0, atol=tolerance * scale, equal_nan=True
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
  return trace.first([found.results[i] for i in wrong]) or trace.leaving()


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
    self.users: dict[int, Equation] = {}
    for eqn in self.equations:
      for x in eqn.operands:
        if x is not None:
          self.users.setdefault(x, eqn)
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
    origins: list[tuple[Equation, list[Equation]]] = []
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
  ) -> tuple[list[Equation], list[Equation]]:
    """Returns wrong operations that make values, and those that are passed.

    Args:
      numbers: Numbers of the values.
      loop: Outermost loop in which they are used; None outside of loops.
      when: Iteration of this loop in which they are used.
    """
    queue = [(x, when) for x in numbers]
    guilty: list[Equation] = []
    passed: list[Equation] = []
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
        passed.append(x)
        queue += [(y, when) for y in x.operands]
      elif what and (x.loop != loop or since <= when):
        guilty.append(x)
    return guilty, passed

  def leaving(self) -> Location | None:
    """Returns a value that leaves `jax.shard_map` as equal, but is not."""
    for number, spec, axes in self.values.leaving:
      if number not in self.makers:
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
    self, x: Equation, what: str, passed: Sequence[Equation]
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
    used = next((
      self.users[y].lines for y in x.results if y in self.users
    ), ())
    lines = {y.lines[0]: None for y in passed if y.lines}
    return Location(
      x.lines, x.eqn.primitive.name, what, self.origins(x), (*lines,), used,
      collective, len(self.found) / len(self.equations),
    )

  def origins(self, x: Equation) -> tuple[tuple[str, ...], ...]:
    """Returns the lines of earlier operations; see `Location.made`."""
    found: dict[int, tuple[str, ...]] = {}
    here = x.lines[::-1]  # outermost first
    queue, seen = [x], {x.path}
    while queue and len(found) < len(here):
      for number in queue.pop(0).operands:
        number = self.values.links.get(number, number)
        before = self.makers.get(number)
        if before is None or before.path in seen:
          continue
        seen.add(before.path)
        queue.append(before)
        if before.eqn.primitive.name in (*_MOVES, _CAST):
          continue
        chains = zip(here, before.lines[::-1], strict=False)
        level = next((i for i, (a, b) in enumerate(chains) if a != b), None)
        if level is not None:
          found.setdefault(level, before.lines)
    return tuple(found[level] for level in sorted(found, reverse=True))
