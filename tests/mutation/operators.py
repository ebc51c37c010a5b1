"""Mutants of a source file, and the operators that make them.

An operator maps a node of the syntax tree to pairs (node to replace,
replacement). The replaced node is the given node or one of its children.
`OPERATORS` lists all operators; if two of them produce the same text, the first
one counts. Docstrings, annotations, decorators, assertions, f-strings, messages
of errors and logging are not mutated.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
import copy
import dataclasses
import difflib
import itertools
import math
import random
from typing import Any

Change = tuple[ast.AST, ast.AST]

_COMPARISONS = {
  ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.GtE),
  ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.LtE),
  ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,),
  ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
  ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}
_ARITHMETIC = {
  ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
  ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
  ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitXor,
}
_AXIS_KEYWORDS = frozenset({
  "axis", "axes", "dim", "dims", "axis1", "axis2", "split_axis", "concat_axis",
  "scatter_dimension", "tiled_axis", "in_axes", "out_axes",
})
# Functions whose second positional argument is an axis.
_AXIS_FUNCTIONS = frozenset({
  "sum", "mean", "prod", "max", "min", "concatenate", "stack", "expand_dims",
  "squeeze", "cumsum", "flip", "argmax", "argmin", "any", "all", "moveaxis",
  "swapaxes", "softmax", "logsumexp", "all_gather",
})
_MESH_AXES = ("data", "tensor", "worker", "stage")
_COMMUTATIVE = frozenset({
  "min", "max", "minimum", "maximum", "gcd", "lcm", "isclose", "allclose",
  "hypot", "isinstance", "issubclass", "logical_and", "logical_or", "Union",
})
_SEQUENCES = (
  ast.List, ast.Tuple, ast.JoinedStr, ast.ListComp, ast.Dict, ast.Set
)


def _with(node: ast.AST, **fields: Any) -> Any:
  changed = copy.copy(node)
  for name, value in fields.items():
    setattr(changed, name, value)
  return changed


def _replaced(items: list, place: int, *new: Any) -> list:
  return [*items[:place], *new, *items[place + 1:]]


def _name(call: ast.Call) -> str:
  return ast.unparse(call.func).rpartition(".")[2]


def _integer(node: ast.AST) -> int | None:
  """Value of an integer literal, signed ones included."""
  if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
    value = _integer(node.operand)
    return None if value is None else -value
  plain = isinstance(node, ast.Constant) and type(node.value) is int
  return node.value if plain else None


def _joins_sequences(node: ast.BinOp | ast.AugAssign) -> bool:
  """Whether ``+`` or ``*`` visibly acts on strings, lists or tuples."""
  sides = (
    (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
  )
  return any(
    isinstance(side, _SEQUENCES)
    or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
    for side in sides
  )


def wrong_axis(node: ast.AST) -> Iterator[Change]:
  """Another axis number or mesh-axis name."""
  if isinstance(node, ast.Call):
    arguments = [k.value for k in node.keywords if k.arg in _AXIS_KEYWORDS]
    if _name(node) in _AXIS_FUNCTIONS:
      arguments += node.args[1:2]
    for argument in arguments:
      value = _integer(argument)
      if value is not None:
        other = {0: 1, -1: -2}.get(value, value - 1)
        yield argument, ast.Constant(other)
    for argument in node.args:
      if isinstance(argument, ast.Constant) and argument.value in _MESH_AXES:
        place = _MESH_AXES.index(argument.value)
        yield argument, ast.Constant(_MESH_AXES[place - 1])
  if (
    isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    and node.attr in _MESH_AXES[:2] and "axes" in ast.unparse(node.value)
  ):
    yield node, _with(node, attr=_MESH_AXES[1 - _MESH_AXES.index(node.attr)])


def comparison(node: ast.AST) -> Iterator[Change]:
  """``<`` becomes ``<=`` and ``>``, ``==`` becomes ``!=``, and so on."""
  if isinstance(node, ast.Compare):
    for i, op in enumerate(node.ops):
      for other in _COMPARISONS[type(op)]:
        yield node, _with(node, ops=_replaced(node.ops, i, other()))


def sign(node: ast.AST) -> Iterator[Change]:
  """Another arithmetic operator; a minus sign is dropped."""
  if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
    yield node, node.operand
  arithmetic = isinstance(node, ast.BinOp | ast.AugAssign)
  if arithmetic and type(node.op) in _ARITHMETIC and not _joins_sequences(node):
    yield node, _with(node, op=_ARITHMETIC[type(node.op)]())


def off_by_one(node: ast.AST) -> Iterator[Change]:
  """One more or less: integers, bounds of slices and of ranges."""
  bounds: list[ast.AST | None] = []
  if isinstance(node, ast.Slice):
    bounds = [node.lower, node.upper]
  elif isinstance(node, ast.Call) and _name(node) == "range":
    bounds = list(node.args)
  elif isinstance(node, ast.Constant) and _integer(node) is not None:
    yield node, ast.Constant(node.value + 1)
    yield node, ast.Constant(node.value - 1)
  for bound in bounds:
    if bound is not None and not isinstance(bound, ast.Constant | ast.Starred):
      yield bound, ast.BinOp(bound, ast.Add(), ast.Constant(1))
      yield bound, ast.BinOp(bound, ast.Sub(), ast.Constant(1))


def dropped_term(node: ast.AST) -> Iterator[Change]:
  """A summand, factor, condition or argument of min and max is dropped."""
  if isinstance(node, ast.BinOp) and not _joins_sequences(node):
    if isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
      yield node, node.left
    if isinstance(node.op, ast.Add | ast.Mult):
      yield node, node.right
  elif isinstance(node, ast.BoolOp):
    for i in range(len(node.values)):
      rest = _replaced(node.values, i)
      yield node, rest[0] if len(rest) == 1 else _with(node, values=rest)
  elif isinstance(node, ast.Call) and len(node.args) == 2:
    starred = any(isinstance(a, ast.Starred) for a in node.args)
    if _name(node) in ("min", "max", "minimum", "maximum") and not starred:
      yield node, node.args[0]
      yield node, node.args[1]


def _kind(node: ast.AST) -> Any:
  """Kind of an argument; arguments of equal kind are easily swapped."""
  if isinstance(node, ast.Constant):
    return type(node.value)
  if isinstance(node, ast.Name | ast.Attribute):
    return "name"
  return type(node) if isinstance(node, ast.Subscript | ast.BinOp) else None


def swapped_arguments(node: ast.AST) -> Iterator[Change]:
  """Neighbouring arguments of one kind, or both sides of ``-`` and ``/``."""
  if isinstance(node, ast.BinOp):
    if isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv | ast.Mod):
      yield node, _with(node, left=node.right, right=node.left)
  elif isinstance(node, ast.Call) and _name(node) not in _COMMUTATIVE:
    for i, (a, b) in enumerate(itertools.pairwise(node.args)):
      if _kind(a) is not None and _kind(a) == _kind(b):
        args = [*node.args[:i], b, a, *node.args[i + 2:]]
        yield node, _with(node, args=args)
    for i, (a, b) in enumerate(itertools.pairwise(node.keywords)):
      if a.arg and b.arg and _kind(a.value) == _kind(b.value) == "name":
        swapped = [_with(a, value=b.value), _with(b, value=a.value)]
        rest = node.keywords[i + 2:]
        yield node, _with(node, keywords=[*node.keywords[:i], *swapped, *rest])


def constant(node: ast.AST) -> Iterator[Change]:
  """A doubled number, or the other truth value."""
  if isinstance(node, ast.Constant):
    if isinstance(node.value, bool):
      yield node, ast.Constant(not node.value)
    elif isinstance(node.value, float):
      yield node, ast.Constant(2 * node.value or 1.0)
    elif isinstance(node.value, int) and abs(node.value) >= 8:
      yield node, ast.Constant(2 * node.value)


def negated_condition(node: ast.AST) -> Iterator[Change]:
  """A condition of a branch, a loop or a comprehension is negated."""
  conditions: list[ast.expr] = []
  if isinstance(node, ast.If | ast.IfExp | ast.While):
    conditions = [node.test]
  elif isinstance(node, ast.comprehension):
    conditions = node.ifs
  for test in conditions:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
      yield test, test.operand
    elif not isinstance(test, ast.Constant | ast.Compare):
      yield test, ast.UnaryOp(ast.Not(), test)


def removed_statement(node: ast.AST) -> Iterator[Change]:
  """A statement without which the code still has all its names."""
  effect = isinstance(
    node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break | ast.Delete
  )
  if isinstance(node, ast.Expr):
    effect = isinstance(node.value, ast.Call | ast.Await)
  elif isinstance(node, ast.Assign) and len(node.targets) == 1:
    target, = node.targets
    effect = isinstance(target, ast.Attribute | ast.Subscript)
    if isinstance(target, ast.Name):  # assigned before: x = f(x)
      used = [n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)]
      effect = target.id in used
  if effect:
    yield node, ast.Pass()


OPERATORS: dict[str, Callable[[ast.AST], Iterator[Change]]] = {
  operator.__name__: operator
  for operator in (
    wrong_axis, comparison, sign, off_by_one, dropped_term, swapped_arguments,
    constant, negated_condition, removed_statement,
  )
}


_LOGGING = (
  "logging", "log", "LOG", "logger", "warnings", "print", "console"
)
_UNMUTATED = (ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)


@dataclasses.dataclass(frozen=True)
class Mutant:
  """A change of one node of one file.

  Attributes:
    file: Path from the root of the repository.
    operator: Name in `OPERATORS`.
    line: Line of the node, from 1.
    start, end: Its first byte and the one after its last.
    new: Source of its replacement, with as many lines.
  """

  file: str
  operator: str
  line: int
  start: int
  end: int
  new: str

  def apply(self, source: str) -> str:
    """Source with the change; all other lines keep their numbers."""
    text = source.encode()
    return (text[:self.start] + self.new.encode() + text[self.end:]).decode()

  def described(self, source: str) -> str:
    """Place, operator, and the lines that differ, with "-" and "+"."""
    lines = difflib.unified_diff(
      source.splitlines(), self.apply(source).splitlines(), n=0
    )
    diff = [f"  {x[0]} {x[1:].strip()}" for x in list(lines)[3:] if x[1:]]
    return "\n".join([f"{self.file}:{self.line} ({self.operator})", *diff])


def _is_message(node: ast.AST) -> bool:
  """Whether a statement logs, or is a docstring."""
  if not isinstance(node, ast.Expr):
    return False
  if isinstance(node.value, ast.Constant):
    return True
  called = node.value.func if isinstance(node.value, ast.Call) else None
  while isinstance(called, ast.Attribute | ast.Call):
    called = called.value if isinstance(called, ast.Attribute) else called.func
  return isinstance(called, ast.Name) and called.id in _LOGGING


def _is_guard(node: ast.AST) -> bool:
  """``if TYPE_CHECKING`` and ``if __name__ == "__main__"``."""
  if not isinstance(node, ast.If):
    return False
  test = ast.unparse(node.test)
  return "TYPE_CHECKING" in test or "__name__" in test


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
  """Nodes that may be mutated."""
  if isinstance(node, _UNMUTATED) or _is_message(node) or _is_guard(node):
    return
  if isinstance(node, ast.keyword) and node.arg == "strict":
    return  # an assertion of zip
  yield node
  for name, value in ast.iter_fields(node):
    skipped = isinstance(node, ast.Raise) or name == "pattern"
    if skipped or name in ("annotation", "returns", "decorator_list"):
      continue
    for child in value if isinstance(value, list) else [value]:
      if isinstance(child, ast.AST):
        yield from _nodes(child)


def mutants(source: str, file: str) -> list[Mutant]:
  """Returns all mutants of a file, in the order of its nodes.

  Args:
    source: Content of the file.
    file: Path from the root of the repository.
  """
  lines = source.encode().splitlines(keepends=True)
  starts = [0, *itertools.accumulate(map(len, lines))]
  found: dict[tuple, Mutant] = {}
  for node in _nodes(ast.parse(source)):
    for name, operator in OPERATORS.items():
      for old, new in operator(node):
        start = starts[old.lineno - 1] + old.col_offset
        end = starts[old.end_lineno - 1] + old.end_col_offset
        text = ast.unparse(ast.fix_missing_locations(new))
        text += "\n" * (old.end_lineno - old.lineno)
        if not isinstance(new, ast.stmt):
          text = f"({text})"
        found.setdefault(
          (start, end, text), Mutant(file, name, old.lineno, start, end, text)
        )
  return list(found.values())


def draw(texts: Mapping[str, str], num: int, seed: str) -> list[Mutant]:
  """Draws different mutants, fewer than `num` if there are not as many.

  A file is drawn with the square root of its length, so that long files come up
  more often than short ones but not in proportion; then an operator, and one of
  its mutants that compiles.

  Args:
    texts: Content of source files by path from the root.
    num: Number of mutants.
    seed: Seed of the draws.
  """
  rng = random.Random(seed)
  left: dict[str, list[Mutant]] = {}
  weights = {file: math.sqrt(len(t)) for file, t in texts.items() if t}
  found: list[Mutant] = []
  while len(found) < num and weights:
    file, = rng.choices(list(weights), list(weights.values()))
    if file not in left:
      left[file] = mutants(texts[file], file)
    if not left[file]:
      del weights[file]
      continue
    operator = rng.choice(sorted({m.operator for m in left[file]}))
    chosen = rng.choice([m for m in left[file] if m.operator == operator])
    left[file].remove(chosen)
    if _compiles(chosen.apply(texts[file])):
      found.append(chosen)
  return found


def _compiles(source: str) -> bool:
  try:
    compile(source, "mutant", "exec")
  except (SyntaxError, ValueError):
    return False
  return True
