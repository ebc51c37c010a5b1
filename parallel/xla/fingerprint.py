"""Fingerprints of lowered programs, which show whether a result is stale.

A result that was read from a lowered or compiled program carries the program's
fingerprint: a hash of its StableHLO, and the versions of the packages that
lower and compile it. Lowering the program again takes seconds and shows whether
it has changed since. Names of the module and of its private functions, which
jax takes from the names of Python functions, do not enter the hash, so renaming
a jitted function leaves the fingerprint unchanged.
"""

from collections.abc import Callable
import hashlib
import importlib.metadata
import re

import jax

# What lowers, and what compiles for each platform.
_PACKAGES = ("jax", "jaxlib")
_COMPILERS = {"tpu": "libtpu", "gpu": "jax-cuda12-plugin"}

# The module's own name, and those of functions that only the module calls.
_DEFINITION = re.compile(
  r"^\s*(?:module|func\.func private) (@[\w.$-]+|@\"[^\"]*\")", re.MULTILINE
)
# Symbols inside string attributes are no symbols.
_STRING_OR_SYMBOL = re.compile(r'@"[^"]*"|"(?:[^"\\]|\\.)*"|@[\w.$-]+')


def lowered_without_locations(
  lower: Callable[[], jax.stages.Lowered],
) -> jax.stages.Lowered:
  """Lowers a program without the places in the source that it comes from.

  Kernels of Pallas are bytecode in the program's text. It has the file and line
  of every operation, so that a comment would change the fingerprint.

  Args:
    lower: Lowers what this process has not lowered before: parts that jax has
      in a cache keep their locations.
  """
  before = jax.config.jax_traceback_in_locations_limit
  jax.config.update("jax_traceback_in_locations_limit", 0)
  try:
    return lower()
  finally:
    jax.config.update("jax_traceback_in_locations_limit", before)


def fingerprint(lowered: jax.stages.Lowered) -> str:
  """Returns a hash of the StableHLO of `lowered_without_locations`."""
  return hashlib.sha256(without_names(lowered.as_text()).encode()).hexdigest()


def without_names(text: str) -> str:
  """Replaces the names of a module and of its private functions by numbers.

  Args:
    text: StableHLO, as `jax.stages.Lowered.as_text` returns it.

  Returns:
    The text with ``@0``, ``@1``, ... in the order of first use. The names of
    public functions and of custom calls are kept: they have a meaning outside
    the program.
  """
  private = set(_DEFINITION.findall(text))
  numbers: dict[str, str] = {}

  def renamed(match: re.Match[str]) -> str:
    token = match[0]
    if token not in private:  # a string, a public name or a custom call
      return token
    return numbers.setdefault(token, f"@{len(numbers)}")

  return _STRING_OR_SYMBOL.sub(renamed, text)


def versions(platform: str) -> dict[str, str]:
  """Returns the versions of the packages that make a program for a platform.

  Args:
    platform: "cpu", "gpu" or "tpu".
  """
  packages = [*_PACKAGES]
  if platform in _COMPILERS:
    packages.append(_COMPILERS[platform])
  return {name: importlib.metadata.version(name) for name in packages}
