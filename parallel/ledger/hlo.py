"""Parser of compiled programs in XLA's HLO text format.

`compiled.as_text()` lists the program of one device as computations, which are
lists of instructions; in a scheduled module (`is_scheduled=true`) the order of
instructions is the order of execution. The parser reads only the information
that the ledger and the overlap report need: shapes, operands, called
computations, trip counts and names.

Source of the syntax: https://openxla.org/xla/hlo_format (jax 0.10 to 0.12).
"""

from collections.abc import Callable, Iterator
import dataclasses
import fractions
import functools
import math
import re

from parallel.ledger.entries import branch_run_shares

# Name of an element type in HLO -> (NumPy name, bits per element).
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

# Dtype, dims ("<=8": a dynamic dim of at most 8) and layout of an array.
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](\{[^}]*\})?")
# Root mark, name, and the rest of an instruction's line.
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([^\s=]+) = (.*)")
# Opcode of an instruction without a shape.
_OPCODE = re.compile(r"[a-z][\w\-]*\(")
# First line of a computation: %name (parameters) -> result {; the short form of
# texts written by hand has no parameters and result.
_HEADER = re.compile(r"\s*(ENTRY )?%?([^\s(]+) (?:\(.*\) -> .* )?\{$")
# Ends of lines whose instruction may continue, as in metadata of kernels.
_CONTINUES = tuple(",({")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_LINE = re.compile(r"[^\r\n]+")
_BRACKET = re.compile(r"[(){}\[\]]")
# Attributes that name computations, with one name or a list in braces.
_CALLS = re.compile(
  r"(calls|to_apply|body|condition|true_computation|false_computation|"
  r"async_wrapped|called_computations|branch_computations)="
  r"(\{[^}]*\}|%?[\w.\-]+)"
)


@dataclasses.dataclass(frozen=True)
class Shape:
  """Shape and dtype of an array on one device.

  Attributes:
    dtype: NumPy name of the dtype; "token" and "opaque" hold no data.
    dims: Sizes of its dims on one device.
    bits: Bits per element.
    on_chip: Whether it is stored in a TPU's vector memory instead of HBM.
    on_host: Whether it is stored in host memory.
    order: Dims longer than 1, from the outermost in memory to the innermost;
      () if the text has no layout. It is not compared.
  """

  dtype: str
  dims: tuple[int, ...]
  bits: int
  on_chip: bool = False
  on_host: bool = False
  order: tuple[int, ...] = dataclasses.field(default=(), compare=False)

  @property
  def elements(self) -> int:
    """Number of elements."""
    return math.prod(self.dims)

  @property
  def bytes(self) -> int:
    """Logical bytes; the tiled layout of a device may need more."""
    return math.ceil(self.elements * self.bits / 8)


@dataclasses.dataclass(frozen=True, slots=True)  # a million may exist
class Instruction:
  """Instruction of a computation: one line of HLO text.

  Attributes:
    name: Name, unique in the module.
    opcode: Operation, such as "fusion" or "all-reduce-start".
    shapes: Arrays of the result, tuples flattened.
    operands: Names of the operands, instructions of the same computation.
    literal: Text in parentheses after the opcode: the number of a parameter,
      the value of a constant.
    attributes: Rest of the line, after the parentheses.
    op_name: jax's name stack; empty for instructions created by XLA.
    root: Whether it is the result of the computation.
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
    """Returns the value after ``name=``, without quotes; "" if absent."""
    match = re.search(rf"\b{name}=", self.attributes)
    return _value(self.attributes[match.end():]) if match else ""

  def calls(self, *keys: str) -> list[str]:
    """Returns the names of the computations that the instruction calls.

    Args:
      *keys: Attributes to read, such as "body"; by default all attributes that
        name computations.
    """
    names = []
    for key, value in _CALLS.findall(self.attributes):
      if not keys or key in keys:
        names += re.findall(r"%?([\w.\-]+)", value)
    return names


@dataclasses.dataclass(frozen=True)
class Computation:
  """Named list of instructions, in the order of execution if scheduled."""

  name: str
  instructions: tuple[Instruction, ...]

  @functools.cached_property
  def by_name(self) -> dict[str, Instruction]:
    """Instructions by their names."""
    return {i.name: i for i in self.instructions}

  @property
  def root(self) -> Instruction:
    """Instruction whose result is the result of the computation."""
    return next((i for i in self.instructions if i.root), self.instructions[-1])

  def operands(self, instruction: Instruction) -> list[Instruction]:
    """Returns the instructions that compute an instruction's operands."""
    return [self.by_name[n] for n in instruction.operands]


