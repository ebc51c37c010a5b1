"""Compilation of numpy loops by numba, from the optional extra `serve`.

Where numba is not installed, or the environment variable ``NUMBA_DISABLE_JIT``
or the one named by `INTERPRET_VARIABLE` is 1, the functions run as plain Python
on the same arrays.
"""

from collections.abc import Callable
import os

# Environment variable for commands that run few steps: loading the compiled
# loops takes 0.3 s, but plain Python makes a step only 0.3 ms slower.
INTERPRET_VARIABLE = "CAATNET_INTERPRET_SCHEDULER"

try:
  # numba is not imported if nothing is compiled: the import takes 0.2 s.
  if {
    os.environ.get(INTERPRET_VARIABLE), os.environ.get("NUMBA_DISABLE_JIT")
  } & {"1"}:
    numba = None
  else:
    import numba
except ImportError:  # not installed, or not for this version of numpy
  numba = None

COMPILES = numba is not None and not numba.config.DISABLE_JIT


def compiled(*signature: str) -> Callable[[Callable], Callable]:
  """Returns a decorator that compiles a function with numba if available.

  Args:
    *signature: Types of the arguments, for example ``"(int32[::1], int64)"``,
      so that the function is compiled, or read from numba's cache, when it is
      defined; none for a function that only compiled functions call.
  """
  if not COMPILES:
    return lambda function: function

  def make(function: Callable) -> Callable:
    try:
      return numba.njit(*signature, cache=bool(signature))(function)
    except (RuntimeError, OSError, EOFError):  # cache not writable, or damaged
      return numba.njit(*signature)(function)
  return make
