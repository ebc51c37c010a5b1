"""Utilisation over slow links: the paper's table, properties of schedules."""

import itertools
import math

import numpy as np
import pytest

from caatnet.studies.utilisation import predictor as u
from caatnet.studies.utilisation import published, recommend

MODEL = u.Model(1e9, 12, 0.1)
GRID = np.logspace(8, 12, 25)
PERIOD = 30
METHODS = {
  **u.paper_methods(MODEL.num_layers, PERIOD),
  "overlap without fragments": u.SyncMethod(PERIOD, overlap_steps=3),
  "fragments that differ in size": u.SyncMethod(PERIOD, 5, 2, 8),
  "H = 2": u.SyncMethod(2, overlap_steps=1),
  "longest overlap": u.SyncMethod(PERIOD, 4, PERIOD - 1),
}
each_method = pytest.mark.parametrize(
  "method", METHODS.values(), ids=METHODS.keys()
)


@pytest.mark.parametrize(
  ("factor", "exact", "near"),
  [(1.0, 3, 72), (published.FITTED_VOLUME_FACTOR, 70, 75)],
  ids=["nothing fitted", "fitted"],
)
def test_cells_of_table_4_are_reproduced(factor, exact, near):
  cells = published.compare_with_table_4(factor)
  assert len(cells) == 75
  assert sum(c.notches == 0 for c in cells) == exact
  assert sum(abs(c.notches) <= 1 for c in cells) == near
  assert sum(c.ours == c.published for c in cells) == exact


def test_published_cells_are_points_of_the_grid():
  """Detects most misprints in our copy of the table."""
  printed = {published.printed_gbit_s(x) for x in u.bandwidth_grid()}
  for rows in published.PUBLISHED.values():
    assert {x for row in rows for x in row} <= printed
    for row in rows:
      assert list(row) == sorted(row)  # a higher target needs more
    for above, below in itertools.pairwise(rows):  # a better method, less
      assert all(b <= a for a, b in zip(above, below, strict=True))


def test_unreachable_target_has_no_cell():
  slow = u.Model(1e15, 4, 0.1)
  assert u.lowest_bandwidth_indices(
    slow, u.diloco(10), [1e-9, 0.99]
  ) == [0, None]


@pytest.mark.parametrize("num_layers", [1, 2, 7, 108])
def test_step_graph_has_4l_minus_1_nodes(num_layers):
  graph = u.step_graph(num_layers)
  assert len(graph) == 4 * num_layers - 1
  counts = {k: sum(n.kind == k for n in graph) for k in {n.kind for n in graph}}
  assert counts.get(u.BACKWARD_ACTIVATIONS, 0) == num_layers - 1
  for kind in (u.FORWARD, u.BACKWARD_PARAMETERS, u.REDUCTION):
    assert counts[kind] == num_layers
  for place, node in enumerate(graph):
    assert all(earlier < place for earlier in node.after)


def test_nodes_depend_on_the_nodes_that_they_read():
  graph = u.step_graph(3)
  edges = {
    (node.kind, node.layer): [
      (graph[a].kind, graph[a].layer) for a in node.after
    ]
    for node in graph
  }
  assert edges == {
    (u.FORWARD, 0): [],
    (u.FORWARD, 1): [(u.FORWARD, 0)],
    (u.FORWARD, 2): [(u.FORWARD, 1)],
    (u.BACKWARD_ACTIVATIONS, 2): [(u.FORWARD, 2)],
    (u.BACKWARD_PARAMETERS, 2): [(u.FORWARD, 2)],
    (u.BACKWARD_ACTIVATIONS, 1): [(u.BACKWARD_ACTIVATIONS, 2)],
    (u.BACKWARD_PARAMETERS, 1): [(u.BACKWARD_ACTIVATIONS, 2)],
    (u.BACKWARD_PARAMETERS, 0): [(u.BACKWARD_ACTIVATIONS, 1)],
    **{
      (u.REDUCTION, layer): [(u.BACKWARD_PARAMETERS, layer)]
      for layer in range(3)
    },
  }


