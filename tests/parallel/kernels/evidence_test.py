"""Measured steps decide between a kernel and the reference."""

import pytest

from parallel.kernels import evidence


@pytest.mark.quick
def test_nearest_measured_share_decides_between_kernel_and_reference(
  monkeypatch
):
  """p = 1 has other operands, so it is never near another p."""
  monkeypatch.setitem(
    evidence.STEP_WITH_KERNEL, ("chip", "op"),
    {1.0: 1.2, 0.5: 0.9, 0.125: 1.1, 0.25: 1.0},
  )
  for p, found in (
    (1.0, False), (0.99, True), (0.5, True), (0.4, True), (0.35, False),
    (0.25, False), (0.1, False),
  ):
    assert evidence.is_step_faster("chip", "op", p) == found
  monkeypatch.setitem(evidence.STEP_WITH_KERNEL, ("chip", "op"), {0.5: 1.2})
  assert evidence.is_step_faster("chip", "op", 1.0)
  assert not evidence.is_step_faster("chip", "op", 0.1)
  assert evidence.is_step_faster("other chip", "op", 0.5)
  assert evidence.is_step_faster("chip", "other op", 0.5)