@dataclasses.dataclass(frozen=True)
class Module:
  """Compiled program of one device.

  Attributes:
    computations: Computations by name.
    entry: Name of the computation with which an execution starts.
    scheduled: Whether instructions are in the order of execution.
    aliased: Numbers of the donated parameters, whose memory holds results.
    name: Name of the program, such as "jit_step".
    unread: Lines of its computations that could not be parsed.
  """

  computations: dict[str, Computation]
  entry: str
  scheduled: bool
  aliased: frozenset[int] = frozenset()
  name: str = ""
  unread: tuple[str, ...] = ()

  def runs(
    self,
    start: str | None = None,
    alike: Callable[[list[str]], bool] = lambda branches: False,
  ) -> Iterator[tuple[Computation, int | None]]:
    """Yields every executed computation and its number of executions.

    They are those in one execution of the computation ``start``.

    The number is None if unknown. A computation with two callers is yielded
    twice. Computations of fusions, reducers and asynchronous wrappers are not
    yielded: they belong to the instruction that calls them.

    Args:
      start: Name of the computation to start from; the entry if None.
      alike: Predicate on the names of a conditional's branches: whether the
        first branch may represent all of them. If False, and if no scopes
        declare how many executions take each branch (`branch_shares`), all
        branches are yielded with None.
    """
    for computation, times in self._executed_computations(
      start or self.entry, 1, alike
    ):
      # A fraction means that the trips of a loop are not a multiple of the
      # denominator of a branch's share: the number is then unknown.
      whole = times is not None and times == int(times)
      yield computation, int(times) if whole else None

  def _executed_computations(
    self, name: str, times: fractions.Fraction | int | None, alike
  ):
    computation = self.computations[name]
    yield computation, times
    for instruction in computation.instructions:
      if instruction.opcode == "while":
        trips = self.trip_count(computation, instruction)
        # The condition runs once more than the body: its last result is False.
        for key, more in (("condition", 1), ("body", 0)):
          inside = None if None in (trips, times) else (trips + more) * times
          yield from self._executed_computations(
            instruction.calls(key)[0], inside, alike
          )
      elif instruction.opcode == "conditional":
        branches = instruction.calls()
        parts = self.branch_shares(instruction)
        if parts is None and alike(branches):
          branches, parts = branches[:1], [1]
        for branch, part in zip(
          branches, parts or [None] * len(branches), strict=True
        ):
          inside = None if None in (part, times) else part * times
          yield from self._executed_computations(branch, inside, alike)
      elif instruction.opcode == "call":
        yield from self._executed_computations(
          instruction.calls("to_apply")[0], times, alike
        )

  def branch_shares(
    self, conditional: Instruction
  ) -> list[fractions.Fraction] | None:
    """Returns the share of a conditional's executions that take each branch.

    The shares are declared by scopes inside the branches
    (`entries.branch_run_shares`). One branch lacks a scope; its share is the
    remainder. The result is None if not exactly one branch lacks a scope, or if
    scopes contradict each other.
    """
    # Scopes of enclosing conditionals precede the scope of this one.
    outside = len(branch_run_shares(conditional.op_name))
    parts: list[fractions.Fraction | None] = []
    for branch in conditional.calls():
      inside = {
        found[outside]
        for instruction in self.computations[branch].instructions
        if len(found := branch_run_shares(instruction.op_name)) > outside
      }
      if len(inside) > 1:
        return None
      parts.append(next(iter(inside), None))
    # Share of the branch without a scope.
    rest = 1 - sum(part for part in parts if part is not None)
    if parts.count(None) != 1 or rest < 0:
      return None
    return [rest if part is None else part for part in parts]

  def trip_count(
    self, computation: Computation, loop: Instruction
  ) -> int | None:
    """Returns the trip count of a while loop; None if it is unknown.

    On some platforms XLA writes it to the attributes of the loop. Otherwise it
    is derived if a counter in the loop's state starts at a constant, is
    incremented by a positive constant and is required to be less than a
    constant, which is either operand of the comparison.

    Args:
      computation: Computation that contains the loop.
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
    # The trip count of other forms of conditions is unknown.
    if test.opcode != "compare":
      return None
    counter, bound = condition.operands(test)  # counter < bound
    if test.attribute("direction") == "GT":  # a > b is equivalent to b < a
      counter, bound = bound, counter
    elif test.attribute("direction") != "LT":
      return None
    last = _integer(condition, bound)
    if counter.opcode != "get-tuple-element" or last is None:
      return None
    # The loop's state is a tuple, and the counter is one of its elements.
    index = int(counter.attribute("index"))
    # The initial state is the operand of the loop; the state after a trip is
    # the root of its body.
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
  """Parses the text of a compiled module.

  Args:
    text: Result of ``compiled.as_text()``.

  Returns:
    The module.

  Raises:
    ValueError: The text contains no entry computation, or is incomplete.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> double = jax.jit(lambda x: 2 * x).lower(jnp.ones([4])).compile()
    >>> module = parse(double.as_text())
    >>> module.computations[module.entry].root.shapes[0].bytes
    16
  """
  computations, entry, unread = {}, None, []
  name, lines = "", []
  for line in text_lines(text):
    header = _HEADER.match(line)
    if header:
      name, lines = header[2], []
      if header[1] and entry is not None:
        raise ValueError(
          f"the text has several programs (ENTRY {entry} and ENTRY {name}); "
          "save each one in its own file"
        )
      entry = name if header[1] else entry
    elif line.lstrip().startswith("}"):
      computations[name], name = Computation(name, tuple(lines)), ""
    elif match := _INSTRUCTION.match(line):
      lines.append(_instruction(match))
    elif name and not line.lstrip().startswith("//"):
      unread.append(line)
  if entry is None:
    raise ValueError(
      "the text has no ENTRY computation, so it is not a compiled program"
    )
  if entry not in computations:
    raise ValueError(
      "the text ends within its ENTRY computation; it must be complete"
    )
  head = text.split("\n", 1)[0]
  # input_output_alias={ {0}: (3, {}, may-alias), {1}: (4, {}) } maps results to
  # the numbers of the parameters whose memory they reuse.
  start = head.find("input_output_alias=")
  aliases = "" if start < 0 else _value(head[head.index("{", start):])
  aliased = frozenset(map(int, re.findall(r": \((\d+),", aliases)))
  named = re.match(r"HloModule ([^\s,]+)", head)
  return Module(
    computations, entry, "is_scheduled=true" in head, aliased,
    named[1] if named else "", tuple(unread),
  )


def instructions(text: str) -> Iterator[Instruction]:
  """Yields all instructions of a module's text, optimized or not."""
  for line in text_lines(text):
    if match := _INSTRUCTION.match(line):
      yield _instruction(match)


