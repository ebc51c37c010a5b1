"""Execution traces of a compiled program, one per device.

A trace has the program's schedule as a graph. Compute is a chain of nodes, and
the instructions between two communicating ones are one node. A collective waits
for the compute before it and for the previous one over the same axes; the
compute after its done waits for it. A permute is a send and a receive. Loops
are unrolled.

`parallel.plans.network.chakra` writes traces to files.
"""

from collections.abc import Iterator
import dataclasses
from typing import NamedTuple

from parallel.ledger.entries import SLICE_AXIS
from parallel.ledger.overlap import ScheduledProgram
from parallel.ledger.roofline import Cost
from parallel.ledger.timeline import CollectiveStart, ComputeAction, actions
from parallel.plans.network.chakra import Node


class _GroupedCollective(NamedTuple):
  """Collective of an instruction.

  Attributes:
    kind: Kind of the collective, as in `Node`.
    bytes: Operand bytes on one device.
    groups: Ranks of each device group, or (source, target) pairs of a permute.
  """

  kind: str
  bytes: int
  groups: tuple[tuple[int, ...], ...]


class _StartedCollectives(NamedTuple):
  """Start of an instruction's collectives.

  Attributes:
    number: Number of this execution, from 0.
    row: Axes over which they communicate, joined by ",".
    name: Name of the instruction.
    parts: The collectives.
  """

  number: int
  row: str
  name: str
  parts: tuple[_GroupedCollective, ...]


def traces(program: ScheduledProgram) -> Iterator[list[Node]]:
  """Yields the nodes of each device, in the order of the program's devices.

  Args:
    program: The program, with rates of a device. Times of collectives are not
      used.

  Raises:
    ValueError: Messages are not known: a kernel sends by itself, an exchange is
      ragged, or the program sends to other TPU slices.
  """
  steps = [*_steps(program)]
  for rank in range(program.reader.mesh_axes.num_devices):
    trace = _Trace(rank)
    for step in steps:
      trace.add(step)
    trace.flush()
    yield trace.nodes


def _steps(program: ScheduledProgram) -> Iterator[
  ComputeAction | _StartedCollectives | int
]:
  """Yields what a device does: compute, and starts and ends of collectives.

  An end is the number of the `_StartedCollectives`.
  """
  # Name of an instruction -> its collectives.
  parts: dict[str, tuple[_GroupedCollective, ...]] = {}
  for action in actions(program):
    if isinstance(action, ComputeAction):
      yield action
    elif isinstance(action, CollectiveStart):
      name = action.instruction.name
      if name not in parts:
        parts[name] = tuple(_grouped_collectives(program, action))
      yield _StartedCollectives(action.number, action.row, name, parts[name])
    else:
      yield action.number


def _grouped_collectives(
  program: ScheduledProgram, started: CollectiveStart
) -> Iterator[_GroupedCollective]:
  reader = program.reader
  for owner, found in reader.find(started.computation, started.instruction):
    entries = [e for e in reader.entry(owner, found, "") if e.bytes]
    if not entries:
      continue
    if found.opcode == "custom-call":
      raise ValueError(
        f"the kernel {found.name} sends messages itself, and these cannot be "
        "written to a trace"
      )
    if SLICE_AXIS in entries[0].axes or entries[0].kind == "ragged_all_to_all":
      raise ValueError(
        f"{found.name}: messages of ragged exchanges and messages between TPU "
        "slices cannot be written to a trace"
      )
    groups = reader.pairs(found).tolist() or reader.groups(found)
    # Merged collectives have several operands.
    yield _GroupedCollective(
      entries[0].kind, sum(e.bytes for e in entries),
      tuple(tuple(map(int, group)) for group in groups),
    )


@dataclasses.dataclass
class _Trace:
  """Builder of a rank's trace.

  Attributes:
    rank: The rank.
    nodes: Finished nodes.
    front: Indices of the nodes that the next compute waits for.
    rows: Axes, joined by "," -> indices of the nodes of the last collectives
      over these axes.
    sent: Number of a `_StartedCollectives` that has not ended -> indices of its
      nodes.
    computed: Cost of the compute since the last communicating instruction.
    first: Name of the first instruction of that compute.
  """

  rank: int
  nodes: list[Node] = dataclasses.field(default_factory=list)
  front: tuple[int, ...] = ()
  rows: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
  sent: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
  computed: Cost = dataclasses.field(default_factory=Cost)
  first: str = ""

  def add(self, step: ComputeAction | _StartedCollectives | int) -> None:
    if isinstance(step, ComputeAction):
      self.first = self.first or step.instruction.name
      self.computed += step.cost
      return
    self.flush()
    if isinstance(step, _StartedCollectives):
      after = tuple(dict.fromkeys(self.front + self.rows.get(step.row, ())))
      made = [n for part in step.parts for n in self.messages(step, part)]
      ids = range(len(self.nodes), len(self.nodes) + len(made))
      self.nodes += [node._replace(after=after) for node in made]
      self.sent[step.number] = tuple(ids)
      # A rank that takes no part in a permute does not delay later collectives.
      self.rows[step.row] = tuple(ids) or self.rows.get(step.row, ())
      return
    needed = self.sent.pop(step)
    # Dependencies of the needed nodes are implied, and need not be repeated.
    ended = {before for n in needed for before in self.nodes[n].after}
    self.front = tuple(n for n in self.front if n not in ended) + needed

  def messages(
    self, step: _StartedCollectives, part: _GroupedCollective
  ) -> Iterator[Node]:
    """Yields the rank's nodes of the collective ``part`` of a ``step``.

    Their dependencies are not set yet.
    """
    for group in part.groups:
      if self.rank not in group:
        continue
      if part.kind != "permute":
        yield Node(part.kind, step.name, (), part.bytes, ranks=group)
      elif group[0] != group[1]:  # else the device keeps its own data
        kind = "send" if self.rank == group[0] else "receive"
        yield Node(
          kind, step.name, (), part.bytes, ranks=group, tag=step.number
        )

  def flush(self) -> None:
    """Appends a node for compute since the last communicating instruction."""
    if self.computed.seconds:
      self.nodes.append(Node(
        "compute", self.first, self.front, int(self.computed.bytes),
        self.computed.seconds, int(self.computed.flops),
      ))
      self.front = (len(self.nodes) - 1,)
    self.computed, self.first = Cost(), ""
