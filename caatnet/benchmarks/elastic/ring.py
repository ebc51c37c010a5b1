"""Times of all-reduces by `parallel.peers` and gloo, and of raw TCP streams."""

from collections.abc import Callable, Sequence
import concurrent.futures
import os
import pathlib
import statistics
from typing import Any

from caatnet.benchmarks.harness import scripts, timing
from caatnet.show import tables
from parallel.peers.emulation import namespaces, processes
from parallel.peers.ring import link_collectives

# Time limit of torch's processes in seconds: if one fails, the others wait.
_TORCH_S = 600.0

PeerCall = tuple[str, Callable[[int], dict[str, Any]]]


def run(config: Any) -> dict[str, Any]:
  """Measures, prints tables, and returns them as plain data.

  Args:
    config: Config like configs/benchmark/ring.py.
  """
  options = config.benchmark
  size = options.megabytes * (1 << 20) // 4
  rows = [
    row for count in options.peers
    for row in _measure_loopback(count, size, options)
  ]
  if rows:
    _show(rows, options)
  shaped = _shaped_rows(options)
  if shaped:
    tables.print_table(
      f"float32 summed between two network namespaces, "
      f"{options.shaped_rounds} rounds",
      "mbit=link, Mbit/s | rtt_ms:g=there and back, ms | megabytes=MB | "
      "num_connections | first_s | seconds:.2f | "
      "payload_mbit:.1f=payload, Mbit/s | {payload:,} + {framing:,}=bytes sent",
      shaped,
    )
  return {
    "load": timing.load_average(), "cores": os.cpu_count(), "loopback": rows,
    "shaped": shaped,
  }


def _show(rows: Sequence[dict[str, Any]], options: Any) -> None:
  tables.print_table(
    f"{options.megabytes} MB of float32 summed among peers on loopback, "
    f"{options.rounds} rounds, load {timing.load_average():.1f} of "
    f"{os.cpu_count()} cores",
    "peers | what | seconds:.3f | of_raw:.0%=raw / this | "
    "of_raw_cpu:.0%=raw / this, CPU time | additions:.0%=additions' share | "
    "payload=payload, bytes | framing=framing, bytes", rows,
  )


class Peers(processes.Peers):
  """Peer processes with links between all pairs."""

  def __init__(
    self, hosts: Sequence[str], prefixes: Sequence[Sequence[str]] = (),
    kind: str = "caatnet.benchmarks.elastic.ring_peer:RingPeer",
  ) -> None:
    names = [f"p{i}" for i in range(len(hosts))]
    super().__init__(
      kind,
      list(zip(names, hosts, strict=True)), prefixes,
    )
    self._names, self._epoch = names, 0

  def __enter__(self) -> "Peers":
    found = self.do("addresses").found
    self._members, self._raw = (
      dict(zip(self._names, addresses, strict=True))
      for addresses in zip(*found, strict=True)
    )
    return self

  def connect(self, num_connections: int, send_buffer: int = 0) -> None:
    """Opens links between all peers; the first call also raw connections."""
    self._epoch += 1
    self.do("connect", lambda _: {
      "epoch": self._epoch, "members": self._members, "raw": self._raw,
      "options": {
        "num_connections": num_connections, "send_buffer": send_buffer
      },
    })


