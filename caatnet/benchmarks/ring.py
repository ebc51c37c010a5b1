"""Times sums over `parallel.elastic`'s links beside raw streams and gloo."""

from collections.abc import Callable, Sequence
import json
import os
import socket
import statistics
import subprocess
import sys
from typing import Any

from rich.progress import track

from caatnet.benchmarks import slow_link
from caatnet.show import tables
from parallel.elastic.ring import link_collectives


def run(config: Any) -> dict[str, Any]:
  """Measures, prints tables, and returns them as plain data.

  Args:
    config: A config like configs/benchmark/ring.py.
  """
  options = config.benchmark
  size = options.megabytes * (1 << 20) // 4
  rows = [
    row for count in options.peers
    for row in _on_loopback(count, size, options)
  ]
  if rows:
    _show(rows, options)
  shaped = _shaped_rows(options)
  if shaped:
    tables.table(
      f"float32 summed between two network namespaces, "
      f"{options.shaped_rounds} rounds",
      ["link, Mbit/s", "there and back, ms", "MB", "connections", "first, s",
       "seconds", "payload, Mbit/s", "bytes sent"],
      [
        [f"{r['mbit']:,}", f"{r['rtt_ms']:g}", str(r["megabytes"]),
         str(r["lanes"]), f"{r['first_s']:.2f}", f"{r['seconds']:.2f}",
         f"{r['payload_mbit']:.1f}", f"{r['payload']:,} + {r['framing']:,}"]
        for r in shaped
      ],
    )
  return {
    "load": os.getloadavg(), "cores": os.cpu_count(), "loopback": rows,
    "shaped": shaped,
  }


def _show(rows: Sequence[dict[str, Any]], options: Any) -> None:
  tables.table(
    f"{options.megabytes} MB of float32 summed among peers on loopback, "
    f"{options.rounds} rounds, load {os.getloadavg()[0]:.1f} of "
    f"{os.cpu_count()} cores",
    ["peers", "what", "seconds", "raw / this", "raw / this, CPU time",
     "additions' share", "bytes sent"],
    [
      [str(r["peers"]), r["what"], f"{r['seconds']:.3f}",
       f"{r['of_raw']:.0%}",
       f"{r['of_raw_cpu']:.0%}" if r["of_raw_cpu"] else "-",
       f"{r['additions']:.0%}" if r["additions"] else "-",
       f"{r['payload']:,} + {r['framing']:,}" if "payload" in r else "-"]
      for r in rows
    ],
  )


class _Peers:
  """Processes of `caatnet.benchmarks.ring_peers`."""

  def __init__(
    self, hosts: Sequence[str], prefixes: Sequence[Sequence[str]] = ()
  ) -> None:
    self.names = [f"p{i}" for i in range(len(hosts))]
    self._processes = [
      subprocess.Popen(
        [*prefix, sys.executable, "-m", "caatnet.benchmarks.ring_peers", name,
         host],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
      )
      for name, host, prefix in zip(
        self.names, hosts, prefixes or [()] * len(hosts), strict=True
      )
    ]
    there = [json.loads(p.stdout.readline()) for p in self._processes]
    self._members = dict(zip(self.names, [a for a, _ in there], strict=True))
    self._raw = dict(zip(self.names, [b for _, b in there], strict=True))
    self._epoch = 0

  def __enter__(self) -> "_Peers":
    return self

  def __exit__(self, *_: Any) -> None:
    for process in self._processes:
      process.stdin.close()
    for process in self._processes:
      try:
        process.wait(10)
      except subprocess.TimeoutExpired:
        process.kill()

  def do(
    self, name: str, arguments: Callable[[int], dict[str, Any]]
  ) -> tuple[float, float, list[Any]]:
    """Gives all an order; returns seconds, CPU seconds, and their answers."""
    for i, process in enumerate(self._processes):
      process.stdin.write(json.dumps([name, arguments(i)]) + "\n")
      process.stdin.flush()
    lines = [process.stdout.readline() for process in self._processes]
    if not all(lines):
      raise RuntimeError(f"a peer died at {name}")
    found = [json.loads(line) for line in lines]
    return (
      max(f["end"] for f in found) - min(f["start"] for f in found),
      sum(f["cpu_s"] for f in found), [f["found"] for f in found],
    )

  def connect(self, lanes: int, send_buffer: int = 0) -> None:
    """Makes links of a new epoch; raw connections with the first one."""
    self._epoch += 1
    self.do("connect", lambda _: {
      "epoch": self._epoch, "members": self._members, "raw": self._raw,
      "options": {"lanes": lanes, "send_buffer": send_buffer},
    })


