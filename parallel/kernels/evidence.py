"""Effect of norm kernels on a model's step time, for the preference "auto".

A kernel moves fewer bytes than the reference compiled by XLA. In a model,
however, it may prevent fusions into adjacent matrix products: casts, slices and
scales of its operands become separate passes over memory. The step of a whole
model is therefore compiled with and without the kernel, and the roofline times
of both programs are compared, with transfers overlapped as scheduled.
"""

from collections.abc import Mapping

# (jax's device kind, op) -> fraction p of shared channels -> step time with the
# kernel, divided by the step time without it.
# table: kernels
STEP_WITH_KERNEL: dict[tuple[str, str], Mapping[float, float]] = {
  ("TPU v5", "add_norm"): {1.0: 1.043, 0.5: 1.033, 0.25: 1.046},
  ("TPU v6 lite", "add_norm"): {1.0: 1.042, 0.5: 1.025},
  ("TPU v5 lite", "add_norm"): {1.0: 1.04, 0.5: 1.005},
}
# end of table


def is_step_faster(device_kind: str, op: str, p: float) -> bool:
  """Returns whether a model's step is faster with an op's kernel.

  For p = 1 there are no private channels and kernels have other operands, so
  p = 1 uses only measurements of p = 1; other p use the nearest measured p < 1.
  The result is True for devices without measurements.

  Args:
    device_kind: ``jax.Device.device_kind``.
    op: Name of a folder in ``parallel/kernels/``.
    p: Fraction of the channels that tensor ranks share, in (0, 1].

  Example:
    >>> [is_step_faster(tpu, "add_norm", p=0.5) for tpu in ("TPU v5", "TPU v4")]
    [False, True]
  """
  steps = STEP_WITH_KERNEL.get((device_kind, op), {})
  alike = [q for q in steps if (q == 1.0) == (p == 1.0)]
  if not alike:
    return True
  return steps[min(alike, key=lambda q: abs(q - p))] < 1.0
