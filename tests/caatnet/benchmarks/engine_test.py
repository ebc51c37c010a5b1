"""Benchmark of the serving engine."""

import numpy as np

from caatnet.benchmarks.serving import engine


def test_only_decode_steps_are_timed():
  """A step that reads prompts still runs when the first one is submitted."""
  marks = [(0.0, 0.0), (85.0, 150.0), (105.0, 190.0), (125.0, 230.0)]
  np.testing.assert_allclose(engine._per_step(marks), (20, 40))
