"""Properties of the notices about diverged workers."""

import numpy as np

from caatnet.train.workers import WorkerMetrics


def metrics(losses, **told):
  return WorkerMetrics({
    key: np.asarray(value, float) for key, value in
    {"loss": losses, **told}.items()
  })


def test_worker_that_diverges_again_is_named_again():
  known, said = set(), []
  losses = ([1, 2], [1, np.nan], [1, np.inf], [1, 2], [1, np.nan])
  for step, values in enumerate(losses, 1):
    said += metrics(values).notices(step, known)
  assert [text.split(":")[0] for text in said] == ["step 2", "step 5"]
  assert all("worker 1 has diverged" in text for text in said)
  assert known == {1}


def test_excluded_worker_is_compared_with_the_others():
  (said,) = metrics(
    [1, 2, 3], delta_norm=[4, 99, 2], left_out=[0, 3, 5],
    just_left_out=[0, 1, 0],
  ).notices(7, set())
  assert "step 7: worker 1 left out" in said
  assert "difference 99 (others 2, 4), 3 so far" in said


def test_means_are_over_healthy_workers_if_others_are_excluded():
  sick = metrics([1, np.nan, 3], left_out=[0, 0, 0])
  assert sick.means == {"loss": 2.0}
  assert sick.of_workers["loss/worker_1"] is None
  assert sick.names() == " (worker 1 of 3)"
  assert np.isnan(metrics([1, np.nan, 3]).means["loss"])
  assert metrics([np.nan]).names() == ""
  assert metrics([1]).of_workers == {}
