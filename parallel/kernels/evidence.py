"""Where a norm's kernel makes a whole model's step faster: "auto" reads this.

A kernel moves fewer bytes than XLA's program of its reference, but in a model
it may take from XLA what would be fused into the products beside it: casts,
slices and scales of its operands become passes of their own. So what decides
is the step of a model that is compiled with the kernel and without, and its
bound by the roofline, with transfers overlapped as scheduled.
"""

from collections.abc import Mapping

# Kind of device, as jax names it, and op -> p -> how many times as long the
# step is with the kernel.
# table: kernels
STEP_WITH_KERNEL: dict[tuple[str, str], Mapping[float, float]] = {
  ("TPU v5", "add_norm"): {1.0: 1.043, 0.5: 1.033, 0.25: 1.046},
  ("TPU v6 lite", "add_norm"): {1.0: 1.042, 0.5: 1.025},
  ("TPU v5 lite", "add_norm"): {1.0: 1.04, 0.5: 1.005},
}
# end of table


def helps(device_kind: str, op: str, p: float) -> bool:
  """Returns whether a model's step is faster with an op's kernel.

  With p = 1 there are no private channels, and kernels see other operands; so
  that case stands for itself only, and any other p for those near it. Devices
  without evidence take the kernel.

  Args:
    device_kind: ``jax.Device.device_kind``.
    op: A folder of ``parallel/kernels/``.
    p: The fraction of the channels that tensor ranks share.
  """
  steps = STEP_WITH_KERNEL.get((device_kind, op), {})
  alike = [q for q in steps if (q == 1.0) == (p == 1.0)]
  if not alike:
    return True
  return steps[min(alike, key=lambda q: abs(q - p))] < 1.0
