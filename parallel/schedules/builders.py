"""The builders, by the names that configs use."""

from collections.abc import Callable
import functools
from typing import Any

from parallel.schedules import (
  direct,
  double_tree,
  exchange,
  grid,
  multitree,
  optimal,
  ring,
)
from parallel.schedules.schedule import (
  COLLECTIVES,
  Collective,
  Schedule,
  from_gather,
)
from parallel.topology import Topology

Builder = Callable[..., Schedule]


def _of(gather: Callable[..., Schedule]) -> Builder:
  """A builder of three collectives, given one of all-gathers."""

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
  "halving_doubling": _of(exchange.halving_doubling),
  "hdrm": _of(exchange.hdrm),
  "double_tree": double_tree.build,
  "swing": _of(exchange.swing),
  "direct": _of(direct.gather),
  "multitree": _of(multitree.gather),
  "optimal": optimal.build,
}


def build(
  name: str,
  topology: Topology,
  collective: Collective = "all_reduce",
  **options: Any,
) -> Schedule:
  """A schedule by the name of its builder.

  Args:
    name: A key of ``BUILDERS``.
    topology: What it runs on.
    collective: Which of the three.
    **options: The builder's own.

  Raises:
    ValueError: An unknown name, collective or option, or a topology that the
      builder does not take.
  """
  if name not in BUILDERS:
    raise ValueError(f"schedule {name!r} must be one of {', '.join(BUILDERS)}")
  if collective not in COLLECTIVES:
    raise ValueError(
      f"collective {collective!r} must be one of {', '.join(COLLECTIVES)}"
    )
  try:
    return BUILDERS[name](topology, collective, **options)
  except TypeError as error:
    if not options:
      raise
    raise ValueError(f"schedule {name!r}: {error}") from error
