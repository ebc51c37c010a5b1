"""Reads compiled programs from XLA's HLO text.

`compiled.as_text()` lists, for one device, computations of instructions; in a
scheduled module (`is_scheduled=true`) their order is the order of execution.
Only what the ledger and the overlap report need is read: shapes, operands,
called computations, trip counts and names.

Source of the syntax: https://openxla.org/xla/hlo_format (jax 0.10 to 0.12).
"""

from collections.abc import Callable, Iterator
import dataclasses
import fractions
import functools
import math
import re

from parallel.xla.entries import shares

_DTYPES = {
  "pred": ("bool", 8), "bf16": ("bfloat16", 16),
  "f8e4m3fn": ("float8_e4m3fn", 8),
  "f8e5m2": ("float8_e5m2", 8), "f8e4m3": ("float8_e4m3", 8),
  "f8e3m4": ("float8_e3m4", 8), "f8e4m3b11fnuz": ("float8_e4m3b11fnuz", 8),
  "f8e4m3fnuz": ("float8_e4m3fnuz", 8), "f8e5m2fnuz": ("float8_e5m2fnuz", 8),
  "f8e8m0fnu": ("float8_e8m0fnu", 8), "f4e2m1fn": ("float4_e2m1fn", 4),
  "c64": ("complex64", 64), "c128": ("complex128", 128), "token": ("token", 0),
  "opaque": ("opaque", 0),
} | {
  f"{letter}{bits}": (f"{name}{bits}", bits)
  for letter, name in (("f", "float"), ("s", "int"), ("u", "uint"))
  for bits in (1, 2, 4, 8, 16, 32, 64)
}

_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([^\s=]+) = (.*)")
_HEADER = re.compile(r"(ENTRY )?%?([^\s(]+) \(.*\) -> .* \{$")
# A kernel's metadata, JSON over several lines; all else is one line each.
_METADATA = re.compile(r'=\{\n("[^{}]*)\}')
_CALLS = re.compile(
  r"(calls|to_apply|body|condition|true_computation|false_computation|"
  r"async_wrapped|called_computations|branch_computations)="
  r"(\{[^}]*\}|%?[\w.\-]+)"
)


