"""Schemas of files that users write, with one-line error messages.

A schema is strict: numbers are numbers (neither ``true`` nor ``"50e9"``),
finite, and in their range; unknown and repeated keys are errors; no value is
converted except an integer to a float. Files are JSON objects, lines of JSON
objects, or CSV tables, in which the same values are written as text.

Example:
  >>> class Link(Schema):
  ...   name: str
  ...   bandwidth: Positive
  >>> parse(Link, '{"name": "a", "bandwidth": 5e10}').bandwidth
  50000000000.0
  >>> parse(Link, '{"name": "a", "bandwidth": "fast"}')
  Traceback (most recent call last):
  ValueError: bandwidth="fast" must be a valid number
"""

import collections
from collections.abc import Callable, Iterable, Iterator
import csv
import gzip
import json
import pathlib
from typing import Annotated, Any, TypeVar
import zlib

import pydantic

from parallel.base import checks

# Maximum bytes of a file: more than a matrix between 4,096 devices needs.
MAX_BYTES = 2**30
# Objects with more bytes are not searched for repeated keys, to save time. Only
# files with matrices are larger.
_MAX_UNIQUE_CHECK_BYTES = 2**24
_GZIP = b"\x1f\x8b"  # magic number

Field = pydantic.Field
Positive = Annotated[float, pydantic.Field(gt=0)]
NotNegative = Annotated[float, pydantic.Field(ge=0)]
# Integers of 64 bits, far from the limits of floats.
Count = Annotated[int, pydantic.Field(ge=1, lt=2**63)]
# Rates in bytes or operations per second, and times in seconds; the limits keep
# sums and products far from the largest float.
MAX_RATE, _MAX_SECONDS = 1e24, 1e12
Rate = Annotated[float, pydantic.Field(gt=0, le=MAX_RATE)]
Seconds = Annotated[float, pydantic.Field(ge=0, le=_MAX_SECONDS)]
# Logarithm of a ratio of times, limited so that its exponential is finite.
LogRatio = Annotated[float, pydantic.Field(ge=-100, le=100)]
# Entries of matrices of rates and of times; readers of matrices check the sign.
AnyRate = Annotated[float, pydantic.Field(le=MAX_RATE)]
AnySeconds = Annotated[float, pydantic.Field(le=_MAX_SECONDS)]


class Schema(pydantic.BaseModel):
  """Base class of schemas whose objects must not have unknown keys."""

  model_config = pydantic.ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False, frozen=True
  )


class OpenSchema(Schema):
  """Base class of schemas for files of other programs; ignores unknown keys."""

  model_config = pydantic.ConfigDict(extra="ignore")


_S = TypeVar("_S", bound=Schema)
_T = TypeVar("_T")


def either(**kinds: Any) -> Any:
  """Returns a union of types, which validates a value by one of them.

  Args:
    kinds: Types of the union: ``text`` validates strings, ``number`` numbers,
      and ``other`` all other values.
  """

  def kind_of(value: Any) -> str:
    if isinstance(value, str) and "text" in kinds:
      return "<text>"
    if isinstance(value, int | float) and "number" in kinds:
      return "<number>"
    return "<other>"

  union: Any = None
  for name, kind in kinds.items():
    tagged = Annotated[kind, pydantic.Tag(f"<{name}>")]
    union = tagged if union is None else union | tagged
  return Annotated[union, pydantic.Discriminator(kind_of)]


def read(
  schema: type[_S],
  path: pathlib.Path,
  max_bytes: int = MAX_BYTES,
  then: Callable[[_S], _T] = lambda found: found,
) -> _T:
  """Reads a JSON file, gzipped or not.

  Args:
    schema: Schema of the file's object.
    path: The file.
    max_bytes: Maximum bytes of the file, after decompression.
    then: Function that converts the file's object to the result. The file's
      name is added to the ValueErrors of this function, too.

  Raises:
    ValueError: The file is too large or invalid; the message names it.
    OSError: The file cannot be read.
  """
  try:
    return then(parse(schema, read_bytes(path, max_bytes)))
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def read_bytes(path: pathlib.Path, max_bytes: int = MAX_BYTES) -> bytes:
  """Returns the content of a file, gzipped or not.

  Args:
    path: The file.
    max_bytes: Maximum bytes of the file, after decompression.

  Raises:
    ValueError: The file is too large or not regular, or its gzip is damaged.
    OSError: The file cannot be read.
  """
  if path.exists() and not path.is_file():  # opening a FIFO would block
    raise ValueError("is not a regular file")
  with open(path, "rb") as file:
    packed = file.read(2) == _GZIP
  try:
    with (gzip.open if packed else open)(path, "rb") as file:
      data = file.read(max_bytes + 1)
  except (EOFError, gzip.BadGzipFile, zlib.error) as error:
    raise ValueError(f"is damaged: {error}") from error
  if len(data) > max_bytes:
    raise ValueError(f"has more than {max_bytes:,} bytes")
  return data


def parse_lines(schema: type[_S], text: str) -> Iterator[tuple[int, _S]]:
  """Yields (line number, object) of each line of JSON.

  Raises:
    ValueError: A line is invalid; the message has its number.
  """
  for number, line in enumerate(text.splitlines(), 1):
    try:
      yield number, parse(schema, line)
    except ValueError as error:
      raise ValueError(f"line {number}: {error}") from error


