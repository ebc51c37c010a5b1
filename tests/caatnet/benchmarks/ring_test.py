"""Benchmark of sums over links: its raw streams send the bytes of the sums."""

import os
import sys
import types

import pytest

from caatnet.benchmarks.elastic import ring
from configs.benchmark import ring as config_of
from parallel.peers.ring import link_collectives
from tests.caatnet.benchmarks.printed import rows_of

SIZE, BLOCK = 1200, 256

# Python that answers as the script of torch would, rank 1 the slowest.
TORCH = """#!{python}
import json, sys
assert sys.argv[1] == "-P" and sys.argv[2].endswith("ring_torch.py")
asked = json.loads(input())
assert (asked["count"], asked["size"], asked["rounds"]) == (2, 1 << 19, 1)
print(json.dumps({{"seconds": [2.0 + asked["rank"]]}}))
"""


@pytest.mark.parametrize("count", [2, 3, 4])
def test_raw_streams_send_the_payload_of_the_sums(count):
  orders = ring._peer_calls(count, SIZE, BLOCK)
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
      payload, _ = link_collectives.sum_sent_bytes(
        name, SIZE, count, rank, BLOCK
      )
      assert payload == 2 * half
  assert set(received.values()) == {2 * half}
  # A ring adds each element of all chunks but one.
  assert orders["additions"][1](0) == {
    "size": SIZE * (count - 1) // count, "block_bytes": BLOCK
  }
  assert orders["four at once"][1](0) == {"count": 4, "block_bytes": BLOCK}


def test_bytes_other_than_the_formula_are_errors():
  """The array cannot be divided equally among three peers."""
  size = SIZE + 1
  stated = [
    link_collectives.sum_sent_bytes("ring", size, 3, rank, BLOCK)
    for rank in range(3)
  ]
  assert len({payload for payload, _ in stated}) > 1
  found = [
    {"payload": payload, "framing": framing, "kernel": payload + framing}
    for payload, framing in stated
  ]
  assert ring._check_sent_bytes("ring", size, found, BLOCK) == {
    "payload": stated[0][0], "framing": stated[0][1]
  }
  for rank, key, message in (
    (2, "payload", f"ring: peer 2 sent {stated[2][0] + 1:,} bytes of payload"),
    (0, "framing", "ring: peer 0 sent"),
    (1, "kernel", "the kernel has counted"),
  ):
    wrong = [dict(row) for row in found]
    wrong[rank][key] += 1
    with pytest.raises(RuntimeError, match=message):
      ring._check_sent_bytes("ring", size, wrong, BLOCK)


def test_links_that_are_not_shaped_have_no_rows(monkeypatch, capsys):
  class Options:
    links = ()

  assert ring._shaped_rows(Options) == []
  Options.links = ({"mbit": 10, "rtt_ms": 1, "megabytes": 1},)
  monkeypatch.setattr(ring.os, "geteuid", lambda: 1000)
  assert ring._shaped_rows(Options) == []
  assert "by root only" in capsys.readouterr().out


def test_run_has_the_bytes_of_all_sums_and_ratios_to_raw_streams(
  capsys, tmp_path
):
  python = tmp_path / "python"
  python.write_text(TORCH.format(python=sys.executable))
  python.chmod(0o755)
  config = config_of.get_config("test")
  config.benchmark.update({
    "megabytes": 2, "peers": (2,), "shaped_rounds": 2, "num_connections": (1,),
    "links": ({"mbit": 200, "rtt_ms": 4.0, "megabytes": 1},), "gloo": True,
    "python_path": str(python),
  })
  found = ring.run(config)
  rows = {row["what"]: row for row in found["loopback"]}
  for name in ("jax's gloo", "torch's gloo"):
    gloo = rows.pop(name)
    assert gloo["of_raw"] == pytest.approx(
      rows["raw, ring"]["seconds"] / gloo["seconds"]
    )
  assert gloo["seconds"] == 3.0  # of the slowest process
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
    # Processor time of additions alone, as a share of that of a sum.
    assert row["additions"] == (
      pytest.approx(rows["additions"]["cpu_s"] / row["cpu_s"])
      if name in ("ring", "direct") else None
    )
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


def test_table_of_sums_has_shares_of_raw_streams(capsys):
  rows = [
    {"peers": 4, "what": "ring", "seconds": 0.5, "of_raw": 0.75,
     "of_raw_cpu": 0.5, "additions": 0.25, "payload": 1234, "framing": 56},
    {"peers": 4, "what": "gloo", "seconds": 1.0, "of_raw": 0.375,
     "of_raw_cpu": None, "additions": None},
  ]
  ring._show(rows, types.SimpleNamespace(megabytes=256, rounds=5))
  printed = capsys.readouterr().out
  assert "256 MB of float32 summed among peers on loopback, 5 rounds" in printed
  assert rows_of(printed) == [
    ["4", "ring", "0.500", "75%", "50%", "25%", "1,234", "56"],
    ["4", "gloo", "1.000", "38%", "-", "-", "-", "-"],
  ]