@dataclasses.dataclass(frozen=True)
class Shape:
  """Shape and dtype of an array on one device.

  Attributes:
    dtype: Numpy name of the dtype; "token" and "opaque" hold nothing.
    dims: Sizes of its dims on one device.
    bits: Bits per element.
    on_chip: Whether it lies in a TPU's vector memory and not in HBM.
  """

  dtype: str
  dims: tuple[int, ...]
  bits: int
  on_chip: bool = False

  @property
  def elements(self) -> int:
    return math.prod(self.dims)

  @property
  def bytes(self) -> int:
    """Logical bytes; a device's tiled layout may take more."""
    return math.ceil(self.elements * self.bits / 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation.

  Attributes:
    name: Its name, unique in the module.
    opcode: What it does, such as "fusion" or "all-reduce-start".
    shapes: The arrays of its result, tuples flattened.
    operands: Names of its operands, instructions of the same computation.
    literal: The text between the brackets after the opcode: the number of a
      parameter, the value of a constant.
    attributes: The rest of the line, after these brackets.
    op_name: jax's name stack; empty if XLA made the instruction.
    root: Whether it is the computation's result.
  """

  name: str
  opcode: str
  shapes: tuple[Shape, ...]
  operands: tuple[str, ...]
  literal: str
  attributes: str
  op_name: str
  root: bool

  def attribute(self, name: str) -> str:
    """Returns the text after ``name=``: a word or a bracket; "" if absent."""
    match = re.search(rf"\b{name}=", self.attributes)
    return _value(self.attributes[match.end():]) if match else ""

  def calls(self, *keys: str) -> list[str]:
    """Returns the names of the computations that the instruction calls.

    Args:
      *keys: Attributes to read, such as "body"; all of them by default.
    """
    names = []
    for key, value in _CALLS.findall(self.attributes):
      if not keys or key in keys:
        names += re.findall(r"%?([\w.\-]+)", value)
    return names


@dataclasses.dataclass(frozen=True)
class Computation:
  """A list of instructions, in the order of execution if it is scheduled."""

  name: str
  instructions: tuple[Instruction, ...]

  @functools.cached_property
  def by_name(self) -> dict[str, Instruction]:
    return {i.name: i for i in self.instructions}

  @property
  def root(self) -> Instruction:
    return next(i for i in self.instructions if i.root)

  def operands(self, instruction: Instruction) -> list[Instruction]:
    return [self.by_name[n] for n in instruction.operands]


@dataclasses.dataclass(frozen=True)
class Module:
  """A compiled program.

  Attributes:
    computations: Its computations by name.
    entry: Name of the computation that a run starts with.
    scheduled: Whether instructions are in the order of execution.
    aliased: The numbers of the parameters in whose memory results are written.
  """

  computations: dict[str, Computation]
  entry: str
  scheduled: bool
  aliased: frozenset[int] = frozenset()

  def runs(
    self,
    start: str | None = None,
    alike: Callable[[list[str]], bool] = lambda branches: False,
  ) -> Iterator[tuple[Computation, int | None]]:
    """Yields every computation that is executed, and how often per run.

    The number is None where it is not known. A computation that is called from
    two places comes twice. Fusions, reducers and what asynchronous instructions
    wrap are not entered: each is part of the instruction that calls it.

    Args:
      start: Name of the computation that is run; the entry if None.
      alike: Tells of the branches of a conditional, by their names, whether the
        first may stand for all. If not, and unless their scopes tell how often
        they run (`branch_shares`), all are yielded with None.
    """
    for computation, times in self._runs(start or self.entry, 1, alike):
      whole = times is not None and times == int(times)
      yield computation, int(times) if whole else None

  def _runs(self, name: str, times: fractions.Fraction | int | None, alike):
    computation = self.computations[name]
    yield computation, times
    for instruction in computation.instructions:
      if instruction.opcode == "while":
        trips = self.trip_count(computation, instruction)
        # The condition runs once more than the body: the last time it is false.
        for key, more in (("condition", 1), ("body", 0)):
          inside = None if None in (trips, times) else (trips + more) * times
          yield from self._runs(instruction.calls(key)[0], inside, alike)
      elif instruction.opcode == "conditional":
        branches = instruction.calls()
        parts = self.branch_shares(instruction)
        if parts is None and alike(branches):
          branches, parts = branches[:1], [1]
        for branch, part in zip(
          branches, parts or [None] * len(branches), strict=True
        ):
          inside = None if None in (part, times) else part * times
          yield from self._runs(branch, inside, alike)
      elif instruction.opcode == "call":
        yield from self._runs(instruction.calls("to_apply")[0], times, alike)

  def branch_shares(
    self, conditional: Instruction
  ) -> list[fractions.Fraction] | None:
    """Returns of how many of its runs a conditional takes each branch.

    Scopes inside the branches say so (`entries.shares`). One branch may have
    none: it runs whenever the others do not. None if that says not all.
    """
    outside = len(shares(conditional.op_name))
    parts: list[fractions.Fraction | None] = []
    for branch in conditional.calls():
      inside = {
        found[outside]
        for instruction in self.computations[branch].instructions
        if len(found := shares(instruction.op_name)) > outside
      }
      if len(inside) > 1:
        return None
      parts.append(next(iter(inside), None))
    rest = 1 - sum(part for part in parts if part is not None)
    if parts.count(None) != 1 or rest < 0:
      return None
    return [rest if part is None else part for part in parts]

  def trip_count(
    self, computation: Computation, loop: Instruction
  ) -> int | None:
    """Returns the trips of a while loop; None where they are not known.

    XLA notes them in the loop's attributes on some platforms. Elsewhere they
    follow if a counter of the loop's state starts at a constant, moves up by a
    constant and is compared with a constant by "less than".

    Args:
      computation: Where the loop is.
      loop: The while instruction.
    """
    noted = re.search(
      r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes
    )
    if noted:
      return int(noted[1])
    condition = self.computations[loop.calls("condition")[0]]
    body = self.computations[loop.calls("body")[0]]
    test = condition.root
    # Any other form of loop has an unknown number of trips.
    if test.opcode != "compare" or test.attribute("direction") != "LT":
      return None
    counter, bound = condition.operands(test)
    last = _integer(condition, bound)
    if counter.opcode != "get-tuple-element" or last is None:
      return None
    # The counter is one element of the tuple that is the loop's state.
    index = int(counter.attribute("index"))
    # The state before the first trip is the loop's operand, the state after a
    # trip the root of its body.
    start = computation.by_name.get(loop.operands[0])
    if start is None or start.opcode != "tuple":
      return None
    first = _integer(computation, computation.by_name[start.operands[index]])
    if body.root.opcode != "tuple":
      return None
    step = _step(body, body.by_name[body.root.operands[index]], index)
    if first is None or step is None or step < 1:
      return None
    return max(0, -((first - last) // step))  # rounded up


def parse(text: str) -> Module:
  """Reads the text of a compiled module.

  Args:
    text: What ``compiled.as_text()`` returns.

  Returns:
    The module.

  Raises:
    ValueError: The text holds no entry computation.
  """
  # Metadata on one line, so that each instruction is a line.
  text = _METADATA.sub(lambda m: m[0].replace("\n", " "), text)
  computations, entry = {}, None
  name, lines = "", []
  for line in text.splitlines():
    header = _HEADER.match(line)
    if header:
      name, lines = header[2], []
      entry = name if header[1] else entry
    elif line.startswith("}"):
      computations[name] = Computation(name, tuple(lines))
    elif match := _INSTRUCTION.match(line):
      lines.append(_instruction(match))
  if entry is None:
    raise ValueError("no ENTRY computation: not the text of a compiled program")
  head = text.split("\n", 1)[0]
  # Such as input_output_alias={ {0}: (3, {}, may-alias), {1}: (4, {}) }: the
  # parameter behind each result.
  start = head.find("input_output_alias=")
  aliases = "" if start < 0 else _value(head[head.index("{", start):])
  aliased = frozenset(map(int, re.findall(r": \((\d+),", aliases)))
  return Module(computations, entry, "is_scheduled=true" in head, aliased)


def _instruction(match: re.Match) -> Instruction:
  """Reads ``name = shapes opcode(operands), attributes``."""
  root, name, rest = bool(match[1]), match[2], match[3]
  # A tuple of shapes has spaces in it, a single shape has none.
  end = _balanced(rest) if rest.startswith("(") else rest.index(" ")
  result, rest = rest[:end], rest[end:].lstrip()
  opcode, rest = rest.split("(", 1)
  end = _balanced("(" + rest) - 1
  inside, attributes = rest[: end - 1], rest[end:]
  op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', attributes)
  return Instruction(
    name=name,
    opcode=opcode,
    shapes=_shapes(result),
    operands=tuple(re.findall(r"%([\w.\-]+)", inside)),
    literal=inside,
    attributes=attributes,
    op_name=op_name[1] if op_name else "",
    root=root,
  )


def _balanced(text: str) -> int:
  """Returns the place behind the bracket that ``text`` starts with."""
  depth = 0
  for index, letter in enumerate(text):
    depth += (letter in "({[") - (letter in ")}]")
    if not depth:
      return index + 1
  raise ValueError(f"unbalanced brackets in {text[:80]!r}")


def _value(text: str) -> str:
  """Returns the value that ``text`` starts with: a bracket or a word."""
  # Replica groups as axes of a mesh: mesh['a'=2], device_ids=([2]) {'a'}.
  if mesh := re.match(r"mesh\[[^{]*\{[^}]*\}", text):
    return mesh[0]
  if text[:1] in ("{", "["):
    end = _balanced(text)
    # An iota list of replica groups goes on: [8,8]<=[8,8]T(1,0).
    tail = re.match(r"<=\[[\d,]*\](T\([\d,]*\))?", text[end:])
    return text[: end + (tail.end() if tail else 0)]
  return re.match(r"[^\s,]*", text)[0]


def _shapes(result: str) -> tuple[Shape, ...]:
  """Reads all arrays of a result, such as ``(f32[8]{0:T(8)S(1)}, s32[])``."""
  shapes = []
  for name, dims, layout in _SHAPE.findall(result):
    if name not in _DTYPES:  # a word of a layout, not an array
      continue
    dtype, bits = _DTYPES[name]
    numbers = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
    # In a layout of XLA:TPU, S(1) is the memory space of vector memory.
    shapes.append(Shape(dtype, numbers, bits, "S(1)" in layout))
  return tuple(shapes)


def _integer(computation: Computation, value: Instruction) -> int | None:
  """Returns the value of an integer constant; None for all else."""
  value = _original(computation, value)
  if value.opcode != "constant":
    return None
  number = re.fullmatch(r"-?\d+", value.literal)
  return int(number[0]) if number else None


def _original(computation: Computation, value: Instruction) -> Instruction:
  """Returns what an instruction is a copy of, or the instruction itself."""
  while value.opcode == "copy":
    value = computation.by_name[value.operands[0]]
  return value


def _step(
  body: Computation, value: Instruction, index: int
) -> int | None:
  """Returns what one trip adds to element ``index`` of the loop's state."""
  value = _original(body, value)
  if value.opcode != "add":
    return None
  operands = [_original(body, o) for o in body.operands(value)]
  sizes = [n for o in operands if (n := _integer(body, o)) is not None]
  moved = [
    o for o in operands
    if o.opcode == "get-tuple-element" and int(o.attribute("index")) == index
  ]
  # Exactly one constant and one old value of the element, in either order.
  return sizes[0] if len(sizes) == len(moved) == 1 else None
