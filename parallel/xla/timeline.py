"""Timeline of a compiled program: one row for compute, one per set of axes.

Instructions start in the order of the schedule. Compute takes the time of the
roofline (`parallel.xla.roofline`), a collective the time on its links. An
asynchronous collective overlaps later instructions; its done waits for it.
Collectives over the same axes wait for each other. Times are lower bounds.
"""

from collections.abc import Iterator
from typing import NamedTuple

from parallel.xla import hlo
from parallel.xla.overlap import ScheduledProgram

COMPUTE = "compute"


class Bar(NamedTuple):
  """Interval on a row.

  Attributes:
    row: "compute", or the axes of a collective, joined by ",".
    name: Name of the instruction; on the row of compute, "wait for NAME" while
      nothing is computed.
    start_s: Start, in seconds from the start of the program.
    end_s: End.
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


def timeline(program: ScheduledProgram) -> Iterator[Bar]:
  """Yields the bars of one run, in the order of the schedule.

  A loop with an unknown trip count runs once. Of a conditional, the branch that
  takes longest runs.

  Args:
    program: The program, with rates of a device and its links.
  """
  yield from _Run(program).computation(program.module.entry)


class _Run:
  """State of a run: the time, and when each row of links is free."""

  def __init__(self, program: ScheduledProgram) -> None:
    self.program = program
    self.now = 0.0
    self.free: dict[str, float] = {}
    # Seconds of the branches of conditionals, by name.
    self.branches: dict[str, float] = {}

  def computation(self, name: str) -> Iterator[Bar]:
    computation = self.program.module.computations[name]
    pending: dict[int, list[Bar]] = {}  # index of the done -> transfers
    for index, instruction in enumerate(computation.instructions):
      for bar in pending.pop(index, ()):
        yield from self.wait(bar)
      sent = self.transfer(computation, instruction)
      if sent:
        yield sent
        done = self.program.reader.done(computation, index)
        if done == index:
          yield from self.wait(sent)
        else:
          pending.setdefault(done, []).append(sent)
        continue
      times, inner = self.program.runs(computation, instruction)
      if instruction.opcode == "conditional":
        inner = max(instruction.calls(), key=self.seconds)
      if inner is not None:
        for _ in range(times):
          yield from self.computation(inner)
        continue
      cost = self.program.cost(computation, instruction)
      if cost.seconds:
        start, self.now = self.now, self.now + cost.seconds
        yield Bar(
          COMPUTE, instruction.name, start, self.now, instruction.op_name,
          cost.bytes, cost.flops,
        )

  def transfer(
    self, computation: hlo.Computation, instruction: hlo.Instruction
  ) -> Bar | None:
    """Returns the bar of an instruction's collective; None if it has none."""
    entries = [
      e for e in self.program.reader.entries(computation, instruction)
      if e.bytes
    ]
    if not entries:
      return None
    row = entries[0].over
    start = max(self.now, self.free.get(row, 0.0))
    self.free[row] = start + sum(map(self.program.wire_seconds, entries))
    return Bar(
      row, instruction.name, start, self.free[row], instruction.op_name,
      sum(e.bytes for e in entries),
    )

  def wait(self, sent: Bar) -> Iterator[Bar]:
    """Yields the bar of waiting for a transfer, if it has not ended."""
    if sent.end_s > self.now:
      start, self.now = self.now, sent.end_s
      yield Bar(
        COMPUTE, f"wait for {sent.name}", start, self.now, sent.where, 0.0
      )

  def seconds(self, branch: str) -> float:
    """Returns the seconds of a branch that starts with free links."""
    if branch not in self.branches:
      run = _Run(self.program)
      for _ in run.computation(branch):
        pass
      self.branches[branch] = run.now
    return self.branches[branch]
