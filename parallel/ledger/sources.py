"""Source lines and requested dtypes of a program's instructions.

XLA keeps, for most instructions, the name of jax's operation and the source
line that made it. A compiler may widen dtypes: XLA:CPU computes in float32 what
a program requests in bfloat16. What was requested is in the program before
XLA's optimizations, whose instructions have the same lines.
"""

from collections.abc import Iterable
import math
import re

from parallel.ledger import hlo

# Lines of the tables at the head of a module: {file_name_id=1 line=5 ...}.
_ROW = re.compile(r"(\d+) (?:\{(.*)\}|\"(.*)\")")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


class SourceLines:
  """Lookup from an instruction to its source line.

  Args:
    text: Text of the module.
  """

  def __init__(self, text: str) -> None:
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    table = None
    for line in hlo.text_lines(text):
      if line in tables:
        table = tables[line]
      elif table is not None and (row := _ROW.fullmatch(line)):
        table[int(row[1])] = row[2] or row[3] or ""
      elif line.startswith(("%", "ENTRY")) or line.endswith("{"):
        break  # the first computation
    files, _, locations, frames = tables.values()
    self._lines = {}  # number of a frame -> FILE:LINE
    for number, frame in frames.items():
      location = locations.get(_field(frame, "file_location_id"), "")
      file = files.get(_field(location, "file_name_id"))
      if file is not None:
        self._lines[number] = f"{file}:{_field(location, 'line')}"

  def of(self, instruction: hlo.Instruction) -> str:
    """Returns FILE:LINE of the innermost call; "" if it is not known."""
    file = re.search(r'source_file="([^"]*)"', instruction.attributes)
    if file:  # older versions of XLA write it to each instruction
      line = re.search(r"source_line=(\d+)", instruction.attributes)
      return f"{file[1]}:{line[1] if line else '?'}"
    return self._lines.get(_field(instruction.attributes, "stack_frame_id"), "")


def _field(text: str, name: str) -> int:
  match = re.search(rf"\b{name}=(\d+)", text)
  return int(match[1]) if match else -1


class RequestedDtypes:
  """Lookup from a compiled collective to the dtype that was requested.

  Args:
    text: HLO text of the module before XLA's optimizations.
  """

  def __init__(self, text: str) -> None:
    lines = SourceLines(text)
    # (source line, name of jax's operation) -> dtypes of its results, and of
    # its operands.
    self._results: dict[tuple[str, str], set[str]] = {}
    self._operands: dict[tuple[str, str], set[str]] = {}
    dtypes: dict[str, list[str]] = {}  # of an instruction's results
    for instruction in hlo.instructions(text):
      key = lines.of(instruction), _operation(instruction)
      made = [s.dtype for s in instruction.shapes]
      dtypes[instruction.name] = made
      if not all(key) or instruction.opcode in ("tuple", "get-tuple-element"):
        continue
      self._results.setdefault(key, set()).update(made)
      self._operands.setdefault(key, set()).update(
        dtype for name in instruction.operands for dtype in dtypes.get(name, ())
      )

  def dtype(
    self, made: hlo.Instruction, line: str, reduces: bool
  ) -> str | None:
    """Returns the requested dtype of an operand; None if it is not known.

    Args:
      made: The collective, or the instruction that computes the operand if XLA
        has merged several collectives.
      line: Source line of ``made``.
      reduces: Whether the collective sums results of jax's operation, such as
        partial products; otherwise it moves an operand of that operation.
    """
    known = self._results if reduces else self._operands
    dtypes = known.get((line, _operation(made)), set())
    return next(iter(dtypes)) if len(dtypes) == 1 else None


def _operation(instruction: hlo.Instruction) -> str:
  """Returns the name of jax's operation, the last part of its name stack."""
  return instruction.op_name.rsplit("/", 1)[-1]


def mesh_named_in(texts: Iterable[str]) -> dict[str, int]:
  """Returns the largest mesh that a program's text names; {} if none does.

  Args:
    texts: Texts of the program, which name meshes as Shardy does:
      ``<["data"=2, "tensor"=4]>``.
  """
  largest: dict[str, int] = {}
  for text in texts:
    for axes in re.findall(r'<\[((?:"[^"]+"=\d+(?:, )?)+)\]', text):
      sizes = {n: int(s) for n, s in re.findall(r'"([^"]+)"=(\d+)', axes)}
      if math.prod(sizes.values()) > math.prod(largest.values()):
        largest = sizes
  return largest
