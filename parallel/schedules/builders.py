"""Builders of schedules, by the names that configs use."""

from collections.abc import Callable
import functools
import inspect
import typing
from typing import Any

from parallel import checks
from parallel.schedules import (
  direct,
  double_tree,
  grid,
  multitree,
  pairwise,
  ring,
)
from parallel.schedules.optimal import trees
from parallel.schedules.pipeline import pipelined
from parallel.schedules.schedule import (
  COLLECTIVES,
  Collective,
  Schedule,
  from_gather,
)
from parallel.topology.graph import Topology

Builder = Callable[..., Schedule]


def _of(gather: Callable[..., Schedule]) -> Builder:
  """Returns a builder of all three collectives, given one of all-gathers."""

  @functools.wraps(gather)  # keeps its signature
  def build(
    topology: Topology, collective: Collective, **options: Any
  ) -> Schedule:
    return from_gather(
      functools.partial(gather, **options), topology, collective
    )

  return build


BUILDERS: dict[str, Builder] = {
  "ring": _of(ring.gather),
  "bidirectional_ring": _of(ring.gather_both_ways),
  "ring_2d": grid.two_pass,
  "bucket": _of(grid.bucket_gather),
  "halving_doubling": _of(pairwise.halving_doubling),
  "hdrm": _of(pairwise.hdrm),
  "double_tree": double_tree.build,
  "swing": _of(pairwise.swing),
  "direct": _of(direct.gather),
  "multitree": _of(multitree.gather),
  "optimal": trees.build,
}


def named(text: str) -> tuple[str, dict[str, Any]]:
  """Reads a builder and its options: ``"multitree,farthest_first=True"``.

  Raises:
    ValueError: The name or an option is unknown, or a value is of another type
      than the builder takes.
  """
  name, options = checks.options(text)
  checks.known("schedule ", name, BUILDERS)
  functions = [build, BUILDERS[name]]
  if functions[1] is trees.build:  # which passes its options on
    functions.append(trees.forest)
  taken = {
    p.name: typing.get_args(p.annotation) or (p.annotation,)
    for function in functions
    for p in inspect.signature(function).parameters.values()
    if p.kind == p.KEYWORD_ONLY
  }
  for option, value in options.items():
    checks.known(f"{name}'s option ", option, taken)
    # The values of a Literal, or types.
    allowed = taken[option]
    fits = value in allowed or type(value) in allowed or (
      type(value) is int and float in allowed
    )
    if not fits:
      names = ", ".join(
        a.__name__ if isinstance(a, type) else repr(a) for a in allowed
      )
      raise ValueError(f"{name}'s {option}={value!r} must be of {names}")
  return name, options


def build(
  name: str,
  topology: Topology,
  collective: Collective = "all_reduce",
  *,
  pieces: int = 1,
  **options: Any,
) -> Schedule:
  """Builds a schedule with the builder of that name.

  How many pieces are best depends on the size of the message:
  `caatnet.studies.collectives.chosen` chooses them.

  Args:
    name: A key of ``BUILDERS``.
    topology: The network that the schedule runs on.
    collective: "all_reduce", "reduce_scatter" or "all_gather".
    pieces: Pieces into which each chunk is cut, which follow one another
      (`parallel.schedules.pipeline`); 1 for whole chunks.
    **options: Keyword arguments of that builder.

  Raises:
    ValueError: The name, collective or an option is unknown, or the builder
      does not take the topology.
  """
  checks.known("schedule ", name, BUILDERS)
  checks.known("collective ", collective, COLLECTIVES)
  checks.at_least("pieces", pieces)
  try:
    schedule = BUILDERS[name](topology, collective, **options)
  except TypeError as error:
    # Without options a TypeError is a bug of the builder, not of the config.
    if not options:
      raise
    raise ValueError(f"schedule {name!r}: {error}") from error
  return pipelined(schedule, topology, pieces)
