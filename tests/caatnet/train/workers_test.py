"""Properties of the notices and metrics of diverged workers."""

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
  assert all("worker 1 has diverged, loss nan;" in text for text in said)
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


def test_notice_of_an_excluded_worker_lists_eight_others():
  norms = [float(i) for i in range(12, 0, -1)]
  (said,) = WorkerMetrics({
    "loss": np.zeros(12), "delta_norm": np.array(norms),
    "left_out": np.arange(12.0), "just_left_out": np.eye(12)[3],
  }).notices(1, set())
  assert "difference 9 (others 1, 2, 3, 4, 5, 6, 7, 8), 3 so far" in said
  assert not list(WorkerMetrics({"loss": np.zeros(3)}).notices(1, set()))


def test_metrics_of_outer_loops_are_recorded_but_not_averaged():
  found = WorkerMetrics({
    "loss": np.array([1.0, np.inf]), "delta_norm": np.array([2.0, np.nan]),
    "left_out": np.array([0.0, 1.0]), "just_left_out": np.array([0.0, 1.0]),
    "grad_norm": np.array([3.0, 4.0]),
  })
  assert found.finite.tolist() == [True, False]
  assert found.means == {"loss": 1.0, "grad_norm": 3.0}
  assert found.of_workers == {
    "loss/worker_0": 1.0, "loss/worker_1": None, "delta_norm/worker_0": 2.0,
    "delta_norm/worker_1": None, "left_out/worker_0": 0.0,
    "left_out/worker_1": 1.0,
  }
  lost = WorkerMetrics({"loss": np.full(2, np.nan), "left_out": np.zeros(2)})
  assert np.isnan(lost.means["loss"])
  assert lost.names() == " (worker 0, 1 of 2)"
