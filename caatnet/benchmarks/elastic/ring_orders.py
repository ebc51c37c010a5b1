"""Algorithm of a sum over unequal links: the chosen one against all others."""

import itertools
import os
from typing import Any

import numpy as np

from caatnet.benchmarks.elastic.ring import Peers
from caatnet.benchmarks.harness import namespaces, timing
from caatnet.show import tables
from parallel.elastic.ring import times
from parallel.elastic.ring.bandwidth import ring_order
from parallel.elastic.ring.link_collectives import BLOCK_BYTES
from parallel.elastic.ring.times import Matrix


def run(config: Any) -> dict[str, Any]:
  """Measures, prints tables, and returns them as plain data.

  Args:
    config: Config like configs/benchmark/ring_orders.py.

  Raises:
    ValueError: This machine or this user cannot shape links.
  """
  options = config.benchmark
  rows = [_row(seed, options) for seed in options.seeds]
  _show(rows, options)
  return {
    "benchmark": "ring_orders", "load": timing.load(),
    "cores": os.cpu_count(), "rows": rows,
  }


def _show(rows: list[dict[str, Any]], options: Any) -> None:
  tables.table(
    f"{options.megabytes} MB of float32 summed among {options.peers} peers, "
    f"medians of {options.rounds} rounds, load {timing.load():.1f} of "
    f"{os.cpu_count()} cores",
    ["seed", "chosen", "s", "modelled, s", "fastest", "s", "chosen / fastest",
     "direct, s", "modelled ring, s", "fastest ring, s",
     "ring by bandwidth, s", "rank order, s", "slowest ring, s",
     "rings / modelled with true links"],
    [
      [str(r["seed"]), r["chosen"], f"{r['chosen_s']:.2f}",
       f"{r['modelled_s']:.2f}", r["fastest"], f"{r['fastest_s']:.2f}",
       f"{r['chosen_s'] / r['fastest_s']:.2f}", f"{r['direct_s']:.2f}",
       f"{r['ring_s']:.2f}", f"{r['fastest_ring_s']:.2f}",
       f"{r['bandwidth_s']:.2f}", f"{r['ranks_s']:.2f}",
       f"{r['slowest_s']:.2f}", f"{r['of_model']:.2f}"]
      for r in rows
    ],
  )


def drawn(seed: int, options: Any) -> Matrix:
  """Returns random links: rates by direction, delays by pair."""
  rng, n = np.random.default_rng(seed), options.peers
  low, high = np.log(options.mbit)
  rates = np.exp(rng.uniform(low, high, (n, n))) * 1e6 / 8
  delays = rng.choice(np.array(options.delays_ms) / 1000, (n, n))
  return Matrix(rates, np.triu(delays, 1) + np.triu(delays, 1).T)


def algorithms(count: int) -> dict[str, tuple[str, tuple[int, ...]]]:
  """Returns a direct exchange and all rings, without their reverses."""
  found = {"direct": ("direct", tuple(range(count)))}
  for rest in itertools.permutations(range(1, count)):
    if rest[0] < rest[-1]:
      found[_name((0, *rest))] = "ring", (0, *rest)
  return found


def _name(ranks: tuple[int, ...]) -> str:
  return "ring " + "".join(map(str, ranks))


def _row(seed: int, options: Any) -> dict[str, Any]:
  """Returns the row of one random set of links."""
  links, size = drawn(seed, options), options.megabytes * 10**6
  subjects = algorithms(options.peers)
  with (
    namespaces.mesh(links.rates, links.delays) as there,
    Peers(there.hosts, there.prefixes) as peers,
  ):
    peers.do("arrays", lambda _: {"size": size // 4})
    peers.connect(1)
    measured = Matrix(*map(np.array, peers.do("measure").found[0]))
    done = timing.in_turns(
      {
        name: lambda order=order, ranks=ranks: peers.do("sum", lambda _: {
          "order": order, "block_bytes": BLOCK_BYTES,
          "ranks": [f"p{i}" for i in ranks],
        }).seconds
        for name, (order, ranks) in subjects.items()
      },
      options.rounds, label=f"links {seed}",
    )
  return {
    "seed": seed, **compared(measured, size, done),
    "of_model": _of_model(links, size, done),
    "links": [x.tolist() for x in links],
    "measured": [x.tolist() for x in measured], "seconds": done,
  }


def _of_model(
  links: Matrix, size: int, done: dict[str, list[float]]
) -> float:
  """Returns the median ratio of rings' times to those of the true links."""
  rings = {
    name: ranks for name, (order, ranks) in algorithms(len(links.rates)).items()
    if order == "ring"
  }
  modelled = times.ring_seconds(
    links, np.array([*rings.values()]), size, BLOCK_BYTES
  )
  taken = [float(np.median(done[name])) for name in rings]
  return float(np.median(np.array(taken) / modelled))


def compared(
  measured: Matrix, size: int, done: dict[str, list[float]]
) -> dict[str, Any]:
  """Compares the algorithm that a measurement chooses with all others.

  Args:
    measured: Measured links.
    size: Bytes of the sum.
    done: Name of an algorithm -> seconds of its rounds.
  """
  start = ring_order(measured.rates)
  choice = times.fastest(measured, size, BLOCK_BYTES, start)
  chosen = "direct" if choice.order == "direct" else _name(choice.ranks)
  middle = {name: float(np.median(taken)) for name, taken in done.items()}
  fastest = min(middle, key=middle.__getitem__)
  rings = {k: v for k, v in middle.items() if k != "direct"}
  ring, _ = times.fastest_ring(measured, size, BLOCK_BYTES, start)
  return {
    "chosen": chosen, "chosen_s": middle[chosen],
    "modelled_s": choice.seconds,
    "fastest": fastest, "fastest_s": middle[fastest],
    "direct_s": middle["direct"], "bandwidth_s": middle[_name(start)],
    "ranks_s": middle[_name(tuple(range(len(start))))],
    "slowest_s": max(rings.values()), "ring_s": middle[_name(ring)],
    "fastest_ring_s": min(rings.values()),
  }