def parse_table(schema: type[_S], text: str) -> Iterator[tuple[int, _S]]:
  """Yields (line number, object) of each row of a CSV table.

  Args:
    schema: Schema of a row, whose keys are the names of columns.
    text: The table; its first line has the names.

  Raises:
    ValueError: A row is invalid; the message has its line.

  Example:
    >>> class Row(OpenSchema):
    ...   tokens: Count
    >>> [row.tokens for _, row in parse_table(Row, "tokens,us\\n8,2.5\\n")]
    [8]
  """
  rows = csv.DictReader(text.splitlines(), strict=True)
  _check_header(schema, rows)
  while True:
    try:
      row = next(rows, None)
      if row is None:
        return
      if None in row or None in row.values():
        raise ValueError(f"must have {len(rows.fieldnames or ())} fields")
      found = schema.model_validate_strings(row)
    except pydantic.ValidationError as error:
      line = f"line {rows.line_num}"
      raise ValueError(f"{line}: {_explain_error(schema, error)}") from error
    except (csv.Error, ValueError) as error:
      raise ValueError(f"line {rows.reader.line_num}: {error}") from error
    yield rows.line_num, found


def _check_header(schema: type[Schema], rows: csv.DictReader) -> None:
  """Raises an error if a column of a schema is missing or listed twice."""
  try:
    names = rows.fieldnames or ()
  except csv.Error as error:
    raise ValueError(f"line 1: {error}") from error
  if not names:
    raise ValueError("line 1: is empty")
  needed = {
    field.alias or key for key, field in schema.model_fields.items()
    if field.is_required()
  }
  for name in sorted(needed - {*names}):
    raise ValueError(
      f"line 1: column {name} is missing; columns are {', '.join(names)}"
    )
  for name, count in collections.Counter(names).items():
    if count > 1:
      raise ValueError(f"line 1: column {name} is listed {count} times")


def parse(schema: type[_S], data: str | bytes) -> _S:
  """Parses a JSON object.

  Raises:
    ValueError: The object is invalid; the message has one line.
  """
  try:
    found = schema.model_validate_json(data)
  except pydantic.ValidationError as error:
    raise ValueError(_explain_error(schema, error)) from error
  if len(data) <= _MAX_UNIQUE_CHECK_BYTES:
    # Without this check, the last value of a repeated key would count.
    try:
      json.loads(data, object_pairs_hook=_check_unique_keys)
    except RecursionError as error:  # in the value of an ignored key
      raise ValueError("is nested too deeply") from error
  return found


def _check_unique_keys(pairs: list[tuple[str, Any]]) -> None:
  """Raises an error if an object has a key twice."""
  counts = collections.Counter(key for key, _ in pairs)
  for key, count in counts.items():
    if count > 1:
      raise ValueError(f"key {_short(key)} is listed {count} times")


def check(schema: type[_S], value: Any) -> _S:
  """Validates an object that has been parsed; returns it as ``schema``."""
  try:
    return schema.model_validate(value)
  except pydantic.ValidationError as error:
    raise ValueError(_explain_error(schema, error)) from error


def _explain_error(
  schema: type[Schema], failed: pydantic.ValidationError
) -> str:
  """Returns a line about the first error: path, value, and allowed values."""
  errors = failed.errors(include_url=False)
  error, more = errors[0], len(errors) - 1
  place = _format_location(error["loc"])
  kind, value = error["type"], error["input"]
  if kind == "json_invalid":
    text = f"is not JSON: {error['ctx']['error']}"
  elif kind == "missing":
    keys = ", ".join(_fields_at(schema, error["loc"][:-1]))
    text = f"{place} is missing; keys are {keys}"
  elif kind == "extra_forbidden":
    outer = _format_location(error["loc"][:-1])
    keys = _fields_at(schema, error["loc"][:-1])
    where = f"{outer}: key " if outer else "key "
    try:
      checks.known(where, str(error["loc"][-1]), keys)
    except ValueError as known:
      text = str(known)
  else:
    must = error["msg"].removeprefix("Input should ")
    must = must[0].lower() + must[1:]
    must = must if must.startswith("be ") else f"satisfy: {must}"
    shown = "" if isinstance(value, dict | list) else f"={_short(value)}"
    text = f"{place or 'the content'}{shown} must {must}"
  return text + (f" ({more} more errors)" if more else "")


def _format_location(location: Iterable[int | str]) -> str:
  """Returns the path of a value, as in ``links[2].bandwidth``."""
  text = ""
  for part in location:
    if isinstance(part, int):
      text += f"[{part}]"
    elif not part.startswith("<"):  # tags of `either`
      text += f".{part}" if text else part
  return text


def _fields_at(schema: Any, location: tuple[int | str, ...]) -> list[str]:
  """Returns the keys that a schema allows in the object at a location."""
  kinds = [schema]
  for part in location:
    if isinstance(part, str) and not part.startswith("<"):
      kinds = [
        kind.model_fields[part].annotation for kind in kinds
        if _is_schema(kind) and part in kind.model_fields
      ]
      kinds = [inner for kind in kinds for inner in _schemas(kind)]
  return [field.alias or name for kind in kinds if _is_schema(kind)
          for name, field in kind.model_fields.items()]


def _is_schema(kind: Any) -> bool:
  return isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


def _schemas(kind: Any) -> list[Any]:
  """Returns the schemas in a type, such as those of a union or of a list."""
  if _is_schema(kind):
    return [kind]
  parts = getattr(kind, "__args__", ())
  return [found for part in parts for found in _schemas(part)]


def _short(value: Any) -> str:
  text = json.dumps(value, default=str)
  return text if len(text) <= 60 else f"{text[:57]}..."
