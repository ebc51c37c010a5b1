"""Fingerprints of lowered programs, for the detection of stale results.

A result derived from a lowered or compiled program is stored with the program's
fingerprint: a hash of its StableHLO, and the versions of the packages that
lower and compile it. Lowering the program again takes seconds and detects
changes. The names of the module and of its private functions, which jax derives
from the names of Python functions, are excluded from the hash, so that renaming
a jitted function does not change the fingerprint.
"""

from collections.abc import Callable
import hashlib
import importlib.metadata
import re

import jax

# Packages that lower, and the package that compiles for each platform.
_PACKAGES = ("jax", "jaxlib")
_COMPILERS = {"tpu": "libtpu", "gpu": "jax-cuda12-plugin"}

# Name of the module, and names of its private functions.
_DEFINITION = re.compile(
  r"^\s*(?:module|func\.func private) (@[\w.$-]+|@\"[^\"]*\")", re.MULTILINE
)
# Strings are matched first, so that text like "@f" inside one is not a symbol.
_STRING_OR_SYMBOL = re.compile(r'@"[^"]*"|"(?:[^"\\]|\\.)*"|@[\w.$-]+')


def lowered_without_locations(
  lower: Callable[[], jax.stages.Lowered],
) -> jax.stages.Lowered:
  """Lowers a program without source locations.

  Pallas kernels are serialised as bytecode that includes the file and line of
  every operation; with locations, adding a comment to the source would change
  the fingerprint.

  Args:
    lower: Function that lowers the program. The process must not have lowered
      it before: functions in jax's tracing cache keep their locations.
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
    The text with ``@0``, ``@1``, ... in the order of first use. Names of public
    functions and of custom calls are kept, since they refer to definitions
    outside the program.

  Example:
    >>> without_names("module @jit_step {\\n  func.func public @main() {")
    'module @0 {\\n  func.func public @main() {'
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
  """Returns the versions of the packages that lower and compile for a platform.

  Args:
    platform: "cpu", "gpu" or "tpu".

  Raises:
    importlib.metadata.PackageNotFoundError: A package is not installed.
  """
  packages = [*_PACKAGES]
  if platform in _COMPILERS:
    packages.append(_COMPILERS[platform])
  return {name: importlib.metadata.version(name) for name in packages}
