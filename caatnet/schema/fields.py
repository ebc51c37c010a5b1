"""Declarations of config keys: type, default, allowed values, documentation.

A section of a config is a dataclass created by `section`, and each of its keys
a `field`. Defaults, validation, overrides, ``--help_config`` and the arguments
of builders are derived from this declaration.

pydantic also validates types and bounds, but its errors take several lines, and
it has no bounds in float32, the dtype of values in compiled programs.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
import numbers
import types
import typing
from typing import Any

import numpy as np

_TINY = float(np.finfo(np.float32).tiny)
_HUGE = float(np.finfo(np.float32).max)
# Sizes and counts are int32 in compiled programs.
_INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Range:
  """Numbers between two bounds that are finite in float32.

  Bounds apply to the value rounded to float32: a learning rate that is rounded
  to 0 would have no effect, and a decay that is rounded to 1 would cause a
  division by 0.

  Attributes:
    low: The lower bound.
    high: The upper bound; infinity for none.
    above: Whether the lower bound is excluded.
    below: Whether the upper bound is excluded.
    whole: Whether only integers are in the range.

  Example:
    >>> decay = Range(0, 1, below=True)
    >>> 0.9 in decay, 1 - 1e-9 in decay  # float32 rounds 1 - 1e-9 to 1
    (True, False)
    >>> str(decay)
    'lie in [0, 1)'
  """

  low: float
  high: float = math.inf
  above: bool = False
  below: bool = False
  whole: bool = False

  def __contains__(self, value: Any) -> bool:
    kind = numbers.Integral if self.whole else numbers.Real
    if not isinstance(value, kind) or isinstance(value, bool):
      return False  # bool is a subclass of int
    if not self.whole:
      if not abs(value) <= _HUGE:
        return False
      # Compiled programs flush subnormal numbers to zero.
      value = np.float32(value) if abs(value) >= _TINY else 0
    return (
      (self.low < value if self.above else self.low <= value)
      and (value < self.high if self.below else value <= self.high)
    )

  def __str__(self) -> str:
    """Returns the text after "must", such as "be an integer from 1 to 9"."""
    if self.whole:
      return f"be an integer from {self.low} to {self.high}"
    if self.high == math.inf:
      bound = "positive" if self.above else f"at least {self.low}"
      return f"be {bound} and finite (float32)"
    left, right = "(" if self.above else "[", ")" if self.below else "]"
    return f"lie in {left}{self.low}, {self.high}{right}"


COUNT = Range(1, _INT32_MAX, whole=True)
COUNT_OR_ZERO = Range(0, _INT32_MAX, whole=True)
TWO_OR_MORE = Range(2, _INT32_MAX, whole=True)
BYTES = Range(1, 2**53, whole=True)  # float64 represents them exactly
SEED = Range(0, 2**32 - 1, whole=True)
POSITIVE = Range(0, above=True)
NOT_NEGATIVE = Range(0)
FRACTION = Range(0, 1)
POSITIVE_FRACTION = Range(0, 1, above=True)
INNER_FRACTION = Range(0, 1, above=True, below=True)
DECAY = Range(0, 1, below=True)

# The range of a number, or the allowed texts.
Allowed = Range | tuple[str, ...] | None


class NestedConfig:
  """Type of a key whose value is a whole config; {} for no config."""


class SectionsByChoice:
  """Type of a key that maps a section's name and a selector value to a section.

  A selector is a key such as ``outer.algorithm``.
  """


@dataclasses.dataclass(frozen=True)
class Key:
  """Declaration of one config key.

  Attributes:
    kind: The type: bool, int, float, str, a section, a union, a tuple, or a
      dict with texts as keys.
    allowed: The range of every number in the value, or the allowed texts; None
      for any text.
    doc: The documentation.
    empty: Whether a tuple of variable length may be empty.
  """

  kind: Any
  allowed: Allowed
  doc: str
  empty: bool = True

  def must(self) -> str:
    """Returns the text after "must" for the key's values: "lie in [0, 1]"."""
    text = _format_requirement(self.kind, self.allowed)
    if not self.empty:
      text = text.replace("be a tuple", "be a non-empty tuple", 1)
    return text

  def check(self, name: str, value: Any) -> None:
    """Checks type and range of a value.

    Args:
      name: The key, preceded by its section, as in "sync.p".
      value: The value. A list counts as a tuple, since JSON has no tuples.

    Raises:
      ValueError: If the value is not allowed; the message has key, value and
        the allowed values.
    """
    found = _find_wrong_part(value, self.kind, self.allowed)
    if found is not None and found[0] is not value:
      part, must = found
      raise ValueError(f"config.{name}={part!r} must {must}")
    if found is not None or not (self.empty or value):
      raise ValueError(f"config.{name}={value!r} must {self.must()}")


