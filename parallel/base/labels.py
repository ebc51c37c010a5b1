"""Headings and texts of values, derived from the keys and the units in them.

  >>> heading("num_rounds"), heading("switch_s"), heading("links_gb_s")
  ('rounds', 'switch', 'links (GB/s)')
  >>> text(0.0125, "switch_s"), text(2.5e9, "bytes"), text(0.5, "busy_share")
  ('12.5 ms', '2.5 GB', '50.0%')
"""

from collections.abc import Mapping
from typing import Any

# Suffix of a key -> unit of its heading. Texts of seconds and of bytes have
# their own units.
_UNITS = {
  "_gbit_s": "Gbit/s", "_gb_s": "GB/s", "_tflops": "TFLOP/s", "_us": "us",
  "_ms": "ms", "_gb": "GB", "_mb": "MB",
}
# A key that contains one of these words is a fraction, shown in percent.
_FRACTIONS = {"share", "fraction", "utilisation"}
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def heading(key: str) -> str:
  """Returns a key in words, with its unit unless value texts include it."""
  for suffix, unit in _UNITS.items():
    if key.endswith(suffix):
      return f"{heading(key.removesuffix(suffix))} ({unit})"
  for suffix in ("_s", "_bytes"):
    key = key.removesuffix(suffix)
  return key.removeprefix("num_").replace("_", " ")


def find(row: Mapping[str, Any], key: str) -> Any:
  """Returns the value of a key; an unknown "a.b" is item b of the mapping a.

  Raises:
    KeyError: The row has no such key or item.
  """
  if key in row or "." not in key:
    return row[key]
  first, _, rest = key.partition(".")
  return find(row[first], rest)


def text(value: Any, key: str = "") -> str:
  """Returns the text of a value, in the unit that its key names.

  Args:
    value: Plain data: None is "-", booleans are "yes" and "no", items of lists
      and mappings are separated by commas.
    key: Key of the value: "..._s" is a time in seconds, "...bytes" a size
      (in powers of 1000, "...size_bytes" in powers of 1024); a key with the
      word share, fraction or utilisation is shown in percent.
  """
  if value is None:
    return "-"
  if isinstance(value, bool):
    return "yes" if value else "no"
  if isinstance(value, Mapping):
    # Names of items may have units, too.
    return ", ".join(
      f"{heading(str(k))} {text(x, f'{key} {k}')}" for k, x in value.items()
    )
  if isinstance(value, list | tuple):
    return ", ".join(text(x, key) for x in value)
  if not isinstance(value, int | float):
    return str(value)
  if key.endswith("size_bytes"):
    return size_text(int(value))
  if key.endswith("bytes"):
    return _scaled(value, _BYTES)
  if key.endswith("_s") and not any(map(key.endswith, _UNITS)):
    return _scaled(value, _SECONDS)
  if _FRACTIONS & set(key.replace(" ", "_").split("_")):
    return f"{value:.1%}"
  return number(value)


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
  """Formats a number in the largest unit that does not exceed it."""
  if not value:
    return "0"
  size, unit = next((u for u in units if abs(value) >= u[0]), units[-1])
  return f"{number(value / size)} {unit}"


def number(value: float) -> str:
  """Formats a number: integers whole, others with four significant digits.

  Example:
    >>> number(12_345), number(0.123456), number(12_345.678), number(2e10)
    ('12,345', '0.1235', '12,346', '2e+10')
  """
  # From 9999.5 on, four digits would be rounded to 1e+04.
  if isinstance(value, int) or 9999.5 <= abs(value) < 1e10:
    return f"{value:,.0f}"
  return f"{value:,.4g}"


def size_text(size_bytes: int) -> str:
  """Formats a size in powers of 1024: 65536 is "64 KiB"."""
  for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
    if size_bytes >= unit:
      return f"{size_bytes / unit:g} {name}"
  return f"{size_bytes} B"


def facts(values: Mapping[str, Any]) -> str:
  """Returns a line for each value: its heading and its text."""
  return "\n".join(f"{heading(k)}: {text(x, k)}" for k, x in values.items())
