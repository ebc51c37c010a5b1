"""Swarm in namespaces: it continues while workers cannot reach each other."""

import pytest
from rich import progress

from caatnet.benchmarks.elastic import churn_network
from configs.elastic import churn as config_of
from tests import unavailable
from tests.caatnet.benchmarks.each_event import SMALL, EachEvent

KINDS = tuple(churn_network.REACHABILITY_EVENTS)


class Network(EachEvent, churn_network.Network):
  """Injects one event of each kind, in any phase, then ends."""

  all_kinds = KINDS

  def __init__(self, *arguments, **options):
    self.dropped = {}  # kind -> (node, (source, target) links)
    super().__init__(*arguments, **options)

  def _cause(self, kind, rng):
    before = dict(self._dropped_for)
    super()._cause(kind, rng)
    for node, links in dict(self._dropped_for).items():
      if before.get(node) is not links and self._events[-1][1] == kind:
        self.dropped[kind] = node, links

  def _happen(self, rng):
    # An event follows a round that was committed after the event before it.
    assert self._commits[-1] > self._caused
    super()._happen(rng)


@pytest.fixture
def network(tmp_path):
  """Skips the test if this user cannot create namespaces."""
  config = config_of.get_config("test")
  config.benchmark.update(
    SMALL | {"rtt_ms": (1.0, 20.0), "lasts_s": (0.5, 1.0)}
  )
  with unavailable.skips():
    made = Network(tmp_path, config, seed=0)
  yield made
  made.end()


def test_swarm_continues_after_all_disturbances(network):
  with progress.Progress(transient=True) as bar:
    found = network.run(bar)
  assert {kind for kind, _ in found["events"]} >= {*KINDS}
  assert found["rounds"] == network.newest_revision
  assert {*network.dropped} == {*KINDS} - {"loopback"}
  for kind, (node, links) in network.dropped.items():
    assert node > 0  # not the coordinator
    ends = [source if kind in ("one way", "no dials") else target
            for source, target in links]
    assert {*ends} == {node}, kind
    assert len(links) == (1 if kind == "one way" else 4), kind
  # Disturbances have ended.
  network._until(lambda: not network._dropped_for)