def _on_loopback(
  count: int, size: int, options: Any
) -> list[dict[str, Any]]:
  """Returns rows of one number of peers.

  Raw streams, sums and additions alone take turns, so that what else the
  machine does meets all of them. Raw streams take the ways of a ring, half of
  the bytes in each direction, from and to the arrays of the sum.
  """
  half = 4 * size * (count - 1) // count
  block = options.block_bytes

  def streams(rank: int) -> dict[str, Any]:
    plan: dict[str, int] = {}
    for other in ((rank - 1) % count, (rank + 1) % count):
      plan[f"p{other}"] = plan.get(f"p{other}", 0) + half
    return {"plan": plan}

  def pairs(rank: int) -> dict[str, Any]:
    return {
      "plan": {
        f"p{i}": 2 * (4 * size // count) for i in range(count) if i != rank
      }
    }

  def summed(order: str) -> Callable[[int], dict[str, Any]]:
    return lambda _: {"order": order, "block_bytes": block}

  jobs = {
    "raw, ring": ("raw", streams), "ring": ("sum", summed("ring")),
    "raw, pairs": ("raw", pairs), "direct": ("sum", summed("direct")),
    "four at once": (
      "several", lambda _: {"count": 4, "block_bytes": block}
    ),
    "additions": (
      "add", lambda _: {"size": half // 4, "block_bytes": block}
    ),
  }
  taken: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
  rows = []
  with _Peers(["127.0.0.1"] * count) as peers:
    peers.do("arrays", lambda _: {"size": size})
    peers.connect(1, options.send_buffer)
    counted: dict[str, dict[str, int]] = {}
    turns = range(options.rounds + 1)
    for turn in track(turns, f"{count} peers", transient=True):
      for name, (order, arguments) in jobs.items():
        seconds, cpu, found = peers.do(order, arguments)
        if turn:  # the first one touches new memory
          taken[name].append((seconds, cpu))
        if order == "sum":
          counted[name] = _same_as_stated(name, size, found, block)
  middle = {
    name: tuple(statistics.median(v) for v in zip(*values, strict=True))
    for name, values in taken.items()
  }
  for name, (seconds, cpu) in middle.items():
    raw = middle["raw, pairs" if "direct" in name else "raw, ring"]
    sums = name in counted
    rows.append({
      "peers": count, "what": name, "seconds": seconds, "cpu_s": cpu,
      "of_raw": raw[0] / seconds, "of_raw_cpu": raw[1] / cpu,
      "additions": middle["additions"][1] / cpu if sums else None,
      "all": taken[name], **counted.get(name, {}),
    })
  if options.gloo:
    seconds = statistics.median(_gloo(count, size, options.rounds))
    rows.append({
      "peers": count, "what": "jax's gloo", "seconds": seconds,
      "of_raw": middle["raw, ring"][0] / seconds, "of_raw_cpu": None,
      "additions": None,
    })
  return rows


def _same_as_stated(
  order: str, size: int, found: Sequence[dict[str, int]], block: int
) -> dict[str, int]:
  """Compares what peers counted, and their kernel, with the formula."""
  stated = [
    link_collectives.sum_bytes(order, size, len(found), rank, block)
    for rank in range(len(found))
  ]
  for rank, (there, wanted) in enumerate(zip(found, stated, strict=True)):
    if (there["payload"], there["framing"]) != wanted:
      raise RuntimeError(f"{order}: peer {rank} sent {there}, not {wanted}")
  kernel = sum(there["kernel"] for there in found)
  if kernel != sum(map(sum, stated)):
    raise RuntimeError(f"{order}: the kernel has counted {kernel:,} bytes")
  return {"payload": stated[0][0], "framing": stated[0][1]}


def _gloo(count: int, size: int, rounds: int) -> list[float]:
  """Returns the seconds of jax's all-reduces, in processes of their own."""
  with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
  processes = [
    subprocess.Popen(
      [sys.executable, "-m", "caatnet.benchmarks.ring_gloo",
       *map(str, (i, count, port, size, rounds))],
      stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )
    for i in range(count)
  ]
  answers = [process.communicate()[0] for process in processes]
  if not answers[0]:
    raise RuntimeError("jax's processes have not answered")
  return json.loads(answers[0].splitlines()[-1])


def _shaped_rows(options: Any) -> list[dict[str, Any]]:
  """Returns rows of links with a rate and a delay; [] without root."""
  if not options.links:
    return []
  if os.geteuid():
    print("links are shaped by root only: left out")
    return []
  rows = []
  block = options.shaped_block_bytes
  for link in options.links:
    size = link["megabytes"] * (1 << 20) // 4
    with slow_link.namespaces(link["mbit"], link["rtt_ms"]) as (
      hosts, prefixes
    ), _Peers(hosts, prefixes) as peers:
      peers.do("arrays", lambda _, size=size: {"size": size})
      for lanes in options.lanes:
        peers.connect(lanes)
        taken = []
        for _ in range(options.shaped_rounds):
          seconds, _, found = peers.do(
            "sum", lambda _: {"order": "ring", "block_bytes": block}
          )
          taken.append(seconds)
          sent = _same_as_stated("ring", size, found, block)
        seconds = statistics.median(taken)
        rows.append({
          **link, "lanes": lanes, "first_s": taken[0], "seconds": seconds,
          # Each of two peers sends the array once in all.
          "payload_mbit": 32 * size / seconds / 1e6, **sent,
        })
  return rows
