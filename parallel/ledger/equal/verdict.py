"""Rounding or bug: differences between layouts against a measured envelope.

The envelope of a result is how much it changes on one device if the order of
sums changes (`parallel.ledger.equal.interpret.permuted`), if arguments change
by one unit in the last place, and if the step is computed in float64. The same
changes are measured in float64, where rounding is 2^29 times smaller than in
float32, and a bug has the same size as before. So the two comparisons seldom
contradict each other:

| own dtype | float64 | verdict |
|---|---|---|
| inside | inside | rounding |
| any | outside | bug |
| outside | inside | bug: the layout computes in fewer bits |
| otherwise | | undecided |
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from parallel.ledger.equal.programs import LayoutProgram, Results, widened

Verdict = Literal["rounding", "undecided", "bug"]
_WORST: tuple[Verdict, ...] = ("rounding", "undecided", "bug")
# Differences in multiples of the envelope: up to the first number they are
# rounding, from the second on a bug.
OWN_LIMITS = (16.0, 64.0)
WIDE_LIMITS = (1e3, 1e6)
_SEEDS = (0, 1)  # of permutations, and of changed arguments


class Size(NamedTuple):
  """Size of a difference: root mean square, and largest absolute value."""

  rms: float
  largest: float

  def over(self, other: "Size") -> float:
    """Returns the larger ratio of the two numbers to those of ``other``."""
    return max(
      0.0 if x == 0 else float("inf") if y == 0 else x / y
      for x, y in zip(self, other, strict=True)
    )


def size_of(x: np.ndarray) -> Size:
  """Returns the size of an array."""
  x = np.asarray(x, "float64")
  if not x.size:
    return Size(0.0, 0.0)
  return Size(float(np.sqrt(np.mean(np.square(x)))), float(np.abs(x).max()))


def difference(x: np.ndarray, y: np.ndarray) -> np.ndarray:
  """Returns x - y in float64: 0 for two NaN, infinity for one."""
  x, y = (np.asarray(a, "float64") for a in (x, y))
  with np.errstate(invalid="ignore"):
    found = np.nan_to_num(x - y, nan=np.inf, posinf=np.inf, neginf=-np.inf)
  return np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, found)


def scale_of(x: np.ndarray) -> float:
  """Returns the root mean square of a result, with 0 for NaN and infinity."""
  return size_of(np.where(np.isfinite(np.asarray(x, "float64")), x, 0)).rms


@dataclasses.dataclass(frozen=True)
class ResultComparison:
  """Comparison of one result of the first step.

  Attributes:
    name: Path of the result.
    verdict: Verdict about the difference.
    difference: Difference in the step's own dtypes, absolute.
    relative: Largest difference, relative to the root mean square of the result
      on one device.
    own: Difference in multiples of the envelope.
    wide: Likewise in float64.
    spread: Largest difference between the devices' copies of the result.
    has_nan: Whether the result has NaN on one device.
  """

  name: str
  verdict: Verdict
  difference: Size
  relative: float
  own: float
  wide: float
  spread: float
  has_nan: bool = False

  @property
  def has_fewer_bits(self) -> bool:
    """Whether the layouts agree in float64 only."""
    return self.verdict == "bug" and self.wide <= WIDE_LIMITS[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Reference:
  """Results on one device, and how much rounding changes them.

  Attributes:
    program: The step on one device.
    results: Results of the first step.
    wide: Results in float64.
    envelope: Size of changes by rounding, by result.
    wide_envelope: Likewise in float64.
  """

  program: LayoutProgram
  results: Sequence[np.ndarray]
  wide: Sequence[np.ndarray]
  envelope: Sequence[Size]
  wide_envelope: Sequence[Size]


def measure(program: LayoutProgram) -> Reference:
  """Runs a step on one device, and measures its envelope.

  Raises:
    ValueError: Two executions differ, or rounding decides what is finite.
  """
  args = program.args
  results = program.run(args).values
  for name, x, y in zip(
    program.result_names, results, program.run(args).values, strict=True
  ):
    if size_of(difference(x, y)).largest:
      raise ValueError(
        f"the step is not deterministic on one device: {name} differs between "
        "two executions with equal arguments"
      )
  wide = program.run_by_equations(args, wide=True).values
  changed, wide_changed = [], []
  for seed in _SEEDS:
    changed.append(program.run_by_equations(args, seed=seed).values)
    changed.append(program.run(nudged(args, seed)).values)
    wide_changed.append(
      program.run_by_equations(args, wide=True, seed=seed).values
    )
    wide_args = nudged([widened(x) for x in args], seed)
    wide_changed.append(program.run_by_equations(wide_args, wide=True).values)
  names = program.result_names
  return Reference(
    program, results, wide, _envelope(names, results, changed, wide),
    _envelope(names, wide, wide_changed),
  )


def nudged(args: Sequence[Any], seed: int) -> list[Any]:
  """Returns arguments whose floats change by one unit in the last place."""
  rng = np.random.default_rng(seed)

  def change(x: Any) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return x
    towards = np.where(rng.random(x.shape) < 0.5, -np.inf, np.inf)
    # NumPy has no next bfloat16; a relative change by its epsilon is near.
    if x.dtype.itemsize < 4:
      eps = float(jnp.finfo(x.dtype).eps)
      return (np.asarray(x, "float32") * (1 + eps * np.sign(towards))).astype(
        x.dtype
      )
    return np.nextafter(x, towards.astype(x.dtype)).astype(x.dtype)

  return [change(x) for x in args]


def _envelope(
  names: Sequence[str], results: Sequence[np.ndarray],
  changed: Sequence[Sequence[np.ndarray]],
  wide: Sequence[np.ndarray] | None = None,
) -> list[Size]:
  """Returns the largest change of each result, at least one rounding of it.

  The change to the results in float64 counts unless it is of the size of the
  result and much larger than all others: then it is not rounding, but the range
  of a dtype that decides, for example whether gradients overflow.
  """
  found = []
  for place, x in enumerate(results):
    eps = 0.0
    if jnp.issubdtype(x.dtype, jnp.floating):
      eps = float(jnp.finfo(x.dtype).eps)
    scale = scale_of(x)
    sizes = [size_of(difference(run[place], x)) for run in changed]
    sizes.append(Size(eps * scale, eps * scale))
    found.append(Size(*map(max, *sizes)))
    if wide is not None:
      far = size_of(difference(wide[place], x))
      if far.rms < scale / 4 or far.over(found[-1]) < OWN_LIMITS[1]:
        found[-1] = Size(*map(max, found[-1], far))
    if not np.isfinite(found[-1].largest):
      raise ValueError(
        f"{names[place]} becomes NaN or infinite on one device, or ceases to "
        "be, if only its rounding changes"
      )
  return found


def compare(
  reference: Reference, program: LayoutProgram
) -> tuple[list[ResultComparison], list[np.ndarray]]:
  """Compares the first step on a layout with that on one device.

  The difference of a result is at least that between its copies on the devices.

  Returns:
    A comparison per result, and the results in float64.

  Raises:
    ValueError: The results have another structure or other shapes.
  """
  one = reference.program
  if program.structure != one.structure or (
    program.result_types != one.result_types
  ):
    raise ValueError(
      "the structure, shapes or dtypes of the results depend on the layout: "
      f"{_first_other(one, program)}"
    )
  results = program.run(reference.program.args)
  wide = program.run_by_equations(reference.program.args, wide=True)
  found = []
  for place, name in enumerate(one.result_names):
    largest = _size(results, reference.results, place)
    own = largest.over(reference.envelope[place])
    of_wide = _size(wide, reference.wide, place).over(
      reference.wide_envelope[place]
    )
    if not jnp.issubdtype(results.values[place].dtype, jnp.floating):
      own = of_wide  # rounding may change, for example, the index of a maximum
    scale = scale_of(reference.results[place])
    found.append(ResultComparison(
      name, _decide(own, of_wide), largest,
      largest.largest / scale if scale else float(largest.largest > 0),
      own, of_wide, results.spreads[place],
      bool(np.isnan(np.asarray(reference.results[place], "float64")).any()),
    ))
  return found, wide.values


def _size(
  results: Results, reference: Sequence[np.ndarray], place: int
) -> Size:
  """Returns the size of a result's difference, or of that of its copies."""
  change = size_of(difference(results.values[place], reference[place]))
  spread = results.spreads[place]
  return Size(*(max(x, spread) for x in change))