def text_lines(text: str) -> Iterator[str]:
  """Yields the lines of a module's text, one per instruction."""
  # Lines are not split all at once, since a text may have a million of them.
  lines = (match[0] for match in _LINE.finditer(text))
  for line in lines:
    if line.endswith(_CONTINUES) and _INSTRUCTION.match(line):
      while _is_incomplete(line) and (more := next(lines, "")):
        line += " " + more.strip()
    yield line


def _is_incomplete(line: str) -> bool:
  """Returns whether an instruction continues on the next line."""
  shown = _QUOTED.sub("", line).rstrip()
  brackets = sum(map(shown.count, "({[")) - sum(map(shown.count, ")}]"))
  return shown.endswith(",") or brackets > 0


def _instruction(match: re.Match) -> Instruction:
  """Parses the line ``name = shapes opcode(operands), attributes``."""
  root, name, rest = bool(match[1]), match[2], match[3]
  # A tuple of shapes contains spaces, as do dims in the short form, which may
  # also omit the shape.
  if _OPCODE.match(rest):
    end = 0
  elif rest.startswith("("):
    end = _end_of_brackets(rest)
  else:
    end = rest.index(" ", rest.find("]") + 1)
  start = rest.index("(", end)
  stop = _end_of_brackets(rest, start)
  result, opcode = rest[:end], rest[end:start].lstrip()
  inside, attributes = rest[start + 1 : stop - 1], rest[stop:]
  op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', attributes)
  return Instruction(
    name=name,
    opcode=opcode,
    shapes=_shapes(result),
    operands=_operands(opcode, inside),
    literal=inside,
    attributes=attributes,
    op_name=op_name[1] if op_name else "",
    root=root,
  )


