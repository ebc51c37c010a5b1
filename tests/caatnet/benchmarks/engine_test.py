"""The engine's benchmark."""

import numpy as np

from caatnet.benchmarks.serving import engine


def test_only_steps_of_answers_are_timed():
  """While the first of them is submitted a step that reads prompts runs."""
  marks = [(0.0, 0.0), (85.0, 150.0), (105.0, 190.0), (125.0, 230.0)]
  np.testing.assert_allclose(engine._per_step(marks), (20, 40))