def is_outside(reference: Reference, results: Results, place: int) -> bool:
  """Returns whether a result in the step's own dtypes is a bug."""
  size = _size(results, reference.results, place)
  return size.over(reference.envelope[place]) >= OWN_LIMITS[1]


def _decide(own: float, wide: float) -> Verdict:
  if wide >= WIDE_LIMITS[1]:
    return "bug"
  if wide > WIDE_LIMITS[0]:
    return "undecided"
  if own >= OWN_LIMITS[1]:
    return "bug"
  return "undecided" if own > OWN_LIMITS[0] else "rounding"


def worst(found: Sequence[ResultComparison]) -> Verdict:
  """Returns the worst verdict of several results."""
  return max((x.verdict for x in found), key=_WORST.index, default="rounding")


def _first_other(one: LayoutProgram, program: LayoutProgram) -> str:
  for name, mine, theirs in zip(
    one.result_names, one.result_types, program.result_types, strict=False
  ):
    if mine != theirs:
      return f"{name} is {theirs[1]}{list(theirs[0])} instead of {mine[1]}" + (
        f"{list(mine[0])}"
      )
  return "another tree"


def explain(
  reference: np.ndarray, found: np.ndarray, before: np.ndarray | None,
  axes: Mapping[str, int],
) -> str:
  """Returns an explanation of a wrong result; "" if there is no simple one.

  Args:
    reference: Result on one device, in float64.
    found: Result on the layout, in float64.
    before: Argument that the result replaces; None if there is none.
    axes: Axis -> number of devices.
  """
  mine, theirs = (np.asarray(x, "float64") for x in (reference, found))
  what = "it"
  if before is not None:
    mine, theirs = (x - np.asarray(before, "float64") for x in (mine, theirs))
    what = "its change"
  scale = size_of(mine).largest
  if not scale:
    return "" if before is None else "it changes, but does not on one device"
  if not size_of(theirs).largest:
    return f"{what} is zero: a stale or unused value"
  factor = float(np.vdot(mine, theirs) / np.vdot(mine, mine))
  if abs(factor - 1) < 1e-9:
    return ""
  if np.allclose(theirs, factor * mine, rtol=1e-4, atol=1e-6 * scale):
    for names, size in _products(axes):
      for value, meaning in (
        (size, "a sum where a mean is meant, or a sum taken twice"),
        (1 / size, "a mean taken twice, or a missing sum"),
        (size**2, "a sum taken twice"),
      ):
        if abs(factor / value - 1) < 1e-3:
          return (
            f"{what} is {factor:.4g} times too large over {names}: {meaning}"
          )
    return f"{what} is multiplied by {factor:.6g}" if mine.size > 1 else ""
  right = np.isclose(theirs, mine, rtol=1e-6, atol=1e-9 * scale)
  for dim in range(mine.ndim):
    others = tuple(i for i in range(mine.ndim) if i != dim)
    rows = right.all(axis=others)
    share = rows.mean()
    if 0 < share < 1:
      empty = not np.any(np.compress(~rows, theirs, axis=dim))
      return (
        f"{what} is right in {share:.0%} of the slices along dim {dim}"
        + (" and zero in the others" if empty else "")
      )
    if mine.shape[dim] > 1 and np.allclose(
      np.sort(mine, axis=dim), np.sort(theirs, axis=dim), rtol=1e-6
    ):
      return f"{what} has the right slices along dim {dim} in another order"
  return ""


def _products(axes: Mapping[str, int]) -> list[tuple[str, int]]:
  """Returns names and sizes of all axes and of all products of axes."""
  found: list[tuple[str, int]] = []
  names = [name for name, size in axes.items() if size > 1]
  for mask in range(1, 2 ** len(names)):
    chosen = [name for i, name in enumerate(names) if mask >> i & 1]
    found.append(
      (" x ".join(chosen), int(np.prod([axes[name] for name in chosen])))
    )
  return sorted(found, key=lambda item: len(item[0]))