def field(
  default: Any, doc: str, allowed: Allowed = None, empty: bool = False
) -> Any:
  """Declares a key of a section.

  Args:
    default: The default; for a mutable type, a function that returns it. A run
      whose stored config is older than the key gets the default, which must
      therefore reproduce the earlier behaviour.
    doc: The documentation, with unit and the meaning of special values.
    allowed: The range of all numbers in the value, or the allowed texts; None
      for any text, booleans and sections.
    empty: Whether a tuple of variable length may be empty. It always may if its
      default is empty.
  """
  metadata = {"doc": doc, "allowed": allowed, "empty": empty}
  if callable(default):
    return dataclasses.field(default_factory=default, metadata=metadata)
  return dataclasses.field(default=default, metadata=metadata)


@typing.dataclass_transform(
  frozen_default=True, kw_only_default=True, field_specifiers=(field,)
)
def section(cls: type) -> type:
  """Makes a class with fields declared by `field` a frozen dataclass.

  Raises:
    TypeError: If a field has no documentation, or a number has no `Range`, or a
      `Range` of integers for a float or the reverse.
  """
  made = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
  for name, key in keys(made).items():
    if not key.doc:
      raise TypeError(f"{cls.__name__}.{name} has no documentation")
    for kind in _number_types(key.kind):
      whole = isinstance(key.allowed, Range) and key.allowed.whole
      if not isinstance(key.allowed, Range) or whole != (kind is int):
        raise TypeError(f"{cls.__name__}.{name} has no range of {kind}s")
  return made


def keys(cls: type) -> dict[str, Key]:
  """Returns the declarations of a section's keys by name."""
  hints = typing.get_type_hints(cls)
  return {
    f.name: Key(
      hints[f.name], f.metadata["allowed"], f.metadata["doc"],
      f.metadata["empty"] or not (
        _is_variadic_tuple(hints[f.name]) and default_of(cls, f.name)
      ),
    )
    for f in dataclasses.fields(cls) if "doc" in f.metadata
  }


def default_of(cls: type, name: str) -> Any:
  """Returns the default of a section's key."""
  found = cls.__dataclass_fields__[name]
  if found.default is not dataclasses.MISSING:
    return found.default
  factory: Callable[[], Any] = found.default_factory
  return factory()


def _is_variadic_tuple(kind: Any) -> bool:
  """Returns whether a type is a tuple of variable length."""
  return (
    typing.get_origin(kind) is tuple and typing.get_args(kind)[-1] is Ellipsis
  )


def _number_types(kind: Any) -> list[type]:
  """Returns the types of all numbers within a type."""
  if kind in (int, float):
    return [kind]
  if typing.get_origin(kind) is None:
    return []
  return [
    found for part in typing.get_args(kind) for found in _number_types(part)
  ]


def _format_requirement(kind: Any, allowed: Allowed) -> str:
  """Returns the requirement of a type and a range, the text after "must"."""
  origin, arguments = typing.get_origin(kind), typing.get_args(kind)
  if kind in (int, float):
    return str(allowed)
  if kind is bool:
    return "be True or False"
  if kind is str:
    if allowed is None or isinstance(allowed, Range):
      return "be text"
    return f"be one of {', '.join(map(repr, allowed))}"
  if kind is type(None):
    return "be None"
  if origin in (typing.Union, types.UnionType):
    return " or ".join(_format_requirement(part, allowed) for part in arguments)
  if _is_variadic_tuple(kind):
    part = _format_requirement(arguments[0], allowed)
    return f"be a tuple, each part of which must {part}"
  if origin is tuple:
    parts = dict.fromkeys(
      _format_requirement(part, allowed) for part in arguments
    )
    return (
      f"be a tuple of {len(arguments)}, each part of which must "
      f"{' or '.join(parts)}"
    )
  if origin is dict:
    value = _format_requirement(arguments[1], allowed)
    return f"be a dict, each value of which must {value}"
  return "be a section"


def _find_wrong_part(
  value: Any, kind: Any, allowed: Allowed
) -> tuple[Any, str] | None:
  """Returns the first wrong part of a value and its requirement, or None."""
  origin, arguments = typing.get_origin(kind), typing.get_args(kind)
  parts: list[tuple[Any, Any]] = []
  if kind in (int, float):
    fits = value in allowed
  elif kind is str:
    fits = isinstance(value, str) and (
      allowed is None or isinstance(allowed, Range) or value in allowed
    )
  elif kind in (bool, type(None)):
    fits = isinstance(value, kind)
  elif origin in (typing.Union, types.UnionType):
    fits = any(
      _find_wrong_part(value, part, allowed) is None for part in arguments
    )
  elif origin is tuple:
    fits = isinstance(value, tuple | list)
    if fits and _is_variadic_tuple(kind):
      parts = [(part, arguments[0]) for part in value]
    elif fits:
      fits = len(value) == len(arguments)
      parts = list(zip(value, arguments, strict=False)) if fits else []
  elif origin is dict:
    fits = isinstance(value, Mapping)
    parts = [(part, arguments[1]) for part in value.values()] if fits else []
  else:
    raise TypeError(f"{kind} is not a supported type of a config key")
  if not fits:
    return value, _format_requirement(kind, allowed)
  for part, of in parts:
    found = _find_wrong_part(part, of, allowed)
    if found is not None:
      return found
  return None
