"""What tells whether a result still is one of the program that we would run.

A result that was read off a lowered or compiled program carries the program's
fingerprint: a hash of its StableHLO, and the versions of what lowers and
compiles it. Lowering again, which takes seconds, shows whether it is stale.
"""

from collections.abc import Callable
import hashlib
import importlib.metadata

import jax

# What lowers, and what compiles for each platform.
_PACKAGES = ("jax", "jaxlib")
_COMPILERS = {"tpu": "libtpu", "gpu": "jax-cuda12-plugin"}


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
  return hashlib.sha256(lowered.as_text().encode()).hexdigest()


def versions(platform: str) -> dict[str, str]:
  """Returns the versions of the packages that make a program for a platform.

  Args:
    platform: "cpu", "gpu" or "tpu".
  """
  packages = [*_PACKAGES]
  if platform in _COMPILERS:
    packages.append(_COMPILERS[platform])
  return {name: importlib.metadata.version(name) for name in packages}
