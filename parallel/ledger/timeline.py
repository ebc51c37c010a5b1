"""Timeline of a compiled program: one row for compute, one per set of axes.

Instructions start in the order of the schedule. Compute takes the time of the
roofline (`parallel.ledger.roofline`), a collective the time on its links. An
asynchronous collective overlaps later instructions; its done waits for it.
Collectives over the same axes wait for each other. Times are lower bounds.
"""

from collections.abc import Iterator
import itertools
from typing import NamedTuple

from parallel.ledger import hlo
from parallel.ledger.overlap import ScheduledProgram
from parallel.ledger.roofline import Cost

COMPUTE = "compute"


class ComputeAction(NamedTuple):
  """Execution of an instruction that does not communicate.

  Attributes:
    instruction: The instruction.
    cost: Cost of the execution.
  """

  instruction: hlo.Instruction
  cost: Cost


class CollectiveStart(NamedTuple):
  """Start of the collectives of an instruction.

  Attributes:
    number: Number of this execution, from 0.
    computation: Computation that contains the instruction.
    instruction: The collective, the start of an asynchronous pair, or a wrapper
      of one of them.
    row: Row of the timeline: axes of the collectives, joined by ",".
    bytes: Operand bytes on one device.
    seconds: Time on the links.
  """

  number: int
  computation: hlo.Computation
  instruction: hlo.Instruction
  row: str
  bytes: int
  seconds: float


class CollectiveEnd(NamedTuple):
  """Point at which the result of the `CollectiveStart` ``number`` is needed."""

  number: int


Action = ComputeAction | CollectiveStart | CollectiveEnd


class Bar(NamedTuple):
  """Interval on a row of the timeline.

  Attributes:
    row: "compute", or the axes of a collective, joined by ",".
    name: Name of the instruction; on the row of compute, "wait for NAME" while
      nothing is computed.
    start_s: Start, in seconds from the start of the program.
    end_s: End, in seconds from the start of the program.
    where: Name stack of jax's operation.
    bytes: Bytes in main memory, or operand bytes of a collective.
    flops: FLOPs of products.
  """

  row: str
  name: str
  start_s: float
  end_s: float
  where: str
  bytes: float
  flops: float = 0.0


def actions(
  program: ScheduledProgram, start: str | None = None
) -> Iterator[Action]:
  """Yields what a device does in one execution, in the order of the schedule.

  A loop with an unknown trip count is executed once, and of a conditional the
  branch that takes longest.

  Args:
    program: The program, with rates of a device and its links.
    start: Name of the computation to run; None for the whole program.
  """
  yield from _Walk(program).actions(
    start or program.module.entry, itertools.count()
  )


def timeline(
  program: ScheduledProgram, start: str | None = None
) -> Iterator[Bar]:
  """Yields the bars of one execution, in the order of the schedule.

  Args:
    program: The program, with rates of a device and its links.
    start: Name of the computation to run; None for the whole program.
  """
  now = 0.0
  free: dict[str, float] = {}  # row -> seconds at which it is free
  sent: dict[int, Bar] = {}  # transfers whose results are not needed yet
  for action in actions(program, start):
    if isinstance(action, ComputeAction):
      begin, now = now, now + action.cost.seconds
      yield Bar(
        COMPUTE, action.instruction.name, begin, now,
        action.instruction.op_name, action.cost.bytes, action.cost.flops,
      )
    elif isinstance(action, CollectiveStart):
      begin = max(now, free.get(action.row, 0.0))
      free[action.row] = begin + action.seconds
      sent[action.number] = Bar(
        action.row, action.instruction.name, begin, free[action.row],
        action.instruction.op_name, action.bytes,
      )
      yield sent[action.number]
    else:
      bar = sent.pop(action.number)
      if bar.end_s > now:
        begin, now = now, bar.end_s
        yield Bar(COMPUTE, f"wait for {bar.name}", begin, now, bar.where, 0.0)


class _Walk:
  """Iterates over executed instructions; reads each computation once."""

  def __init__(self, program: ScheduledProgram) -> None:
    self.program = program
    # Name of a computation -> its instructions that take time.
    self.parts: dict[str, list[_TimedInstruction]] = {}

  def actions(self, name: str, numbers: Iterator[int]) -> Iterator[Action]:
    if name not in self.parts:
      self.parts[name] = [*self.read(self.program.module.computations[name])]
    pending: dict[int, list[CollectiveEnd]] = {}  # by the index of the done
    for part in self.parts[name]:
      for index in sorted(i for i in pending if i <= part.index):
        yield from pending.pop(index)
      if isinstance(part.action, CollectiveStart):
        number = next(numbers)
        yield part.action._replace(number=number)
        if part.done == part.index:
          yield CollectiveEnd(number)
        else:
          pending.setdefault(part.done, []).append(CollectiveEnd(number))
      elif part.action is not None:
        yield part.action
      else:
        for _ in range(part.times):
          yield from self.actions(part.inner, numbers)
    for ended in pending.values():
      yield from ended

  def read(self, computation: hlo.Computation) -> Iterator["_TimedInstruction"]:
    """Yields the instructions of a computation that take time."""
    program = self.program
    for index, instruction in enumerate(computation.instructions):
      entries = [
        e for e in program.reader.entries(computation, instruction) if e.bytes
      ]
      if entries:
        yield _TimedInstruction(index, CollectiveStart(
          0, computation, instruction, entries[0].over,
          sum(e.bytes for e in entries),
          sum(map(program.wire_seconds, entries)),
        ), done=program.reader.done(computation, index))
        continue
      times, inner = program.runs(computation, instruction)
      if instruction.opcode == "conditional":
        inner = max(instruction.calls(), key=self.seconds)
      cost = program.cost(computation, instruction)
      if inner is not None:
        yield _TimedInstruction(index, None, times=times, inner=inner)
      elif cost.seconds:
        yield _TimedInstruction(index, ComputeAction(instruction, cost))

  def seconds(self, branch: str) -> float:
    """Returns the seconds of a branch if no link is busy at its start."""
    bars = timeline(self.program, branch)
    return max((bar.end_s for bar in bars), default=0.0)


class _TimedInstruction(NamedTuple):
  """Instruction that takes time.

  Attributes:
    index: Index in its computation.
    action: Its action; None for a loop, conditional or call.
    done: Index of the done of a collective, which needs the result.
    times: Number of executions of ``inner``.
    inner: Name of the computation that a loop, conditional or call executes; ""
      for none.
  """

  index: int
  action: ComputeAction | CollectiveStart | None
  done: int = 0
  times: int = 1
  inner: str = ""
