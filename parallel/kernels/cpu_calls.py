"""Kernels of XLA:CPU programs, compiled by numba from the extra `serve`.

A kernel is a `numba.cfunc` that decodes the call frame of XLA's foreign
function interface, by the functions of this module, and loops over the arrays.
`call` divides the kernel's tasks into pieces, each of which is a separate
custom call. XLA:CPU executes these calls concurrently in its thread pool, so no
second thread pool competes for the cores.

Source: the offsets are those of the structs in xla/ffi/api/c_api.h, which
jaxlib contains, on machines with pointers of 8 bytes.
"""

from collections.abc import Callable
import ctypes
import itertools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numba
from numba import types
from numba.extending import intrinsic

from parallel.kernels import calls

# Type of a kernel: from the address of a call frame to 0, for success.
_KERNEL_SIGNATURE = "int64(int64)"

# Pieces per core. On two cores, XLA:CPU executes 8 calls one after another but
# divides 16 calls between its threads.
_PIECES = 8

# Decorator of loops: numba may reorder sums, but must keep NaN, by which a
# server detects a diverged request.
compile_loop = numba.njit(
  fastmath={"reassoc", "contract", "nsz", "arcp"}, error_model="numpy",
  inline="never",
)


@intrinsic
def _pointer(context, address, dtype):
  """Casts an address to a pointer to elements of a dtype."""
  del context

  def generate(context, builder, signature, values):
    kind = context.get_value_type(signature.return_type)
    return builder.inttoptr(values[0], kind)

  return types.CPointer(dtype.dtype)(address, dtype), generate


@numba.njit
def _word(address):
  """Returns the integer of 8 bytes at an address."""
  return numba.carray(_pointer(address, numba.int64), (1,))[0]


@numba.njit
def answer_version_query(frame):
  """Answers a call that only requests the version of the interface.

  Args:
    frame: Address of the call frame.

  Returns:
    Whether this is such a call, so that the kernel must compute nothing.
  """
  extension = _word(frame + 8)
  # Only the extension XLA_FFI_Extension_Metadata = 1 requests the version.
  if extension == 0 or _word(extension + 8) & 0xFFFFFFFF != 1:
    return False
  # XLA_FFI_Metadata.api_version: four bytes of the major version, four of the
  # minor one. The offsets above are valid for major version 0; XLA refuses the
  # kernel if its own differs. The minor version is copied from XLA_FFI_Api.
  api, metadata = _word(frame + 16), _word(extension + 24)
  numba.carray(_pointer(metadata + 24, numba.int64), (1,))[0] = (
    _word(api + 32) >> 32 << 32
  )
  return True


@numba.njit
def operands_address(frame):
  """Returns the address of the operands of a call frame."""
  return _word(frame + 72)


@numba.njit
def results_address(frame):
  """Returns the address of the results of a call frame."""
  return _word(frame + 112)


@numba.njit
def dim(buffers, number, last):
  """Returns the size of dim ``-last`` of an array; arguments as in `array`."""
  buffer = _word(buffers + 8 * number)
  rank = _word(buffer + 32)
  return _word(_word(buffer + 40) + 8 * (rank - last))


@numba.njit
def leading_size(buffers, number, last):
  """Returns the product of all dims of an array but the last ``last`` ones."""
  product, rank = 1, _word(_word(buffers + 8 * number) + 32)
  for i in range(last + 1, rank + 1):
    product *= dim(buffers, number, i)
  return product


@numba.njit
def array(buffers, number, dtype, shape):
  """Returns an operand or result as an array.

  Args:
    buffers: Address that `operands_address` or `results_address` returns.
    number: Index of the operand or result.
    dtype: numba's dtype of its elements.
    shape: Shape of the array.
  """
  data = _word(_word(buffers + 8 * number) + 24)
  return numba.carray(_pointer(data, dtype), shape)


def register_kernel(name: str, function: Callable[[Any], Any]) -> str:
  """Compiles a kernel, registers it for `call`, and returns its name.

  numba's cache does not detect changes in other files than the kernel's own.
  """
  try:
    kernel = numba.cfunc(_KERNEL_SIGNATURE, cache=True)(function)
  except (RuntimeError, OSError, EOFError):  # cache not writable, or damaged
    kernel = numba.cfunc(_KERNEL_SIGNATURE)(function)
  address = ctypes.cast(kernel.address, ctypes.c_void_p)
  jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform="cpu")
  return name


def num_cores() -> int:
  """Returns the number of threads of XLA:CPU's pool."""
  if nproc := os.environ.get("NPROC"):
    return int(nproc)
  if hasattr(os, "sched_getaffinity"):  # Linux
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def call(
  name: str, num_tasks: int, shape: tuple[int, ...], *operands: jax.Array,
  vmap_method: str = "broadcast_all",
) -> jax.Array:
  """Calls a kernel once for each piece of its tasks.

  Args:
    name: Name of the kernel.
    num_tasks: Number of tasks.
    shape: Shape of a task's result.
    *operands: Operands of the kernel, which also receives the number of the
      first task of its piece, int32 ``[1]``, before them.
    vmap_method: Argument of `jax.ffi.ffi_call`; "sequential" for a kernel that
      does not support operands with leading batch dims.

  Returns:
    The results, float32 ``[num_tasks, *shape]``.
  """
  pieces = min(num_tasks, _PIECES * num_cores())
  bounds = [num_tasks * i // pieces for i in range(pieces + 1)]

  def run(*operands):
    return jnp.concatenate([
      jax.ffi.ffi_call(
        name, jax.ShapeDtypeStruct((stop - start, *shape), jnp.float32),
        vmap_method=vmap_method,
      )(jnp.array([start], jnp.int32), *operands)
      for start, stop in itertools.pairwise(bounds)
    ])

  return calls.call_unchecked(run, *operands)
