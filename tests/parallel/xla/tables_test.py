"""Tables of dtypes and devices, compared with independent sources."""

import jax.numpy as jnp
import ml_dtypes

from parallel.xla import hlo, targets


def bits_of(dtype):
  """Bits per element in numpy or ml_dtypes; None if neither has the dtype."""
  if dtype == "bool":
    return 8
  for known in (jnp.finfo, jnp.iinfo, ml_dtypes.finfo, ml_dtypes.iinfo):
    try:
      return known(dtype).bits
    except (ValueError, TypeError):
      continue
  return None


def test_bits_equal_those_of_the_dtypes():
  found = {dtype: bits for dtype, bits in hlo._DTYPES.values()}
  known = {dtype: bits_of(dtype) for dtype in found}
  # Some have other names (c64 has two floats), others do not exist in numpy.
  compared = {
    dtype for dtype, bits in known.items()
    if bits is not None and not dtype.startswith("complex")
  }
  assert {"bfloat16", "float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn",
          "int4", "uint2", "int64", "float32", "bool"} <= compared
  assert {d: found[d] for d in compared} == {d: known[d] for d in compared}
  assert (found["complex64"], found["complex128"]) == (64, 128)


def test_block_shared_memory_is_one_kib_below_the_device_s():
  """CUDA C++ Programming Guide, "Technical Specifications": 164 and 228 KiB."""
  shared = {(8, 0): 164, (9, 0): 228, (10, 0): 228}
  for gpu in targets._GPUS.values():
    kib = shared[gpu["major"], gpu["minor"]]
    assert gpu["shared"] == kib * 1024
    assert gpu["optin"] == (kib - 1) * 1024
    assert gpu["l2"] % 2**20 == 0
