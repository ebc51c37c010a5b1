"""Headings and texts of values, derived from their keys, which name units.

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
  """Returns a key in words, with its unit unless it is seconds or bytes."""
  for suffix, unit in _UNITS.items():
    if key.endswith(suffix):
      return f"{heading(key.removesuffix(suffix))} ({unit})"
  for suffix in ("_s", "_bytes"):
    key = key.removesuffix(suffix)
  return key.removeprefix("num_").replace("_", " ")


def find(row: Mapping[str, Any], key: str) -> Any:
  """Returns row[key]; for "a.b", if it is no key itself, row["a"]["b"].

  Raises:
    KeyError: The row has no such key or item.
  """
  if key in row or "." not in key:
    return row[key]
  first, _, rest = key.partition(".")
  return find(row[first], rest)


def text(value: Any, key: str = "") -> str:
  """Formats a value in the unit that its key names.

  Args:
    value: Plain data. None is formatted as "-", booleans as "yes" and "no";
      items of lists and mappings are separated by commas.
    key: Key of the value. "..._s" is a time in seconds, "...bytes" a size,
      formatted in powers of 1000 ("...size_bytes" in powers of 1024). If the
      key has the word share, fraction or utilisation, the value is formatted
      in percent.
  """
  if value is None:
    return "-"
  if isinstance(value, bool):
    return "yes" if value else "no"
  if isinstance(value, Mapping):
    # Keys of items may name units, too.
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
    return _format_scaled(value, _BYTES)
  if key.endswith("_s") and not any(map(key.endswith, _UNITS)):
    return _format_scaled(value, _SECONDS)
  if _FRACTIONS & set(key.replace(" ", "_").split("_")):
    return f"{value:.1%}"
  return format_number(value)


def _format_scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
  """Formats a number in the largest unit that does not exceed it."""
  if not value:
    return "0"
  size, unit = next((u for u in units if abs(value) >= u[0]), units[-1])
  return f"{format_number(value / size)} {unit}"


def format_number(value: float) -> str:
  """Formats a number: integers whole, others with four significant digits.

  Example:
    >>> [format_number(x) for x in (12_345, 0.123456, 12_345.678, 2e10)]
    ['12,345', '0.1235', '12,346', '2e+10']
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


def format_items(values: Mapping[str, Any]) -> str:
  """Returns one line of text for each value: its heading and the value."""
  return "\n".join(f"{heading(k)}: {text(x, k)}" for k, x in values.items())
