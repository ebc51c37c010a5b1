"""Seeded corruption of files: one fault in a valid example."""

import os
import pathlib
import random
import re

# A number that is not a part of a word.
_NUMBER = re.compile(
  rb"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.])"
)
# A key of JSON, of YAML, or an attribute of XML.
_KEY = re.compile(rb'"\w+"\s*:|^\s*\w+:(?=\s)|(?<=\s)\w+="[^"]*"', re.M)
# Kinds of faults in texts, and what replaces a number.
_VALUES = {
  "wrong_type": b'"x"', "boolean": b"true", "nan": b"NaN",
  "infinite": b"1e999", "negative": b"-3", "huge": b"1" + b"0" * 30,
  "beyond_float64": b"1" + b"0" * 400, "nested": b"[" * 100_000,
}
TEXT = (*_VALUES, "empty", "truncated", "not_utf8", "nul", "repeated_key",
        "brackets", "list", "object")
# Changed bytes per row of tests; set it for more.
FLIPS = int(os.environ.get("FLIPS", "12"))
BINARY = ("empty", "truncated", "changed", "longer", "brackets")


def corrupted(data: bytes, kind: str, seed: int = 0) -> bytes:
  """Returns a file's content with one fault, at a place that the seed draws.

  Args:
    data: Content of a valid file.
    kind: One of ``TEXT`` or ``BINARY``.
    seed: Seed of the place.

  Example:
    >>> corrupted(b'{"a": 1, "b": 2}', "negative")
    b'{"a": 1, "b": -3}'
    >>> corrupted(b'{"a": 1, "b": 2}', "repeated_key")
    b'{"a": 1, "b":0, "b": 2}'
  """
  rng = random.Random(f"{kind} {seed}")
  place = rng.randrange(max(1, len(data)))
  if kind in _VALUES:
    return _replaced(data, _NUMBER, _VALUES[kind], rng)
  if kind == "repeated_key":
    return _repeated(data, rng)
  return {
    "empty": b"",
    "truncated": data[:place],
    "not_utf8": data[:place] + b"\xff" + data[place:],
    "nul": data[:place] + b"\0" + data[place:],
    "brackets": b'{"a":' * 50_000,
    "list": b"[1]\n",
    "object": b'{"a": {}}\n',
    "changed": data[: place % 128] + bytes([data[place % 128] ^ 0xA5])
    + data[place % 128 + 1 :] if data else b"",
    "longer": data + b"x",
  }[kind]


def flip(folder: pathlib.Path, seed: int) -> tuple[pathlib.Path, int, int]:
  """Changes one byte of a file; returns the file, the place and the old byte.

  Every second seed draws among all bytes of a folder, others among its files.
  """
  rng = random.Random(f"flip {seed}")
  found = sorted(x for x in folder.rglob("*") if x.is_file())
  found = [x for x in found if x.stat().st_size]
  sizes = [x.stat().st_size for x in found]
  (path,) = rng.choices(found, sizes if seed % 2 else None)
  data = bytearray(path.read_bytes())
  place = rng.randrange(len(data))
  old = data[place]
  data[place] ^= rng.randrange(1, 256)
  path.write_bytes(data)
  return path, place, old


def _replaced(
  data: bytes, pattern: re.Pattern[bytes], value: bytes, rng: random.Random
) -> bytes:
  """Replaces a match; without one, appends the value."""
  matches = [*pattern.finditer(data)]
  if not matches:
    return data + value
  match = rng.choice(matches)
  return data[: match.start()] + value + data[match.end() :]


def _repeated(data: bytes, rng: random.Random) -> bytes:
  """Repeats a key; without one, a line."""
  matches = [*_KEY.finditer(data)]
  if not matches:
    lines = data.splitlines(keepends=True)
    return b"".join([*lines, *rng.choices(lines or [b""])])
  match = rng.choice(matches)
  again = {b'"': b" ", b":": b"0, ", b" ": b" "}
  text = match[0] + again.get(match[0][-1:], b" ")
  return data[: match.start()] + text + data[match.start() :]
