"""Kernels to test, and tolerances of comparisons with their references."""

import jax
import numpy as np

# Kernels of this platform: interpreted on CPUs, compiled on GPUs and TPUs.
KERNELS = {
  "cpu": ("tpu_interpret", "gpu_interpret"), "gpu": ("gpu",), "tpu": ("tpu",),
}[jax.default_backend()]


def assert_close(ours, theirs, dtype, rounds=1):
  """Asserts equality up to a few ulps of the largest entries."""
  for a, b in zip(
    jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True
  ):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    if a.size:
      a, b = np.asarray(a, "f8"), np.asarray(b, "f8")
      unit = rounds * (2.0**-8 if dtype == "bfloat16" else 2.0**-20)
      largest = np.abs(b[np.isfinite(b)]).max(initial=1.0)
      np.testing.assert_allclose(a, b, rtol=unit, atol=unit * largest)