def _operands(opcode: str, inside: str) -> tuple[str, ...]:
  """Parses names of operands: ``%x``, or ``x`` in texts without percents.

  ``inside`` is the text in parentheses after the opcode.
  """
  names = re.findall(r"%([\w.\-]+)", inside)
  if not names and opcode not in ("parameter", "constant"):
    # A name may follow a shape, (f32[2,3]{1,0}, s32[]) x, or a comment,
    # /*index=5*/x.
    names = re.findall(r"[\w.\-]+(?=, |$)", inside)
  return tuple(names)


def _end_of_brackets(text: str, start: int = 0) -> int:
  """Returns the index after the bracket expression that begins at ``start``."""
  depth = 0
  for match in _BRACKET.finditer(text, start):
    depth += 1 if match[0] in "({[" else -1
    if not depth:
      return match.end()
  raise ValueError(f"the brackets are unbalanced in {text[start:start + 80]!r}")


def _value(text: str) -> str:
  """Returns the value at the start of ``text``: quoted, bracketed or a word."""
  if quoted := _QUOTED.match(text):
    return quoted[0][1:-1]
  # Replica groups as axes of a mesh: mesh['a'=2], device_ids=([2]) {'a'}.
  if mesh := re.match(r"mesh\[[^{]*\{[^}]*\}", text):
    return mesh[0]
  if text[:1] in ("{", "["):
    end = _end_of_brackets(text)
    # An iota list of replica groups has a second part: [8,8]<=[8,8]T(1,0).
    tail = re.match(r"<=\[[\d,]*\](T\([\d,]*\))?", text[end:])
    return text[: end + (tail.end() if tail else 0)]
  return re.match(r"[^\s,]*", text)[0]


@functools.lru_cache(maxsize=1 << 16)
def _shapes(result: str) -> tuple[Shape, ...]:
  """Parses the arrays of a result, such as ``(f32[8]{0:T(8)S(1)}, s32[])``."""
  shapes = []
  for name, dims, layout in _SHAPE.findall(result):
    if name not in _DTYPES:  # part of a layout, not an array
      continue
    dtype, bits = _DTYPES[name]
    numbers = tuple(int(d.strip(" <=")) for d in dims.split(",") if d)
    # S(1) in a layout of XLA:TPU is the memory space of vector memory, and S(5)
    # is host memory on all platforms.
    minor = re.match(r"\{([\d,]+)", layout)  # "{1,0:T(8,128)}": 1 is innermost
    order = reversed(list(map(int, minor[1].split(",")))) if minor else ()
    shapes.append(Shape(
      dtype, numbers, bits, "S(1)" in layout, "S(5)" in layout,
      tuple(dim for dim in order if numbers[dim] > 1),
    ))
  return tuple(shapes)


def _integer(computation: Computation, value: Instruction) -> int | None:
  """Returns the value of an integer constant; None for other instructions."""
  value = _skip_copies(computation, value)
  if value.opcode != "constant":
    return None
  number = re.fullmatch(r"-?\d+", value.literal)
  return int(number[0]) if number else None


def _skip_copies(computation: Computation, value: Instruction) -> Instruction:
  """Returns the source of a chain of copies, or the instruction itself."""
  while value.opcode == "copy":
    value = computation.by_name[value.operands[0]]
  return value


def _step(
  body: Computation, value: Instruction, index: int
) -> int | None:
  """Returns the constant that a loop's trip adds to state element ``index``.

  ``value`` is the new value of the element in the loop's ``body``. None if it
  is not the sum of the previous value and a constant.
  """
  value = _skip_copies(body, value)
  if value.opcode != "add":
    return None
  operands = [_skip_copies(body, o) for o in body.operands(value)]
  sizes = [n for o in operands if (n := _integer(body, o)) is not None]
  moved = [
    o for o in operands
    if o.opcode == "get-tuple-element" and int(o.attribute("index")) == index
  ]
  # Known only for a sum of one constant and the element's previous value.
  return sizes[0] if len(sizes) == len(moved) == 1 else None
