"""Registry of schedule builders, keyed by the names that configs use."""

from collections.abc import Callable
import functools
import inspect
import typing
from typing import Any

from parallel.base import checks
from parallel.plans.schedules import (
  direct,
  double_tree,
  grid,
  multitree,
  pairwise,
  renumber,
  ring,
)
from parallel.plans.schedules.optimal import trees
from parallel.plans.schedules.pipeline import pipelined
from parallel.plans.schedules.schedule import (
  COLLECTIVES,
  Collective,
  Schedule,
  from_gather,
)
from parallel.plans.topology.graph import Topology

Builder = Callable[..., Schedule]


def _builder_from_gather(gather: Callable[..., Schedule]) -> Builder:
  """Returns a builder of all collectives from a builder of all-gathers."""

  @functools.wraps(gather)  # keeps its signature
  def build(
    topology: Topology, collective: Collective, **options: Any
  ) -> Schedule:
    return from_gather(
      functools.partial(gather, **options), topology, collective
    )

  return build


BUILDERS: dict[str, Builder] = {
  "ring": _builder_from_gather(ring.gather),
  "bidirectional_ring": _builder_from_gather(ring.gather_both_ways),
  "ring_2d": grid.build_ring_2d,
  "bucket": _builder_from_gather(grid.bucket_gather),
  "halving_doubling": _builder_from_gather(pairwise.halving_doubling),
  "hdrm": _builder_from_gather(pairwise.hdrm),
  "double_tree": double_tree.build,
  "swing": _builder_from_gather(pairwise.swing),
  "direct": _builder_from_gather(direct.gather),
  "multitree": _builder_from_gather(multitree.gather),
  "optimal": trees.build,
}


def parse_builder(text: str) -> tuple[str, dict[str, Any]]:
  """Parses the name of a builder and its options.

  Example:
    >>> parse_builder("multitree,farthest_first=True")
    ('multitree', {'farthest_first': True})

  Args:
    text: Name of a builder, then comma-separated ``option=value`` pairs.

  Returns:
    The name and the keyword arguments for `build`.

  Raises:
    ValueError: The name or an option is unknown, or a value has a type that
      the builder does not accept.
  """
  name, options = checks.parse_options(text)
  checks.known("schedule ", name, BUILDERS)
  functions = [build, BUILDERS[name]]
  if functions[1] is trees.build:  # forwards its options to `forest`
    functions.append(trees.forest)
  taken = {
    p.name: typing.get_args(p.annotation) or (p.annotation,)
    for function in functions
    # The annotation's alternatives: members of a union, values of a Literal.
    for p in inspect.signature(function).parameters.values()
    if p.kind == p.KEYWORD_ONLY
  }
  for option, value in options.items():
    checks.known(f"{name}'s option ", option, taken)
    # `allowed` holds values (of a Literal) and types.
    allowed = taken[option]
    fits = value in allowed or type(value) in allowed or (
      type(value) is int and float in allowed
    )
    if not fits:
      names = ", ".join(
        a.__name__ if isinstance(a, type) else repr(a) for a in allowed
      )
      raise ValueError(
        f"{name}'s {option}={value!r} is not allowed; allowed are {names}"
      )
  return name, options


def build(
  name: str,
  topology: Topology,
  collective: Collective = "all_reduce",
  *,
  pieces: int = 1,
  numbering: int = 0,
  **options: Any,
) -> Schedule:
  """Builds a schedule with the named builder.

  The best ``pieces`` depends on the message size, and the best ``numbering`` on
  the network: `caatnet.studies.collectives.chosen` selects them.

  Example:
    On four ranks, the ring's all-reduce is three rounds of reduce-scatter and
    three of all-gather:

    >>> from parallel.plans.topology.builders import ring as ring_topology
    >>> schedule = build("ring", ring_topology(4))
    >>> len(schedule.rounds), schedule.num_transfers
    (6, 24)
    >>> schedule.rounds[3][0]  # first copy of the all-gather
    Transfer(source=0, destination=1, chunk=0, operation='copy', path=(0, 1))

  Args:
    name: A key of ``BUILDERS``.
    topology: Network that the schedule runs on.
    collective: "all_reduce", "reduce_scatter" or "all_gather".
    pieces: Number of parts into which each chunk is cut for pipelining
      (`parallel.plans.schedules.pipeline`); 1 keeps whole chunks.
    numbering: Index of the node numbering in which the schedule is built
      (`parallel.plans.schedules.renumber.renumber_topology`); 0 keeps the
      topology's.
    **options: Keyword arguments of the builder.

  Returns:
    The schedule, not checked. `parallel.plans.schedules.check.check` proves it.

  Raises:
    ValueError: The name, the collective or an option is unknown, or the builder
      does not support the topology.
  """
  checks.known("schedule ", name, BUILDERS)
  checks.known("collective ", collective, COLLECTIVES)
  turned = renumber.renumber_topology(topology, numbering)
  try:
    schedule = BUILDERS[name](turned.topology, collective, **options)
  except TypeError as error:
    # Without options a TypeError is a bug in the builder, not in the config.
    if not options:
      raise
    raise ValueError(f"schedule {name!r}: {error}") from error
  if numbering:
    schedule = renumber.restore_numbers(schedule, turned.order)
  return pipelined(schedule, topology, pieces)
