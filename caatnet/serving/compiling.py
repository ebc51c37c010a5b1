"""Which loops of the scheduler numba compiles, of the extra `serve`."""

from collections.abc import Callable
import importlib.util
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
  there = importlib.util.find_spec("numba") is not None
  if implementation == "auto":
    return "compiled" if there else "reference"
  if implementation == "compiled" and not there:
    raise ValueError(
      "implementation='compiled' needs numba: pip install \"caatnet[serve]\""
    )
  return implementation


def compiled(*signature: Any) -> Callable[[Callable], Callable]:
  """Returns what compiles a function with numba, and keeps that if it can.

  Args:
    *signature: Of what types it is called, so that it is compiled when it is
      defined and no step waits for that; none for what those call.
  """
  import numba

  def make(function: Callable) -> Callable:
    try:
      return numba.njit(*signature, cache=True)(function)
    except RuntimeError:  # no folder can be written to
      return numba.njit(*signature)(function)
  return make