def recursion(model, method, bandwidth, latency_s):
  """Returns utilisation by a plain recursion over layers and many periods."""
  layers, period, tau = (
    model.num_layers, method.sync_every, method.overlap_steps
  )
  c = model.step_seconds / (3 * layers)
  d = method.bits * model.parameters / (layers * bandwidth)
  ready, gates = [0.0] * layers, {}
  now = link = 0.0
  starts = [0.0]
  for step in range(400 * period):
    now = max(now, gates.get(step, 0.0))
    for layer in range(layers):
      now = max(now, ready[layer]) + c
    for layer in reversed(range(layers)):
      now += 2 * c if layer else c
      fragment = layer % method.num_fragments
      offset = fragment * (period // (method.num_fragments + 1))
      if step % period == offset:
        link = max(link, now) + d
        if tau:
          gates[step + 1 + tau] = link + latency_s
        else:
          ready[layer] = link + latency_s
    if (step + 1) % period == 0:
      starts.append(now)
  return period * (3 * layers - 1) * c / (starts[-1] - starts[-2])


@each_method
@pytest.mark.parametrize("latency_s", [0.0, 0.03])
@pytest.mark.parametrize("bandwidth", [1e9, 6e9, 1e11])
def test_utilisation_equals_the_plain_recursion(method, bandwidth, latency_s):
  model = u.Model(1e9, 6, 0.1)
  if method.num_fragments == 4:
    method = u.SyncMethod(7, 2, 6)  # the recursion takes 400 periods
  elif method.sync_every == PERIOD:
    method = u.SyncMethod(
      12, method.num_fragments, method.overlap_steps, method.bits
    )
  found = u.simulate(model, method, bandwidth, latency_s=latency_s)
  assert found.utilisation[0] == pytest.approx(
    recursion(model, method, bandwidth, latency_s), rel=1e-7
  )


@pytest.mark.parametrize("period", [1, 2, 10])
def test_one_layer_equals_the_value_by_hand(period):
  """Two nodes of a third of a second, then the link, then its latency."""
  model = u.Model(1e9, 1, 1.0)
  timeline = u.simulate(
    model, u.diloco(period), 32e9, volume_factor=0.5, latency_s=0.1
  )
  assert timeline.elapsed_s[0] == pytest.approx(period * 2 / 3 + 0.25 + 0.1)
  assert timeline.compute_s == pytest.approx(period * 2 / 3)


@each_method
def test_infinite_bandwidth_is_never_waited_for(method):
  timeline = u.simulate(MODEL, method, math.inf)
  assert timeline.utilisation[0] == pytest.approx(1, abs=1e-9)
  assert timeline.link_busy_s[0] == 0


@each_method
def test_very_slow_link_determines_the_time(method):
  """Elapsed time tends to the link's time; a share of compute remains."""
  timeline = u.simulate(MODEL, method, 1e4)
  assert timeline.elapsed_s[0] == pytest.approx(
    method.bits * MODEL.parameters / 1e4, rel=1e-4
  )


@each_method
def test_more_bandwidth_never_hurts(method):
  values = u.simulate(MODEL, method, np.logspace(7, 12, 400)).utilisation
  assert np.all(np.diff(values) > -1e-9)
  assert np.all(values <= 1 + 1e-9)
  assert values[-1] > 10 * values[0]


@pytest.mark.parametrize("fragments", [1, 4, 5])
def test_more_overlap_never_hurts(fragments):
  values = np.stack([
    u.simulate(MODEL, u.SyncMethod(PERIOD, fragments, tau), GRID).utilisation
    for tau in range(PERIOD)
  ])
  assert np.all(np.diff(values, axis=0) > -1e-9)
  assert np.max(values[-1] - values[0]) > 0.05  # and helps at some bandwidth


@each_method
def test_quarter_of_the_bits_equals_four_times_the_bandwidth(method):
  wide = u.SyncMethod(
    method.sync_every, method.num_fragments, method.overlap_steps, 16
  )
  narrow = u.SyncMethod(
    method.sync_every, method.num_fragments, method.overlap_steps, 4
  )
  np.testing.assert_allclose(
    u.simulate(MODEL, narrow, GRID / 4).utilisation,
    u.simulate(MODEL, wide, GRID).utilisation,
    rtol=1e-9,
  )


def test_degenerate_methods_are_equal():
  """DiLoCo with H = 1 is data parallelism; one fragment is no streaming."""
  np.testing.assert_array_equal(
    u.simulate(MODEL, u.data_parallel(), GRID).elapsed_s,
    u.simulate(MODEL, u.diloco(1), GRID).elapsed_s,
  )
  two_layers = u.Model(1e9, 2, 0.1)
  np.testing.assert_array_equal(
    u.simulate(two_layers, u.streaming(PERIOD, 2), GRID).elapsed_s,
    u.simulate(two_layers, u.diloco(PERIOD), GRID).elapsed_s,
  )


@each_method
def test_each_layer_is_sent_once_per_period(method):
  sent = [method.layers_sent(s, 12) for s in range(method.sync_every)]
  assert sorted(itertools.chain(*sent)) == list(range(12))
  again = method.layers_sent(method.sync_every, 12)
  assert again == sent[0]
  assert again


@each_method
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_link_is_busy_for_the_time_of_its_bytes(method, factor):
  """Busy seconds = bits / bandwidth, at most the period."""
  load = method.sync_every * MODEL.compute_seconds
  even = factor * method.bits * MODEL.parameters / load
  bandwidth = np.concatenate([GRID, even * np.linspace(0.9, 1.1, 101)])
  timeline = u.simulate(MODEL, method, bandwidth, volume_factor=factor)
  np.testing.assert_allclose(
    timeline.link_busy_s,
    factor * method.bits * MODEL.parameters / bandwidth,
    rtol=1e-9,
  )
  assert np.all(timeline.link_busy_s <= timeline.elapsed_s * (1 + 1e-12))


def test_strides_of_fragments_equal_the_paper():
  """Table 4 synchronises some fragment every 11, 5 and 2 steps."""
  for num_layers, stride in ((24, 11), (48, 5), (108, 2)):
    method = u.streaming(100, num_layers)
    steps = [s for s in range(100) if method.layers_sent(s, num_layers)]
    assert steps == [stride * p for p in range(num_layers // 3)]


CHOICES = {
  "sync_every": (1, 10, 30, 100), "overlap_steps": (0, 1, 5), "bits": (16, 4)
}


@pytest.mark.parametrize("latency_s", [0.0, 0.2])
@pytest.mark.parametrize("target", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("bandwidth", [1e9, 5e9, 1e10, 5e10, 1e12])
def test_recommendation_is_the_first_that_reaches_the_target(
  bandwidth, target, latency_s
):
  found = recommend.recommend(
    MODEL, bandwidth, target, latency_s=latency_s, **CHOICES
  )
  everything = [
    u.SyncMethod(*setting)
    for setting in itertools.product((1, 10, 30, 100), (1, 4), (0, 1, 5),
                                     (16, 4))
    if setting[0] > 1 or setting == (1, 1, 0, 16)
  ]
  reached = [
    m for m in everything
    if u.simulate(
      MODEL, m, bandwidth, latency_s=latency_s
    ).utilisation[0] >= target
  ]
  if not reached:
    assert found is None
    assert (bandwidth, target) in ((1e9, 0.9), (1e9, 0.999))
    return
  assert found.utilisation >= target
  assert found.method == min(
    reached,
    key=lambda m: (m.sync_every, m.overlap_steps, -m.bits, m.num_fragments),
  )


def test_no_recommendation_if_the_link_is_too_slow():
  assert recommend.recommend(MODEL, 1e7, 0.5, **CHOICES) is None
  fewest = recommend.fewest_steps(MODEL, 1e7, 0.5, bits=4)
  # longest possible overlap
  method = u.SyncMethod(fewest - 1, 4, fewest - 2, 4)
  assert u.simulate(MODEL, method, 1e7).utilisation[0] < 0.5
  method = u.SyncMethod(fewest, 4, fewest - 1, 4)
  assert u.simulate(MODEL, method, 1e7).utilisation[0] >= 0.5


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: u.Model(0, 12, 0.1), "parameters=0 must be positive"),
    (lambda: u.Model(1e9, 1.5, 0.1), "num_layers=1.5 must be an integer"),
    (lambda: u.Model(1e9, 12, math.nan), "step_seconds=nan"),
    (lambda: u.SyncMethod(0), "sync_every=0 must be at least 1"),
    (lambda: u.SyncMethod(10, 10), "num_fragments=10 must be less than"),
    (lambda: u.SyncMethod(10, 2, 10), "overlap_steps=10 must be less than"),
    (lambda: u.SyncMethod(bits=0), "bits=0 must be positive"),
    (lambda: u.simulate(MODEL, u.SyncMethod(), [1.0, 0.0]), "bandwidth=0 must"),
    (
      lambda: u.simulate(MODEL, u.SyncMethod(), 1.0, latency_s=-1),
      "latency_s=-1"
    ),
    (lambda: recommend.recommend(MODEL, 1e9, 1.0), r"target=1 must lie"),
    (lambda: recommend.recommend(MODEL, 1e9, 0.5, bits=()), r"bits=\(\)"),
  ],
)
def test_invalid_number_is_named(call, message):
  with pytest.raises(ValueError, match=message):
    call()
