"""Table of the kinds of parallel axes: what the ranks of an axis share.

Each kind is a row of `AXES`, from which meshes, batches, reductions of
gradients, partitions and checks of configs derive what they need to know about
an axis. A new kind of axis is one row, and one key with the same name in the
section of parallel axes of a run's config: the number of its ranks.
"""

from collections.abc import Iterable, Mapping
import dataclasses
from typing import Literal

from parallel.plans.zero.partition import Level


@dataclasses.dataclass(frozen=True)
class AxisKind:
  """Kind of parallel axis.

  Attributes:
    name: Name of the axis, of its mesh axis, and of the config key with its
      number of ranks.
    parameters: Parameters of the ranks: "own", each rank trains a separate
      model; "copies", all ranks have equal parameters; "slices", a parameter
      whose spec names the axis is cut over the ranks, and the ranks have copies
      of all others.
    examples: Whether the ranks see different examples of a batch. Gradients are
      summed over ranks with the same examples, and averaged over data-parallel
      ranks.
    optional: Whether a mesh has the axis only if it has more than one rank.
    resizable: Whether a run may resume with another number of ranks, since
      neither its checkpoints nor its results depend on it.
    planned: Field of `parallel.plans.planner.space.Configuration` with the
      number of ranks; "" if there is no such field.
  """

  name: str
  parameters: Literal["own", "copies", "slices"]
  examples: bool = False
  optional: bool = False
  resizable: bool = False
  planned: str = ""

  @property
  def is_data(self) -> bool:
    """Whether the ranks are data-parallel ranks of one worker.

    A ZeRO partition can cut parameters, gradients and moments over them.
    """
    return self.examples and self.parameters != "own"


# The kinds of axes, outermost first.
AXES = (
  AxisKind("worker", "own", examples=True),
  AxisKind("data", "copies", examples=True, planned="data"),
  AxisKind(
    "stage", "slices", optional=True, resizable=True, planned="stages"
  ),
  AxisKind("tensor", "slices", planned="tensor"),
)


def kind(name: str) -> AxisKind:
  """Returns the kind of the axis with a name.

  A name that is not in the table is a level into which a run divides its
  data-parallel ranks.

  Example:
    >>> kind("tensor").parameters, kind("node").name
    ('slices', 'data')
  """
  found = {each.name: each for each in AXES}
  return found.get(name, found["data"])


def data_levels(
  sizes: Mapping[str, int], levels: Iterable[Level]
) -> tuple[Level, ...]:
  """Returns all levels of data-parallel ranks of a worker, outermost first.

  Args:
    sizes: Number of ranks by name of the kind; 1 by default.
    levels: Levels into which the ranks of the kind "data" are divided.
  """
  return tuple(
    Level(name, size) for name, size in axis_sizes(sizes, levels).items()
    if kind(name).is_data
  )


def axis_sizes(
  sizes: Mapping[str, int], levels: Iterable[Level]
) -> dict[str, int]:
  """Returns the number of ranks of each axis of a mesh, outermost first.

  Args:
    sizes: Number of ranks by name of the kind; 1 by default.
    levels: Levels into which the ranks of the kind "data" are divided; each is
      an axis. Levels of other kinds are left out.

  Example:
    >>> sizes = {"worker": 2, "data": 8, "stage": 1, "tensor": 4}
    >>> axis_sizes(sizes, [Level("node", 2), Level("gpu", 4)])
    {'worker': 2, 'node': 2, 'gpu': 4, 'tensor': 4}
  """
  found: dict[str, int] = {}
  for each in AXES:
    if each.name == "data":
      found |= {
        level.name: level.size for level in levels
        if kind(level.name).name == "data"
      }
    elif not each.optional or sizes.get(each.name, 1) > 1:
      found[each.name] = sizes.get(each.name, 1)
  return found
