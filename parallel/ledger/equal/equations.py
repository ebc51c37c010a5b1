"""Equations of a program, and how its values are connected."""

from collections.abc import Sequence
import difflib
import itertools
import math
from typing import Any, NamedTuple

from jax.extend import core

from parallel.ledger.equal.interpret import Path, inner_jaxprs, scan_sizes
from parallel.ledger.equal.sources import is_library, source_lines


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
        of_results = visit(
          inner, mine, here, outside, loops, loop, sizes,
          lines if is_library(info) else called,
        )
      numbers |= zip(eqn.outvars, of_results, strict=True)
    return list(read(jaxpr.outvars))

  jaxpr = closed.jaxpr
  found.results.extend(
    visit(jaxpr, [next(fresh) for _ in jaxpr.invars], (), 0, (), None, {})
  )
  return found

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
