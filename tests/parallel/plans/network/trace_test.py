"""Traces of schedules, written and read back."""

import numpy as np
import pytest

from parallel.plans.network import perfetto_trace, simulate, trace
from parallel.plans.network.routed import on_links
from parallel.plans.pipeline import simulate as pipeline
from parallel.plans.pipeline.builders import PipelineSize, build
from parallel.plans.schedules import builders
from parallel.plans.topology import builders as topologies
from tests import traces


def written(path, drawn):
  rows, bars = drawn
  perfetto_trace.write(bars, path, "a schedule", rows)
  return traces.read(path)


def test_messages_are_on_the_row_of_their_link_in_order(tmp_path):
  net = topologies.ring(4)
  routed = on_links(builders.build("ring", net), net)
  timeline = simulate.events(routed, 4 * 1_000_000)
  title, rows, bars = written(tmp_path / "t", trace.message_bars(timeline))
  assert title == "a schedule"
  assert rows == [f"{x.source} -> {x.destination}" for x in net.links]
  busy = latency = 0
  for link, name in zip(net.links, rows, strict=True):
    before = 0.0
    for bar in bars[name]:
      args = bar.details
      # On a ring, each message goes to a neighbour, over a single link.
      assert (args["source"], args["destination"]) == (
        link.source, link.destination
      )
      # Nanoseconds of a message on an idle link: bytes / (bytes / s).
      assert bar.end - bar.start == pytest.approx(
        1e9 * args["bytes"] / link.bandwidth, abs=1
      )
      assert bar.start >= before
      before = bar.end
      assert args["arrival_ns"] == pytest.approx(
        before + 1e9 * link.latency_s, abs=2
      )
      assert args["waited_ns"] >= 0
      assert bar.name.startswith("chunk ")
      busy, latency = bar.end - bar.start, 1e9 * link.latency_s
  # A ring is a chain of rounds of one message and one latency each.
  rounds = {b.details["round"] for one in bars.values() for b in one}
  assert timeline.finish_ns == pytest.approx(
    len(rounds) * (busy + latency), rel=1e-3
  )


def test_waiting_time_is_caused_by_earlier_messages(tmp_path):
  """A switch port serves messages one after another."""
  net = topologies.switch(3)
  routed = on_links(builders.build("direct", net), net)
  timeline = simulate.events(routed, 3 * 1_000_000)
  _, _, bars = written(tmp_path / "t", trace.message_bars(timeline))
  waited = sum(b.details["waited_ns"] for one in bars.values() for b in one)
  assert waited > 0
  np.testing.assert_array_equal(timeline.waiting_ns.sum(), waited)


def test_actions_are_on_their_stage_and_hops_on_its_links(tmp_path):
  size = PipelineSize(3, 4)
  timeline = pipeline.events(
    build("1f1b", *size), pipeline.even_part_times(size, 1.0, 1.5, 0.5),
    pipeline.even_stage_links(3, busy_s=0.25, latency_s=0.5),
  )
  _, rows, bars = written(tmp_path / "t", trace.action_bars(timeline))
  assert rows == [
    name for s in range(3)
    for name in (f"stage {s}", f"{s} to the next", f"{s} to the one before")
  ]
  for stage in range(3):
    forward = [
      b for b in bars[f"stage {stage}"] if b.name.startswith("forward")
    ]
    assert [b.details["microbatch"] for b in forward] == [0, 1, 2, 3]
    assert {b.end - b.start for b in forward} == {10**9}
    for name, kind, last in (
      (f"{stage} to the next", "forward", stage == 2),
      (f"{stage} to the one before", "backward", stage == 0),
    ):
      # The last stage sends no activations, the first no gradients.
      assert len(bars[name]) == (0 if last else 4)
      for bar in bars[name]:
        assert bar.name.startswith(kind)
        assert bar.end - bar.start == 250_000_000
        assert bar.details["arrival_s"] == pytest.approx(
          bar.start / 1e9 + 0.75
        )


def test_bars_of_chunks_have_the_times_and_places_of_their_actions(tmp_path):
  table = build("interleaved_1f1b", 2, 4, 2)
  timeline = pipeline.events(
    table,
    pipeline.even_part_times(PipelineSize(2, 4, 2), 1.0, 1.5, 0.5, (1.0, 3.0)),
    pipeline.even_stage_links(2, busy_s=0.25, latency_s=0.5),
  )
  rows, bars = trace.action_bars(timeline)
  bars = sorted(bars, key=lambda bar: bar.row)  # the last one ends earlier
  end_s = perfetto_trace.write(bars, tmp_path / "t", "a schedule", rows)
  assert end_s == timeline.finish_s
  _, _, found = traces.read(tmp_path / "t")
  for stage in range(2):
    here, actions = found[f"stage {stage}"], table.actions(stage)
    assert len(actions) == 16
    for bar, (tick, action) in zip(here, actions, strict=True):
      kind = action.kind.name.lower()
      assert bar.name == f"{kind} {action.microbatch}"
      assert bar.details == {"microbatch": action.microbatch, "tick": tick,
                             "chunk": action.chunk}
      for shown, seconds in ((bar.start, timeline.start_s),
                             (bar.end, timeline.end_s)):
        assert shown == pytest.approx(1e9 * seconds[tick, stage], abs=1)


def test_a_message_without_a_duration_is_before_the_one_it_precedes(tmp_path):
  """Messages of one byte take less than a nanosecond on fast links."""
  net = topologies.ring(4)
  routed = on_links(builders.build("ring", net), net)
  timeline = simulate.events(routed, 4)
  assert (timeline.start_ns == timeline.end_ns).any()
  _, _, bars = written(tmp_path / "t", trace.message_bars(timeline))
  assert sum(map(len, bars.values())) == len(routed.hop_links)
