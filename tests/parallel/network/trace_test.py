"""Chrome traces, parsed in the way a trace viewer does."""

import dataclasses
import json

import numpy as np
import pytest

from parallel.network import simulate, trace
from parallel.network.routed import on_links
from parallel.pipeline import simulate as pipeline
from parallel.pipeline.builders import Size, build
from parallel.schedules import builders
from parallel.topology import builders as topologies


def read(text):
  """Returns the title, the viewer's row names in order, and bars by row name.

  A viewer groups rows by process and sorts them by thread number.
  """
  content = json.loads(text)
  events = content["traceEvents"]
  assert {e["pid"] for e in events} == {0}
  named = {
    e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"
  }
  title, = (e["args"]["name"] for e in events if e["name"] == "process_name")
  assert sorted(named) == list(range(len(named)))
  bars = {name: [] for name in named.values()}
  for e in events:
    if e["ph"] == "X":
      bars[named[e["tid"]]].append(e)
    else:
      assert e["ph"] == "M"
  return title, [named[i] for i in range(len(named))], bars


def test_messages_are_on_the_row_of_their_link_in_order():
  net = topologies.ring(4)
  routed = on_links(builders.build("ring", net), net)
  timeline = simulate.events(routed, 4 * 1_000_000)
  title, rows, bars = read(trace.to_json(timeline, "four"))
  assert title == "four"
  assert rows == [f"{x.source} -> {x.destination}" for x in net.links]
  busy = latency = 0
  for link, name in zip(net.links, rows, strict=True):
    before = 0.0
    for bar in sorted(bars[name], key=lambda b: b["ts"]):
      args = bar["args"]
      # On a ring, each message goes to a neighbour, over a single link.
      assert (args["source"], args["destination"]) == (
        link.source, link.destination
      )
      # Microseconds of a message on an idle link: bytes / (bytes / s).
      assert bar["dur"] == pytest.approx(
        1e6 * args["bytes"] / link.bandwidth, abs=1e-3
      )
      assert bar["ts"] >= before
      before = bar["ts"] + bar["dur"]
      assert args["arrival_ns"] / 1e3 == pytest.approx(
        before + 1e6 * link.latency_s, abs=2e-3
      )
      assert args["waited_ns"] >= 0
      assert bar["name"].startswith("chunk ")
      assert bar["cat"].startswith("round ")
      busy, latency = bar["dur"], 1e6 * link.latency_s
  # A ring is a chain of rounds of one message and one latency each.
  rounds = {int(b["cat"].split()[1]) for one in bars.values() for b in one}
  assert timeline.finish_ns / 1e3 == pytest.approx(
    len(rounds) * (busy + latency), rel=1e-3
  )


def test_waiting_time_is_caused_by_earlier_messages():
  """A switch port serves messages one after another."""
  net = topologies.switch(3)
  routed = on_links(builders.build("direct", net), net)
  timeline = simulate.events(routed, 3 * 1_000_000)
  _, _, bars = read(trace.to_json(timeline))
  waited = 0
  for one in bars.values():
    for bar in one:
      waited += bar["args"]["waited_ns"]
  assert waited > 0
  np.testing.assert_array_equal(timeline.waiting_ns.sum(), waited)


def test_actions_are_on_their_stage_and_hops_on_its_links():
  size = Size(3, 4)
  timeline = pipeline.events(
    build("1f1b", *size), pipeline.even_work(size, 1.0, 1.5, 0.5),
    pipeline.even_hops(3, busy_s=0.25, latency_s=0.5),
  )
  title, rows, bars = read(trace.pipeline_to_json(timeline, "1f1b"))
  assert title == "1f1b"
  assert rows == [
    name for s in range(3)
    for name in (f"stage {s}", f"{s} to the next", f"{s} to the one before")
  ]
  for stage in range(3):
    actions = bars[f"stage {stage}"]
    forward = {b["args"]["microbatch"] for b in actions
               if b["cat"] == "FORWARD"}
    assert forward == set(range(4))
    assert {b["dur"] for b in actions if b["cat"] == "FORWARD"} == {1e6}
    for name, kind, last in (
      (f"{stage} to the next", "forward", stage == 2),
      (f"{stage} to the one before", "backward", stage == 0),
    ):
      # The last stage sends no activations, the first no gradients.
      assert len(bars[name]) == (0 if last else 4)
      for bar in bars[name]:
        assert bar["name"].startswith(kind)
        assert bar["dur"] == pytest.approx(0.25e6)
        assert bar["args"]["arrival_us"] == pytest.approx(
          bar["ts"] + 0.75e6
        )


def _messages(count):
  """Returns a timeline with a number of messages, of which nothing is read."""
  net = topologies.ring(2)
  routed = dataclasses.replace(
    on_links(builders.build("ring", net), net),
    hop_links=np.zeros(count, np.int64),
  )
  none = np.zeros(0, np.int64)
  return simulate.Timeline(routed, 2, 0, none, none, none, none)


def _actions(count):
  size = Size(1, 1)
  timeline = pipeline.events(
    build("1f1b", *size), pipeline.even_work(size, 1, 1, 1),
    pipeline.even_hops(1),
  )
  schedule = dataclasses.replace(
    timeline.schedule, kinds=np.ones((count, 1), np.int8),
    chunks=np.zeros((count, 1), np.int8),
  )
  return dataclasses.replace(timeline, schedule=schedule)


@pytest.mark.parametrize(
  ("export", "make", "message"),
  [
    (trace.to_json, _messages,
     r"1000001 messages on links are .* \(1000000\): take fewer ranks"),
    (trace.pipeline_to_json, _actions,
     r"1000001 actions are .* \(1000000\): take fewer microbatches"),
  ],
)
def test_traces_that_viewers_cannot_load_are_refused(export, make, message):
  timeline = make(1_000_001)
  with pytest.raises(ValueError, match=message):
    export(timeline)


def test_trace_may_have_the_largest_number_of_bars(monkeypatch):
  net = topologies.ring(4)
  routed = on_links(builders.build("ring", net), net)
  timeline = simulate.events(routed, 4)
  monkeypatch.setattr(trace, "MAX_EVENTS", len(routed.hop_links))
  _, _, bars = read(trace.to_json(timeline))
  assert sum(map(len, bars.values())) == len(routed.hop_links)
  monkeypatch.setattr(trace, "MAX_EVENTS", len(routed.hop_links) - 1)
  with pytest.raises(ValueError, match=r"24 messages .* \(23\): take"):
    trace.to_json(timeline)
