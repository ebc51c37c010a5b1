"""Closed forms as expression trees, evaluated in Python or in JavaScript.

A formula is written as arithmetic on names. So one formula gives a number, an
array of numbers for many settings at once, and a function for a web page.
"""

from collections.abc import Iterator, Mapping
import dataclasses
from typing import Any

import numpy as np

# Operation -> its function in Python and its text in JavaScript (ES5).
_OPERATIONS: dict[str, tuple[Any, str]] = {
  "+": (np.add, "({} + {})"),
  "-": (np.subtract, "({} - {})"),
  "*": (np.multiply, "({} * {})"),
  "/": (np.divide, "({} / {})"),
  "sqrt": (np.sqrt, "Math.sqrt({})"),
  "exp": (np.exp, "Math.exp({})"),
  "log": (np.log, "Math.log({})"),
  "ceil": (np.ceil, "Math.ceil({})"),
  "floor": (np.floor, "Math.floor({})"),
  "max": (np.maximum, "Math.max({}, {})"),
  "min": (np.minimum, "Math.min({}, {})"),
}


@dataclasses.dataclass(frozen=True)
class Expression:
  """Node of an expression tree.

  Example:
    >>> area = variable("width") * variable("height")
    >>> float(area.value({"width": 2, "height": 3}))
    6.0
    >>> area.javascript("v")
    '(v.width * v.height)'

  Attributes:
    kind: "name", "number" or an operation.
    args: Name, number, or operands.
  """

  kind: str
  args: tuple[Any, ...]

  def __add__(self, other: "Operand") -> "Expression":
    return _apply("+", self, other)

  def __radd__(self, other: float) -> "Expression":
    return _apply("+", other, self)

  def __sub__(self, other: "Operand") -> "Expression":
    return _apply("-", self, other)

  def __rsub__(self, other: float) -> "Expression":
    return _apply("-", other, self)

  def __mul__(self, other: "Operand") -> "Expression":
    return _apply("*", self, other)

  def __rmul__(self, other: float) -> "Expression":
    return _apply("*", other, self)

  def __truediv__(self, other: "Operand") -> "Expression":
    return _apply("/", self, other)

  def __rtruediv__(self, other: float) -> "Expression":
    return _apply("/", other, self)

  def __str__(self) -> str:
    """Returns the formula in infix notation."""
    if self.kind == "name":
      return self.args[0]
    if self.kind == "number":
      return f"{self.args[0]:g}"
    texts = [
      f"({arg})" if self._needs_brackets(arg, i) else str(arg)
      for i, arg in enumerate(self.args)
    ]
    if self.kind in _PRIORITY:
      return f" {self.kind} ".join(texts)
    return f"{self.kind}({', '.join(texts)})"

  def _needs_brackets(self, arg: "Expression", place: int) -> bool:
    own, its = _PRIORITY.get(self.kind), _PRIORITY.get(arg.kind)
    if own is None or its is None:
      return False
    return its < own or (place == 1 and its == own and self.kind in "-/")

  def names(self) -> Iterator[str]:
    """Yields the names that the formula reads, with repetitions."""
    if self.kind == "name":
      yield self.args[0]
    elif self.kind != "number":
      for arg in self.args:
        yield from arg.names()

  def value(self, values: Mapping[str, Any]) -> Any:
    """Evaluates the formula, for arrays element by element.

    Args:
      values: A number or an array for each name.
    """
    if self.kind == "name":
      return values[self.args[0]]
    if self.kind == "number":
      return self.args[0]
    function, _ = _OPERATIONS[self.kind]
    return function(*(arg.value(values) for arg in self.args))

  def javascript(self, values: str) -> str:
    """Returns the formula in JavaScript.

    Args:
      values: Name of the object that has a number for each name.
    """
    if self.kind == "name":
      return f"{values}.{self.args[0]}"
    if self.kind == "number":
      return repr(float(self.args[0]))
    _, text = _OPERATIONS[self.kind]
    return text.format(*(arg.javascript(values) for arg in self.args))


Operand = Expression | float
_PRIORITY = {"+": 0, "-": 0, "*": 1, "/": 1}


def variable(text: str) -> Expression:
  """Returns the expression that reads a named value."""
  return Expression("name", (text,))


def _apply(operation: str, *args: Operand) -> Expression:
  return Expression(operation, tuple(
    arg if isinstance(arg, Expression) else Expression("number", (arg,))
    for arg in args
  ))


def sqrt(x: Operand) -> Expression:
  """Returns the square root."""
  return _apply("sqrt", x)


def exp(x: Operand) -> Expression:
  """Returns e to the power of x."""
  return _apply("exp", x)


def log(x: Operand) -> Expression:
  """Returns the natural logarithm."""
  return _apply("log", x)


def ceil(x: Operand) -> Expression:
  """Returns x rounded up to an integer."""
  return _apply("ceil", x)


def floor(x: Operand) -> Expression:
  """Returns x rounded down to an integer."""
  return _apply("floor", x)


def maximum(x: Operand, y: Operand) -> Expression:
  """Returns the larger of two operands."""
  return _apply("max", x, y)


def minimum(x: Operand, y: Operand) -> Expression:
  """Returns the smaller of two operands."""
  return _apply("min", x, y)


def evaluate(
  formulas: Mapping[str, Expression], values: Mapping[str, Any]
) -> dict[str, Any]:
  """Evaluates formulas in their order; each may read earlier ones.

  Args:
    formulas: Formulas by the names of their results.
    values: A number or an array for each name that no formula computes.

  Returns:
    The given values and the results.
  """
  found = dict(values)
  for key, formula in formulas.items():
    found[key] = formula.value(found)
  return found


def javascript(formulas: Mapping[str, Expression], function: str) -> str:
  """Returns the source of a JavaScript function equivalent to `evaluate`.

  Args:
    formulas: Formulas by the names of their results.
    function: Name of the function. It takes an object of numbers and adds the
      results to it.
  """
  lines = [
    f"  v.{key} = {formula.javascript('v')};"
    for key, formula in formulas.items()
  ]
  return "\n".join([f"function {function}(v) {{", *lines, "  return v;", "}"])
