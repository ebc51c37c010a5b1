"""Benchmark of sums over links: its raw streams send the bytes of the sums."""

import os

import numpy as np
import pytest

from caatnet.benchmarks.elastic import ring, ring_orders
from caatnet.config.schema.benchmarks.swarms import RingOrders
from configs.benchmark import ring as config_of
from parallel.elastic.ring import link_collectives
from parallel.elastic.ring.times import Matrix

SIZE, BLOCK = 1200, 256


@pytest.mark.parametrize("count", [2, 3, 4])
def test_raw_streams_send_the_payload_of_the_sums(count):
  orders = ring._orders(count, SIZE, BLOCK)
  half = 4 * SIZE * (count - 1) // count
  received = dict.fromkeys(range(count), 0)
  for rank in range(count):
    kind, options = orders["raw, ring"]
    assert kind == "raw"
    plan = options(rank)["plan"]
    assert set(plan) == {
      f"p{(rank + step) % count}" for step in (-1, 1)
    } - {f"p{rank}"}
    assert sum(plan.values()) == 2 * half
    for other, size in plan.items():
      received[int(other[1:])] += size
    kind, options = orders["raw, pairs"]
    assert (kind, options(rank)["plan"]) == ("raw", {
      f"p{i}": 8 * SIZE // count for i in range(count) if i != rank
    })
    for name in ("ring", "direct"):
      kind, options = orders[name]
      assert (kind, options(rank)) == (
        "sum", {"order": name, "block_bytes": BLOCK}
      )
      payload, _ = link_collectives.sum_bytes(name, SIZE, count, rank, BLOCK)
      assert payload == 2 * half
  assert set(received.values()) == {2 * half}
  # A ring adds each element of all chunks but one.
  assert orders["additions"][1](0) == {
    "size": SIZE * (count - 1) // count, "block_bytes": BLOCK
  }
  assert orders["four at once"][1](0) == {"count": 4, "block_bytes": BLOCK}


def test_bytes_other_than_the_formula_are_errors():
  stated = [
    link_collectives.sum_bytes("ring", SIZE, 3, rank, BLOCK)
    for rank in range(3)
  ]
  found = [
    {"payload": payload, "framing": framing, "kernel": payload + framing}
    for payload, framing in stated
  ]
  assert ring._same_as_stated("ring", SIZE, found, BLOCK) == {
    "payload": stated[0][0], "framing": stated[0][1]
  }
  for rank, key, message in (
    (2, "payload", r"ring: peer 2 sent .*'payload': 6401"),
    (0, "framing", "ring: peer 0 sent"),
    (1, "kernel", "the kernel has counted"),
  ):
    wrong = [dict(row) for row in found]
    wrong[rank][key] += 1
    with pytest.raises(RuntimeError, match=message):
      ring._same_as_stated("ring", SIZE, wrong, BLOCK)


def test_links_that_are_not_shaped_have_no_rows(monkeypatch, capsys):
  class Options:
    links = ()

  assert ring._shaped_rows(Options) == []
  Options.links = ({"mbit": 10, "rtt_ms": 1, "megabytes": 1},)
  monkeypatch.setattr(ring.os, "geteuid", lambda: 1000)
  assert ring._shaped_rows(Options) == []
  assert "by root only" in capsys.readouterr().out


def test_chosen_algorithm_is_compared_with_all_others():
  """A direct exchange and the 12 rings of five peers; one pair is slow."""
  subjects = ring_orders.algorithms(5)
  assert len(subjects) == 13
  assert subjects["ring 02134"] == ("ring", (0, 2, 1, 3, 4))
  links = Matrix(np.full((5, 5), 1e6), np.zeros((5, 5)))
  done = {name: [3.0, 9.0, 4.0] for name in subjects}
  done |= {"ring 02143": [1.0, 1.5, 2.0], "direct": [2.0, 3.0, 1.0]}
  found = ring_orders.compared(links, 10**6, done)
  assert (found["chosen"], found["chosen_s"]) == ("direct", 2.0)
  assert (found["fastest"], found["fastest_s"]) == ("ring 02143", 1.5)
  assert (found["slowest_s"], found["ranks_s"]) == (4.0, 4.0)
  assert found["fastest_ring_s"] == 1.5
  # Equal rings take 8 / 5 of the array's time on one link.
  assert ring_orders._of_model(links, 10**6, done) == pytest.approx(4 / 1.6)
  assert found["modelled_s"] == pytest.approx(0.4)
  links.rates[0, 1] = links.rates[1, 0] = 1e4
  found = ring_orders.compared(links, 10**6, done)
  assert found["chosen"] not in ("direct", "ring 01234")
  assert found["direct_s"] == 2.0


def test_drawn_links_have_delays_of_pairs_and_rates_of_directions():
  links = ring_orders.drawn(3, RingOrders())
  off = ~np.eye(5, dtype=bool)
  assert ((links.rates >= 1.25e6) & (links.rates <= 25e6)).all()
  assert (links.rates != links.rates.T)[off].all()
  assert np.array_equal(links.delays, links.delays.T)
  assert set(links.delays[off]) <= {0.001, 0.02, 0.1}
  again = ring_orders.drawn(3, RingOrders())
  assert np.array_equal(links.rates, again.rates)


def test_run_has_the_bytes_of_all_sums_and_ratios_to_raw_streams(capsys):
  config = config_of.get_config("test")
  config.benchmark.update({
    "megabytes": 2, "peers": (2,), "shaped_rounds": 2, "num_connections": (1,),
    "links": ({"mbit": 200, "rtt_ms": 4.0, "megabytes": 1},), "gloo": True,
  })
  found = ring.run(config)
  rows = {row["what"]: row for row in found["loopback"]}
  gloo = rows.pop("jax's gloo")
  assert gloo["of_raw"] == pytest.approx(
    rows["raw, ring"]["seconds"] / gloo["seconds"]
  )
  assert list(rows) == [
    "raw, ring", "ring", "raw, pairs", "direct", "four at once", "additions"
  ]
  for name, row in rows.items():
    assert row["peers"] == 2
    raw = rows["raw, pairs" if name == "direct" else "raw, ring"]
    for of, taken in (("of_raw", "seconds"), ("of_raw_cpu", "cpu_s")):
      assert row[of] == pytest.approx(raw[taken] / row[taken])
    assert row["all"] == [(row["seconds"], row["cpu_s"])]
    # Of two peers each sends its array once.
    assert row.get("payload") == (2 << 20 if name in ("ring", "direct")
                                  else None)
    assert (row["additions"] is None) == (row.get("payload") is None)
  printed = capsys.readouterr().out
  assert "2 MB of float32 summed among peers on loopback" in printed
  if os.geteuid():
    assert found["shaped"] == []
    assert "links are shaped by root only" in printed
    return
  (row,) = found["shaped"]
  assert (row["mbit"], row["megabytes"], row["payload"]) == (200, 1, 1 << 20)
  # The link is slower than the machine.
  assert row["payload_mbit"] == pytest.approx(8.388608 / row["seconds"])
  assert 1 < row["payload_mbit"] < 2 * 200
