"""Recorded results of GPU programs compared with the current programs."""

import pytest

pytest.importorskip(
  "jax_cuda12_plugin", reason="the cuda extra is not installed"
)

from tests import recorded


def test_recorded_kernels_match_the_current_ones():
  recorded.check_kernels("kernels_bytes_h200.json", "gpu")
