"""Which loops of the scheduler numba compiles, of the extra `serve`."""

from collections.abc import Callable
import importlib
from typing import Any

from caatnet.checks import one_of

# In Python, compiled by numba, or the latter where it is installed.
IMPLEMENTATIONS = ("auto", "reference", "compiled")


def choose(implementation: str) -> str:
  """Returns "reference" or "compiled" for one of `IMPLEMENTATIONS`.

  Raises:
    ValueError: It is none of them, or numba is asked for and not there.
  """
  one_of("implementation", implementation, IMPLEMENTATIONS)
  if implementation == "reference":
    return implementation
  try:
    importlib.import_module("numba")
  except ImportError as error:  # it is not there, or not for this numpy
    if implementation == "auto":
      return "reference"
    raise ValueError(
      "implementation='compiled' needs numba: pip install "
      f"\"caatnet[serve]\" ({error})"
    ) from error
  return "compiled"


def compiled(*signature: Any) -> Callable[[Callable], Callable]:
  """Returns what compiles a function with numba, and keeps that if it can.

  Args:
    *signature: Of what types it is called, so that it is compiled when it is
      defined and no step waits for that; none for what those call, which is
      kept with them.
  """
  import numba

  def make(function: Callable) -> Callable:
    try:
      return numba.njit(*signature, cache=bool(signature))(function)
    except (RuntimeError, OSError, EOFError):  # nothing can be kept, or read
      return numba.njit(*signature)(function)
  return make
