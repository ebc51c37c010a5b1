"""Swarm with faults: it continues after each, and deviations are errors."""

import itertools
import time

import pytest
from rich import progress

from caatnet.benchmarks.elastic import churn_peer, churn_run
from configs.elastic import churn as config_of
from tests.caatnet.benchmarks.each_event import SMALL, EachEvent

KINDS = (
  "ahead", "bits", "cut", "back", "stop, long", "coordinator", "last holder",
)


class Churn(EachEvent, churn_run.Churn):
  """Injects one event of each kind, in any phase, then ends."""

  all_kinds = KINDS


@pytest.fixture
def churn(tmp_path):
  config = config_of.get_config("test")
  config.benchmark.update(SMALL)
  made = Churn(tmp_path, config, seed=0)
  yield made
  made.end()


def test_swarm_continues_after_all_events_with_equal_workers(churn):
  start = time.time()
  with progress.Progress(transient=True) as bar:
    found = churn.run(bar)
  assert churn.done == churn.goal >= len(KINDS)
  assert {kind for kind, _ in found["events"]} >= {*KINDS}
  assert {when for _, when in found["events"]} <= set(churn_run.PHASE_COLUMNS)
  assert found["refused"] >= 1
  assert found["rounds"] == churn.newest_revision
  assert not churn._live_workers()
  # The newest run begins with the checkpoint, in a later epoch of its own.
  assert min(churn._seen) > churn._least > 0
  assert found["epochs"] >= 1
  lengths = [seconds for seconds, _ in found["pauses"]]
  assert lengths == sorted(lengths, reverse=True)
  assert lengths[0] == pytest.approx(found["longest_s"])
  assert lengths[0] < time.time() - start
  # What the coordinator has printed in the longest of them.
  assert found["said"]
  assert found["said"] == churn._coordinator.lines(*churn._longest_gaps()[0])
  # Each worker contributes two samples to a round.
  lines = [churn._seen[revision] for revision in sorted(churn._seen)]
  assert lines[-1]["samples"] == found["samples"]
  for before, after in itertools.pairwise(lines):
    rounds = after["revision"] - before["revision"]
    new = after["samples"] - before["samples"]
    assert 2 * rounds <= new <= 2 * rounds * len(churn._workers)
  assert found["loss"] == lines[-1]["loss"]
  assert 0.5 < found["calm_loss"] < 1
  # Without events, three workers make two steps with twelve samples.
  state, theta = churn_peer.initial_state(100), 0
  for first in (0, 6):
    mean = churn_peer.gradient(state["theta"] + theta, ((first, first + 6),))
    theta = theta - churn_peer.LEARNING_RATE * mean
  assert (
    churn._loss_without_events(12)
    == churn._loss_without_events(17)
    == churn_peer.loss(theta)
  )


def test_deviations_of_workers_are_errors(churn):
  start = time.monotonic()
  churn._pause(0.05)
  assert time.monotonic() > start + 0.05
  line = {"revision": 3, "digest": "a", "samples": 6, "loss": 0.75}
  for text in (line, line, line | {"revision": 4}, {"dropped": ["x", "y"]}):
    churn._compare(dict(text))
    churn._raise_on_failure()
  assert churn.newest_revision == 4
  assert churn._dropped == ["x", "y"]
  assert len(churn._commits) == 2
  assert (churn.goal, churn.done) == (100, 0)
  churn._options.minutes, churn._begun = 2.0, time.monotonic() - 5
  assert churn.goal == 120
  churn._options.minutes = 1.0
  assert churn.goal == 60  # not the number of events
  assert 5 <= churn.done < 60
  # A bit flipped after the digest was computed may change the loss.
  churn._compare(line | {"loss": 0.750000001})
  churn._raise_on_failure()
  churn._compare(line | {"digest": "b"})
  with pytest.raises(RuntimeError, match=r"workers differ: .*'b'.* and .*'a'"):
    churn._raise_on_failure()
  churn._problem, churn._least = "", 4
  churn._compare(line | {"revision": 5})
  churn._raise_on_failure()
  churn._compare(line | {"revision": 4})
  with pytest.raises(RuntimeError, match="rounds up to 4 are lost"):
    churn._raise_on_failure()
  churn._problem = ""
  churn._commits[-1] -= churn._options.limit_s + 1
  with pytest.raises(RuntimeError, match=r"no round for 6[12] s after \[\]"):
    churn._raise_on_failure()