def _peer_calls(count: int, size: int, block: int) -> dict[str, PeerCall]:
  """Returns by row name what peers call: (method, rank -> its arguments).

  ``count`` peers have arrays of ``size`` elements, sent in blocks of ``block``
  bytes.

  Raw streams send the bytes of a sum between the same arrays, without adding:
  in both directions of a ring, or between all pairs.
  """
  # A ring all-reduce sends 2 (n - 1) / n of the 4 * size bytes per peer, half
  # in each direction.
  half = 4 * size * (count - 1) // count

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

  return {
    "raw, ring": ("raw", streams), "ring": ("sum", summed("ring")),
    "raw, pairs": ("raw", pairs), "direct": ("sum", summed("direct")),
    "four at once": (
      "several", lambda _: {"count": 4, "block_bytes": block}
    ),
    "additions": (
      "add", lambda _: {"size": half // 4, "block_bytes": block}
    ),
  }


def _measure_loopback(
  count: int, size: int, options: Any
) -> list[dict[str, Any]]:
  """Measures all-reduces of ``count`` peers on loopback; returns table rows.

  Measurements of raw streams, sums and bare additions alternate. The first
  round touches new memory and is not counted.
  """
  orders = _peer_calls(count, size, options.block_bytes)
  with Peers(["127.0.0.1"] * count) as peers:
    peers.do("arrays", lambda _: {"size": size})
    peers.connect(1, options.send_buffer)
    done = timing.in_turns(
      {
        name: lambda order=order: peers.do(*order)
        for name, order in orders.items()
      },
      options.rounds, label=f"{count} peers",
    )
  # Fails if a sum has not sent the bytes that the closed formula gives.
  counted = {
    name: _check_sent_bytes(name, size, each.found, options.block_bytes)
    for name, (order, _) in orders.items() if order == "sum"
    for each in done[name]
  }
  taken = {
    name: [(each.seconds, each.cpu_s) for each in found]
    for name, found in done.items()
  }
  middle = {
    name: tuple(statistics.median(v) for v in zip(*values, strict=True))
    for name, values in taken.items()
  }
  rows = []
  for name, (seconds, cpu) in middle.items():
    # Each order is compared with raw streams over the same connections.
    raw = middle["raw, pairs" if "direct" in name else "raw, ring"]
    sums = name in counted
    rows.append({
      "peers": count, "what": name, "seconds": seconds, "cpu_s": cpu,
      "of_raw": raw[0] / seconds, "of_raw_cpu": raw[1] / cpu,
      "additions": middle["additions"][1] / cpu if sums else None,
      "all": taken[name], **counted.get(name, {}),
    })
  others = {}
  if options.gloo:
    others["jax's gloo"] = _time_jax_gloo(count, size, options.rounds)
  if options.python_path:
    others["torch's gloo"] = _time_torch_gloo(count, size, options)
  for name, found in others.items():
    seconds = statistics.median(found)
    rows.append({
      "peers": count, "what": name, "seconds": seconds,
      "of_raw": middle["raw, ring"][0] / seconds, "of_raw_cpu": None,
      "additions": None,
    })
  return rows


def _check_sent_bytes(
  order: str, size: int, found: Sequence[dict[str, int]], block: int
) -> dict[str, int]:
  """Compares the bytes that an all-reduce sent with a formula.

  ``found`` has each peer's bytes by kind; returns those of peer 0. Arrays have
  ``size`` elements and are sent in blocks of ``block`` bytes.
  """
  stated = [
    link_collectives.sum_sent_bytes(order, size, len(found), rank, block)
    for rank in range(len(found))
  ]
  for rank, (there, wanted) in enumerate(zip(found, stated, strict=True)):
    if (there["payload"], there["framing"]) != wanted:
      raise RuntimeError(
        f"{order}: peer {rank} sent {there['payload']:,} bytes of payload and "
        f"{there['framing']:,} of framing, but the formula gives {wanted[0]:,} "
        f"and {wanted[1]:,}"
      )
  kernel = sum(there["kernel"] for there in found)
  if kernel != sum(map(sum, stated)):
    raise RuntimeError(
      f"{order}: the kernel has counted {kernel:,} bytes from all peers, not "
      f"{sum(map(sum, stated)):,}"
    )
  return {"payload": stated[0][0], "framing": stated[0][1]}


def _time_jax_gloo(count: int, size: int, rounds: int) -> list[float]:
  """Returns the seconds of each all-reduce by jax in ``count`` processes."""
  port = processes.free_port()
  with processes.Peers(
    "caatnet.benchmarks.elastic.ring_peer:Gloo",
    [(i, count, port) for i in range(count)], environment={}, quiet=True,
  ) as peers:
    return peers.do(
      "sums", lambda _: {"size": size, "rounds": rounds}
    ).found[0]


def _time_torch_gloo(count: int, size: int, options: Any) -> list[float]:
  """Returns the seconds of each all-reduce by torch in the slowest process.

  Raises:
    ValueError: The Python cannot be run, or lacks torch.
  """
  script = pathlib.Path(__file__).with_name("ring_torch.py")
  asked = {
    "count": count, "size": size, "rounds": options.rounds,
    "port": processes.free_port(),
  }
  with concurrent.futures.ThreadPoolExecutor(count) as threads:
    found = list(threads.map(
      lambda rank: scripts.ask_script(
        [options.python_path, "-P", str(script)], asked | {"rank": rank},
        limit_s=_TORCH_S,
      )["seconds"], range(count),
    ))
  return [max(each) for each in zip(*found, strict=True)]


def _shaped_rows(options: Any) -> list[dict[str, Any]]:
  """Measures sums over links with a rate and a delay; [] without root."""
  if not options.links:
    return []
  if os.geteuid():
    print("links are shaped by root only: config.benchmark.links is left out")
    return []
  rows = []
  block = options.shaped_block_bytes
  for link in options.links:
    size = link["megabytes"] * (1 << 20) // 4
    with namespaces.delayed_link(link["mbit"], link["rtt_ms"]) as (
      hosts, prefixes
    ), Peers(hosts, prefixes) as peers:
      peers.do("arrays", lambda _, size=size: {"size": size})
      for num_connections in options.num_connections:
        peers.connect(num_connections)
        done = [
          peers.do("sum", lambda _: {"order": "ring", "block_bytes": block})
          for _ in range(options.shaped_rounds)
        ]
        for each in done:
          sent = _check_sent_bytes("ring", size, each.found, block)
        taken = [each.seconds for each in done]
        seconds = statistics.median(taken)
        rows.append({
          **link, "num_connections": num_connections, "first_s": taken[0],
          "seconds": seconds,
          # In total, each of the two peers sends the bytes of one array.
          "payload_mbit": 32 * size / seconds / 1e6, **sent,
        })
  return rows
