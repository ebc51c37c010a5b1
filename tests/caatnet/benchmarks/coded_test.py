"""Benchmark of coded weights and caches: its limits."""

import types

import pytest

from caatnet.benchmarks.serving import coded


def test_runs_with_data_ranks_are_refused():
  layout = types.SimpleNamespace(num_data_ranks=2)
  made = types.SimpleNamespace(
    program=types.SimpleNamespace(layout=layout), capacity=None
  )
  with pytest.raises(ValueError, match=r"parallel\.data of the run must be 1"):
    coded._loss(made, None, None)
