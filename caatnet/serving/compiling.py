"""Loops over numpy arrays, compiled by numba of the extra `serve`.

Where numba is not installed, or ``NUMBA_DISABLE_JIT=1``, the same functions run
as plain Python on the same arrays.
"""

from collections.abc import Callable

try:
  import numba
except ImportError:  # not installed, or not for this version of numpy
  numba = None

COMPILES = numba is not None and not numba.config.DISABLE_JIT


def compiled(*signature: str) -> Callable[[Callable], Callable]:
  """Returns a decorator that compiles a function with numba if there is one.

  Args:
    *signature: The types of the arguments, ``"(int32[::1], int64)"``, so that
      the function is compiled, or read from numba's cache, when it is defined;
      none for functions that are called by compiled ones only.
  """
  if not COMPILES:
    return lambda function: function

  def make(function: Callable) -> Callable:
    try:
      return numba.njit(*signature, cache=bool(signature))(function)
    except (RuntimeError, OSError, EOFError):  # no folder to write, or damaged
      return numba.njit(*signature)(function)
  return make
